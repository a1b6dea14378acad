"""SQL text for the statements that every episode runs, parsed for its parameters once."""

from __future__ import annotations

from functools import lru_cache

from sqlalchemy import text

statement = lru_cache(maxsize=64)(text)
"""`sqlalchemy.text` for a statement of which there are few forms."""
