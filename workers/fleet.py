"""A fleet process of one stage: `python -m workers.fleet run`. The wiring place of the stages."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

from celery.signals import worker_shutdown, worker_shutting_down

from common.db import engines
from common.db.session import WORKER_WAIT_S, Database, check_schema
from common.episode import Stage
from common.errors import SetupError
from common.log import setup_logging
from common.queues import TASK_OF
from common.settings import Settings, settings
from workers.app import app
from workers.engine_client import EngineClient
from workers.engine_pool import EnginePool
from workers.eval import Eval
from workers.handlers.base import Handler
from workers.handlers.registry import load_handler
from workers.init import Init
from workers.leases import Leases
from workers.publishing import publisher
from workers.render.of_run import renderer_of
from workers.run import Run
from workers.run_loop import RunLoop
from workers.sandbox import open_backend
from workers.stage import StageWorker, Work
from workers.weight_announcements import AnnouncementListener
from workers.weight_keeper import WeightKeeper

logger = logging.getLogger(__name__)

CONCURRENCY = {Stage.INIT: 16, Stage.RUN: 256, Stage.EVAL: 8}
"""Episodes that one process works on at once. RUN's share one asyncio loop and mostly wait for tokens."""

handler_named: Callable[[str], Handler] = lru_cache(maxsize=64)(load_handler)


class FleetProcess:
    """What one process has: connections, leases, its stage's worker."""

    def __init__(self, stage: Stage, given: Settings) -> None:
        self.database = Database.connect(given.require_database_url(), pool_size=8, wait_s=WORKER_WAIT_S)
        check_schema(self.database)
        self._settings = given
        self._name = f"{stage}@{socket.gethostname()}:{os.getpid()}"
        self._close: list[Callable[[], object]] = []
        self._leases = Leases(self.database, lease_s=given.lease_s, heartbeat_s=given.heartbeat_s)
        self.worker = StageWorker(
            stage,
            self._run() if stage is Stage.RUN else self._in_threads(stage),
            database=self.database,
            leases=self._leases,
            settings=given,
            worker=self._name,
            publish=publisher(app),
        )

    def _in_threads(self, stage: Stage) -> Work:
        executor = ThreadPoolExecutor(CONCURRENCY[stage], thread_name_prefix=stage)
        self._close.append(executor.shutdown)
        if stage is Stage.INIT:
            init = Init(self.database, handler=handler_named, backend=open_backend(self._settings.data_dir))
            return lambda claim: executor.submit(init, claim)
        evaluate = Eval(self.database, handler=handler_named)
        return lambda claim: executor.submit(evaluate, claim)

    def _run(self) -> Work:
        loop = RunLoop()
        client = EngineClient(timeout_s=self._settings.request_timeout_s)
        pool = EnginePool(client, self._engines_of, wait_s=self._settings.engine_wait_s)
        keeper = WeightKeeper(self.database, client, owner=self._name, poll_s=self._settings.keeper_poll_s)
        listener = AnnouncementListener(
            self._settings.require_broker_url(), lambda: loop.loop.call_soon_threadsafe(keeper.announce)
        )
        loop.submit(_keep(keeper, client)).add_done_callback(_end_process_on_error)
        listener.start()
        self._close += [listener.stop, loop.close]
        stage = Run(
            database=self.database,
            engines=pool,
            handler=handler_named,
            renderer=renderer_of,
            backend=open_backend(self._settings.data_dir),
        )
        return lambda claim: loop.submit(stage(claim))

    def _engines_of(self, run_id: int) -> list[engines.EngineRow]:
        with self.database.begin() as conn:
            return engines.serving(conn, run_id)

    def close(self) -> None:
        """End threads and connections; the work has been handed back before."""
        for close in self._close:
            close()
        self._leases.close()
        self.database.dispose()


async def _keep(keeper: WeightKeeper, client: EngineClient) -> None:
    # Cancelled, the keeper still resumes what it paused: the client is closed after that.
    async with client:
        await keeper.run()


def _end_process_on_error(keeping: Future[None]) -> None:
    """A RUN process without a keeper would serve old weights for ever: better that it is started anew."""
    if not keeping.cancelled() and (error := keeping.exception()) is not None:
        logger.critical("the weight keeper crashed", exc_info=error)
        os.kill(os.getpid(), signal.SIGKILL)


def serve(stage: Stage, *, concurrency: int) -> None:
    """Serve a stage's queue until SIGTERM; claims are then handed back, so that the end takes seconds."""
    given = settings()
    setup_logging(given.log_level)
    for name in ("celery.worker.strategy", "celery.app.trace"):
        # Two lines a message, which the stage's own line says better.
        logging.getLogger(name).setLevel(logging.WARNING)
    process = FleetProcess(stage, given)

    app.task(process.worker.perform, name=TASK_OF[stage])
    # Celery waits for running tasks before it ends, whatever the signal: they must be told to stop.
    worker_shutting_down.connect(lambda **_: threading.Thread(target=process.worker.stop).start(), weak=False)
    worker_shutdown.connect(lambda **_: process.close(), weak=False)
    app.worker_main(
        [
            "worker",
            *("--queues", stage.value, "--hostname", f"{stage}-{os.getpid()}@%h"),
            *("--pool", "threads", "--concurrency", str(concurrency)),
            *("--without-mingle", "--without-gossip", "--loglevel", given.log_level),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one stage."""
    parser = argparse.ArgumentParser(prog="python -m workers.fleet", description=__doc__)
    parser.add_argument("stage", type=Stage, choices=list(Stage), help="whose queue to serve: init, run or eval")
    parser.add_argument("--concurrency", type=int, help="episodes at once in this process")
    arguments = parser.parse_args(argv)
    try:
        serve(arguments.stage, concurrency=arguments.concurrency or CONCURRENCY[arguments.stage])
    except SetupError as error:
        sys.stderr.write(f"rollmill fleet {arguments.stage}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
