"""What the tables have in common."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, DateTime, Identity, LargeBinary, MetaData, func
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING = {
    "ix": "%(table_name)s_%(column_0_N_name)s_ix",
    "uq": "%(table_name)s_%(column_0_N_name)s_key",
    "ck": "%(table_name)s_%(constraint_name)s_check",
    "fk": "%(table_name)s_%(column_0_N_name)s_fkey",
    "pk": "%(table_name)s_pkey",
}


class Base(DeclarativeBase):
    """Of each table."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSONB,
        list[Any]: JSONB,
        bytes: LargeBinary,
    }


def row_id() -> Mapped[int]:
    """A primary key that counts up."""
    return mapped_column(BigInteger, Identity(), primary_key=True)


def at_now() -> Mapped[datetime]:
    """When the row was made."""
    return mapped_column(server_default=func.now())
