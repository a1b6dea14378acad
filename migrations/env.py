"""Runs migrations on the connection that `common.db.session` hands over."""

from __future__ import annotations

from alembic import context

from common.db.models import Base

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, compare_server_default=True
)
with context.begin_transaction():
    context.run_migrations()
