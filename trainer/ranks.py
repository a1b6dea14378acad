"""The processes that train one policy together: one leads, the others do what it calls.

Rank 0 alone speaks to the database, the broker and the stores. What it calls on its policy (`on_all_ranks`) the others
call on theirs with the same arguments, and they meet in the collectives inside. Between calls, which may be hours apart
when no groups come, they wait at a key of the store, not in a collective.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from itertools import count
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from common.errors import RollmillError, SetupError

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_S = 600.0
"""A rank that is this late for the others ends the run; the step is replayed. Ranks that die are seen at once."""
POLL_S = 5.0
_END = ""
_FAILED = "failed"
"""Key of the store: why another rank than the first has ended."""


class AgreedError(RollmillError):
    """All ranks raise it, out of what they have gathered; rank 0 decides what follows, and the others go on."""


class AgreedSetupError(AgreedError, SetupError):
    """One that a person can mend, and that all ranks raise alike, as each has been given the same."""


T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


@dataclass(kw_only=True)
class Ranks:
    """This process among those of the run; alone unless `join` made it."""

    rank: int = 0
    size: int = 1
    device: torch.device
    """Where its part of the model is."""
    _store: Store | None = None
    _numbers: count[int]

    @classmethod
    def alone(cls) -> Ranks:
        """The only one: on the GPU if there is one."""
        return cls(device=_device(0), _numbers=count())

    @classmethod
    def join(cls, *, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> Ranks:
        """Meet the others, whom torchrun names in the environment; `leave` when done."""
        timeout = timedelta(seconds=timeout_s)
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        device = _device(int(os.environ.get("LOCAL_RANK", "0")))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("collectives", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
        return cls(rank=rank, size=size, device=device, _store=PrefixStore("calls", store), _numbers=count())

    def dismiss(self) -> None:
        """As rank 0: end the `follow` of the others."""
        if self._store is not None:
            self._store.set(str(next(self._numbers)), _END)

    def leave(self) -> None:
        """Part from the others; rank 0 also dismisses them."""
        if self._store is not None:
            if self.rank == 0:
                self.dismiss()
            dist.destroy_process_group()

    def gather(self, value: T) -> list[T]:
        """What each rank has, in their order, on all of them."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, on its own device; those of the others have its shape and type, and may be on "meta"."""
        if self.size == 1:
            return tensor
        buffer = tensor.to(self.device) if self.rank == 0 else torch.empty_like(tensor, device=self.device)
        dist.broadcast(buffer, src=0)
        return buffer

    def call(self, name: str, *args: object, **kwargs: object) -> None:
        """As rank 0: let the others call this too. Returns when they have the arguments."""
        if self.size > 1:
            assert self._store is not None
            self._store.set(str(next(self._numbers)), name)
            dist.broadcast_object_list([args, kwargs], src=0)

    @contextmanager
    def naming_lost(self) -> Iterator[None]:
        """As rank 0: raise RollmillError with the reason where the block's collective breaks as another rank ended."""
        try:
            yield
        except RuntimeError as error:
            if self._store is None or not self._store.check([_FAILED]):
                raise
            raise RollmillError(str(self._store.get(_FAILED), "utf-8")) from error

    def follow(self, policy: object) -> None:
        """As another rank: do what rank 0 calls, until it dismisses this one.

        Waits for the next call as long as the launcher lives, which ends this process when another rank dies. An error
        of a call, other than AgreedError, ends this process: rank 0 may be in a collective without having it, where it
        would wait for this rank up to the time limit. The launcher then ends the others.
        """
        assert self._store is not None
        launcher = os.getppid()
        while (name := self._next_call(launcher)) != _END:
            arguments: list[Any] = [None, None]
            dist.broadcast_object_list(arguments, src=0)
            args, kwargs = arguments
            try:
                getattr(policy, name)(*args, **kwargs)
            except AgreedError as error:
                logger.warning("rank=%d call=%s: %s", self.rank, name, error)
            except Exception as error:  # noqa: BLE001 - the top of this process
                self._end(f"rank {self.rank} failed in {name}: {type(error).__name__}: {error}")

    def _end(self, reason: str) -> NoReturn:
        """At once: parting from the others could wait for those that are in a collective."""
        assert self._store is not None
        logger.exception("%s", reason)
        self._store.set(_FAILED, reason)
        logging.shutdown()
        sys.stderr.flush()
        os._exit(1)

    def _next_call(self, launcher: int) -> str:
        assert self._store is not None
        key = str(next(self._numbers))
        while True:
            try:
                self._store.wait([key], timedelta(seconds=POLL_S))
                return str(self._store.get(key), "utf-8")
            except dist.DistStoreError:
                if os.getppid() != launcher:
                    raise RollmillError(f"rank {self.rank}: the process that started it is gone") from None


class _HasRanks(Protocol):
    ranks: Ranks


S = TypeVar("S", bound=_HasRanks)


def on_all_ranks(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorates a method that rank 0 calls: the other ranks call it too."""

    @wraps(method)
    def everywhere(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.ranks.rank > 0:
            return method(self, *args, **kwargs)
        with self.ranks.naming_lost():
            self.ranks.call(method.__name__, *args, **kwargs)
            return method(self, *args, **kwargs)

    # To the type checker `wraps` makes something else of it.
    return cast(Callable[Concatenate[S, P], R], everywhere)


def _device(local_rank: int) -> torch.device:
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
