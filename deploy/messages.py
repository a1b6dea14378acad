"""This command's own log: everything into a file, warnings also to the person at the terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console


class ConsoleHandler(logging.Handler):
    """One line a record; above the live display where there is one, because rich knows of both."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print it."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.getMessage()}"
        self._console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def logging_to(log_file: Path, *, level: str, console: Console) -> Iterator[None]:
    """Inside the block, log to the file and the console; before and after, nowhere."""
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    to_file = logging.FileHandler(log_file)
    to_file.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[to_file, ConsoleHandler(console)], force=True)
    try:
        yield
    finally:
        logging.basicConfig(handlers=[logging.NullHandler()], force=True)
