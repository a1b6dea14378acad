"""Checks and measurements that run whole systems; each module's last line is its figures."""

from __future__ import annotations
