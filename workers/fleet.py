"""A fleet process of one stage: `python -m workers.fleet run`. The wiring place of the stages."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial

from celery.signals import worker_shutdown, worker_shutting_down

from common.broker import Version
from common.db import engines
from common.db.session import WORKER_WAIT_S, Database, check_schema
from common.episode import Stage
from common.errors import SetupError
from common.log import setup_logging
from common.queues import CONCURRENCY, NODE_STAGES, TASK_OF, queue_of
from common.settings import Settings, settings
from common.weight_cache import WeightCache
from workers.app import app
from workers.broker import check_held, prepare_broker
from workers.engine_client import EngineClient
from workers.engine_pool import EnginePool
from workers.eval import Eval
from workers.evaluator.judging import Judging
from workers.garbage import collect_seldom
from workers.handlers.base import Handler
from workers.handlers.registry import load_handler
from workers.init import Init
from workers.leases import Leases
from workers.open_files import raise_open_files
from workers.presence import Presence
from workers.publishing import publisher
from workers.render.of_run import renderer_of
from workers.run import Run
from workers.run_loop import RunLoop
from workers.sandbox import open_backend
from workers.stage import StageWorker, Work
from workers.stage_threads import StageThreads
from workers.weight_announcements import AnnouncementListener
from workers.weight_keeper import WeightKeeper

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 25.0
"""How long a process that is worn out may take to hand its claims back and end."""

FILES_FOR_ALL = 512
FILES_PER_EPISODE = 12
"""A request's socket, and what a sandbox takes."""

handler_named: Callable[[str], Handler] = lru_cache(maxsize=64)(load_handler)


class FleetProcess:
    """What one process has: connections, leases, its stage's worker."""

    def __init__(self, stage: Stage, given: Settings, *, concurrency: int, rabbitmq: Version | None) -> None:
        """`rabbitmq` is the broker's version; None = it is another kind of broker."""
        self.worn_out = False
        """Whether it ends itself, so that it is started anew."""
        self._max_given_up = max(1, concurrency // 2)
        self._loop: RunLoop | None = None
        """RUN's; None = another stage."""
        self.database = Database.connect(given.require_database_url(), pool_size=16, wait_s=WORKER_WAIT_S)
        check_schema(self.database)
        if rabbitmq is not None:
            check_held(stage, self.database, given, rabbitmq)
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
            given_up=self._wear_out,
            is_able=lambda: self._loop is None or not self._loop.is_blocked,
        )

    def _in_threads(self, stage: Stage) -> Work:
        threads = StageThreads(stage)
        if stage is Stage.INIT:
            backend = open_backend(self._settings)
            init = Init(self.database, handler=handler_named, backend=backend, node=self._settings.node)
            return lambda claim: threads.submit(partial(init, claim))
        judging = Judging(self.database, lambda: open_backend(self._settings))
        self._close.append(judging.close)
        evaluate = Eval(handler=handler_named, judging=judging)
        return lambda claim: threads.submit(partial(evaluate, claim))

    def _run(self) -> Work:
        loop = self._loop = RunLoop(on_lost=lambda where: self._end_anew(f"its event loop is blocked in {where}"))
        client = EngineClient(timeout_s=self._settings.request_timeout_s)
        pool = EnginePool(client, self._engines_of, wait_s=self._settings.engine_wait_s)
        keeper = WeightKeeper(
            self.database,
            client,
            owner=self._name,
            poll_s=self._settings.keeper_poll_s,
            cache=WeightCache(self._settings.weights_cache),
        )
        listener = AnnouncementListener(
            self._settings.require_broker_url(), lambda: loop.loop.call_soon_threadsafe(keeper.announce)
        )
        loop.submit(_keep(keeper, pool, client)).add_done_callback(_end_process_on_error)
        listener.start()
        presence = Presence(
            self.database,
            self._settings.node,
            every_s=self._settings.heartbeat_s,
            is_able=lambda: not (loop.is_blocked or self.worn_out),
        )
        self._close += [presence.close, listener.stop, loop.close]
        stage = Run(
            database=self.database,
            engines=pool,
            handler=handler_named,
            renderer=renderer_of,
            backend=open_backend(self._settings),
            node=self._settings.node,
        )
        return lambda claim: loop.work(stage(claim))

    def _engines_of(self, run_id: int) -> list[engines.EngineRow]:
        with self.database.begin() as conn:
            return engines.serving(conn, run_id)

    def _wear_out(self, num_given_up: int) -> None:
        """Work that does not end keeps its memory, its locks and its share of the processor for ever."""
        if num_given_up >= self._max_given_up:
            self._end_anew(f"{num_given_up} works hang in it")

    def _end_anew(self, why: str) -> None:
        if self.worn_out:
            return
        self.worn_out = True
        logger.critical("this process hands its claims back and ends, so that it is started anew: %s", why)
        os.kill(os.getpid(), signal.SIGTERM)
        # What hangs may keep the process from its orderly end, too.
        last = threading.Timer(END_TIMEOUT_S, os.kill, (os.getpid(), signal.SIGKILL))
        last.daemon = True
        last.start()

    def close(self) -> None:
        """End threads and connections; the work has been handed back before."""
        for close in self._close:
            close()
        self._leases.close()
        self.database.dispose()


async def _keep(keeper: WeightKeeper, pool: EnginePool, client: EngineClient) -> None:
    # Cancelled, the keeper still resumes what it paused: the client is closed after that.
    async with client, asyncio.TaskGroup() as tasks:
        tasks.create_task(keeper.run())
        tasks.create_task(pool.watch_pressure())


def _end_process_on_error(keeping: Future[None]) -> None:
    """Without a keeper RUN would serve old weights for ever: better that it is started anew."""
    if not keeping.cancelled() and (error := keeping.exception()) is not None:
        logger.critical("the weight keeper, or the watch over the engines' pressure, crashed", exc_info=error)
        os.kill(os.getpid(), signal.SIGKILL)


def queues_of(stage: Stage, given: Settings) -> list[str]:
    """What a fleet of the stage takes from: its queue, and where episodes are bound to nodes, its node's."""
    return [queue_of(stage), *([queue_of(stage, given.node)] if stage in NODE_STAGES else [])]


def serve(stage: Stage, *, concurrency: int) -> int:
    """Serve a stage's queue until SIGTERM; claims are then handed back, so that the end takes seconds.

    Returns the exit code: 1 = the process had to end because of work that hangs.
    """
    given = settings()
    setup_logging(given.log_level)
    raise_open_files(FILES_FOR_ALL + FILES_PER_EPISODE * concurrency)
    for name in ("celery.worker.strategy", "celery.app.trace"):
        # Two lines a message, which the stage's own line says better.
        logging.getLogger(name).setLevel(logging.WARNING)
    rabbitmq = prepare_broker(app, given, own=stage)
    logger.info("stage=%s node=%s", stage, given.node)
    process = FleetProcess(stage, given, concurrency=concurrency, rabbitmq=rabbitmq)
    if stage is Stage.RUN:
        collect_seldom()

    app.task(process.worker.perform, name=TASK_OF[stage])
    # Celery waits for running tasks before it ends, whatever the signal: they must be told to stop.
    worker_shutting_down.connect(lambda **_: threading.Thread(target=process.worker.stop).start(), weak=False)
    worker_shutdown.connect(lambda **_: process.close(), weak=False)
    app.worker_main(
        [
            "worker",
            *("--queues", ",".join(queues_of(stage, given)), "--hostname", f"{stage}-{os.getpid()}@%h"),
            *("--pool", "threads", "--concurrency", str(concurrency)),
            *("--without-mingle", "--without-gossip", "--loglevel", given.log_level),
        ]
    )
    return int(process.worn_out)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one stage."""
    parser = argparse.ArgumentParser(prog="python -m workers.fleet", description=__doc__)
    parser.add_argument("stage", type=Stage, choices=list(Stage), help="whose queue to serve: init, run or eval")
    parser.add_argument("--concurrency", type=int, help="episodes at once in this process")
    arguments = parser.parse_args(argv)
    try:
        return serve(arguments.stage, concurrency=arguments.concurrency or CONCURRENCY[arguments.stage])
    except SetupError as error:
        sys.stderr.write(f"rollmill fleet {arguments.stage}: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
