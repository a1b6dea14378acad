"""Logging set-up: one line a record, UTC, ids as key=value."""

from __future__ import annotations

import logging
import time


def setup_logging(level: str) -> None:
    """Send everything to stderr; called once by each entry point."""
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler], force=True)
