"""Hands the trainer's weights to an engine directly: over NCCL, GPU to GPU, or as a folder through the same routes.

The version is published all the same. Whatever fails here leaves the engine under the name of no version, resumed and
without owner, and its weight keeper then loads the published one. Not part of the trainer's loop yet: NCCL has not been
run on GPUs, only what surrounds it. Whole models only: it knows nothing of LoRA adapters, which go by their published
folders. Its requests carry no claim, so a server's fence does not hold back those that come late.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from common.db import engines
from common.db.session import Database
from common.errors import DatabaseUnavailable
from common.weights import LOADING
from trainer.engine_admin import UPDATE_TIMEOUT_S, EngineAdmin, TransferFailed

logger = logging.getLogger(__name__)

LEASE_S = 15.0
RESUME_TRIES = 3
RESUME_PAUSE_S = 0.2


class Transport(Protocol):
    """How the bytes go over. One belongs to one engine."""

    def send(self, engine: EngineAdmin) -> None:
        """Start the update, give the engine all weights, finish it. May hang when the engine dies."""


class FolderTransport:
    """The engine reads a version's folder; it checks it whole before it touches a weight."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def send(self, engine: EngineAdmin) -> None:
        engine.start_weight_update()
        engine.update_weights({"path": str(self._folder)})
        engine.finish_weight_update()


class NcclTransport:
    """vLLM's own trainer side: rank 0 of a group of this process and the engine's ranks, joined at the first send.

    Needs vLLM where the trainer runs, and a server with `--weight-transfer-config '{"backend": "nccl"}'` on other GPUs.
    A group that failed once is of no use: make another transport.
    """

    def __init__(self, model: Any, *, address: str, port: int) -> None:
        """`model` is a module, or a sharded one; `address` and `port` are this machine's, as the engine sees it."""
        self._model = model
        self._address = address
        self._port = port
        self._group: Any = None

    def send(self, engine: EngineAdmin) -> None:
        if self._group is None:
            self._group = self._join(engine)
        # Starts and finishes the update, and has /update_weights answered in a thread while it broadcasts.
        self._group.send_weights()

    def _join(self, engine: EngineAdmin) -> Any:
        from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        group = NCCLTrainerInitInfo(
            rank=0, master_address=self._address, master_port=self._port, world_size=1 + engine.num_ranks()
        )
        return WeightTransferTrainerFactory.trainer_init(group, client=engine, source=ModuleSource(self._model))


def hand_over(
    engine: EngineAdmin,
    transport: Transport,
    *,
    name: str,
    is_owned: Callable[[], bool],
    limit_s: float = UPDATE_TIMEOUT_S,
) -> None:
    """Pause, send, name, resume; resumes whatever happens, unless the engine is out of reach. Raises TransferFailed.

    `is_owned` says whether the engine is still ours when all is sent; if not, its name is left to the next owner. The
    sending itself, which nothing can interrupt, is waited for `limit_s`: what hangs longer is left to a daemon thread.
    """
    started = time.monotonic()
    try:
        engine.pause()
        engine.update_weight_version(LOADING)
        _within(limit_s, lambda: transport.send(engine), what=f"sending {name} to engine {engine.url}")
        if not is_owned():
            raise TransferFailed(f"engine {engine.url}: sending {name} took longer than its ownership lasted")
        engine.update_weight_version(name)
    finally:
        _resume(engine)
    took_ms = 1000 * (time.monotonic() - started)
    logger.info("weights handed over engine=%s version=%s took_ms=%.0f", engine.url, name, took_ms)


def _resume(engine: EngineAdmin) -> None:
    for _ in range(RESUME_TRIES - 1):
        try:
            engine.resume()
        except TransferFailed:
            time.sleep(RESUME_PAUSE_S)
        else:
            return
    engine.resume()


def _within(limit_s: float, action: Callable[[], None], *, what: str) -> None:
    done: Future[None] = Future()

    def run() -> None:
        try:
            action()
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001  # handed to the thread that waits
            done.set_exception(error)

    threading.Thread(target=run, name="weight-transfer", daemon=True).start()
    try:
        done.result(limit_s)
    except TransferFailed:
        raise
    except TimeoutError:
        raise TransferFailed(f"{what} did not end within {limit_s:g} s") from None
    except Exception as error:
        raise TransferFailed(f"{what}: {type(error).__name__}: {error}") from error


@contextmanager
def owning(database: Database, engine_id: int, *, owner: str, lease_s: float = LEASE_S) -> Iterator[Callable[[], bool]]:
    """Take an engine from its keeper for the block; yields whether it is still ours. Raises TransferFailed.

    A keeper that is loading it keeps it. Renewed by a thread, so that a trainer that dies holds no engine up for long.
    """
    held = _Held(database, engine_id, owner, lease_s)
    if not held.renew():
        raise TransferFailed(f"engine {engine_id} is being loaded by its keeper")
    done = threading.Event()
    thread = threading.Thread(target=held.keep, args=(done,), name="engine-lease", daemon=True)
    thread.start()
    try:
        yield held.is_held
    finally:
        done.set()
        thread.join(lease_s)
        held.give_back()


class _Held:
    def __init__(self, database: Database, engine_id: int, owner: str, lease_s: float) -> None:
        self._database = database
        self._engine_id = engine_id
        self._owner = owner
        self._lease_s = lease_s
        self._until = 0.0
        """Of time.monotonic."""

    def is_held(self) -> bool:
        return time.monotonic() < self._until

    def renew(self) -> bool:
        asked = time.monotonic()
        with self._database.begin() as conn:
            taken = engines.take(conn, self._engine_id, owner=self._owner, lease_s=self._lease_s)
        self._until = asked + self._lease_s if taken else 0.0
        return taken

    def keep(self, done: threading.Event) -> None:
        """Waits for `done`, and renews meanwhile. While the database is away, the lease runs out."""
        while not done.wait(self._lease_s / 3):
            try:
                if not self.renew():
                    return
            except DatabaseUnavailable as error:
                logger.warning("lease of engine=%d not renewed: %s", self._engine_id, error)

    def give_back(self) -> None:
        try:
            with self._database.begin() as conn:
                engines.give_back(conn, self._engine_id, owner=self._owner)
        except DatabaseUnavailable as error:
            logger.warning("engine=%d not given back, its lease runs out: %s", self._engine_id, error)
