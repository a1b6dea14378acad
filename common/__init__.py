"""What every process shares: records, states, settings, the database, the weights folder. Knows no torch, no queue."""

from __future__ import annotations
