"""The languages that engines speak, each behind `workers.wires.base.Wire`; `workers.engine_client` picks one."""

from __future__ import annotations
