"""One vLLM server after the other, each started while the tests use the one before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.vllm.serving import serving


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model that a server has."""

    model: Path
    url: str
    stack: ExitStack
    """Ends the server."""


class Relay:
    """Hands out the servers in the order of their names."""

    def __init__(self, names: Sequence[str], make_model: Callable[[str], Path], executor: ThreadPoolExecutor) -> None:
        self._names = names
        self._make_model = make_model
        self._executor = executor
        self._starting: dict[str, Future[Served]] = {}
        self._now: Served | None = None
        self._begin(0)

    def take(self, name: str) -> Served:
        """The server of that name; the one before it is ended, and the next one begins to start."""
        index = self._names.index(name)
        self._begin(index)
        self._end_now()
        self._now = self._starting.pop(name).result()
        self._begin(index + 1)
        return self._now

    def close(self) -> None:
        """End all servers, whatever their state."""
        self._end_now()
        for starting in self._starting.values():
            if not starting.cancel() and starting.exception() is None:
                starting.result().stack.close()

    def _begin(self, index: int) -> None:
        for name in self._names[index : index + 1]:
            if name not in self._starting:
                self._starting[name] = self._executor.submit(self._start, name)

    def _end_now(self) -> None:
        if self._now is not None:
            self._now.stack.close()
            self._now = None

    def _start(self, name: str) -> Served:
        torch.set_num_threads(1)
        model = self._make_model(name)
        with ExitStack() as stack:
            url = stack.enter_context(serving(model, log_file=model.parent / f"{name}.log"))
            return Served(model=model, url=url, stack=stack.pop_all())


@contextmanager
def relay(names: Sequence[str], make_model: Callable[[str], Path]) -> Iterator[Relay]:
    """`make_model` runs in a thread, and gives the folder of the model of that name."""
    # Servers end with the thread that started them, so it stays until they are gone.
    with ThreadPoolExecutor(1) as executor:
        servers = Relay(names, make_model, executor)
        try:
            yield servers
        finally:
            servers.close()
