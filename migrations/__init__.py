"""Alembic's environment and revisions. Migrations go forward only and are never edited."""

from __future__ import annotations
