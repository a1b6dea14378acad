"""The tables. Changes here need a migration; `alembic check` in the tests compares both."""

from __future__ import annotations

from common.db.models import policy, rollout
from common.db.models.base import Base

__all__ = ["Base", "policy", "rollout"]
