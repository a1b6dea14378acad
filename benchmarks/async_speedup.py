"""`python -m benchmarks.async_speedup`: how much faster is training when nobody waits for the longest episode?

The same engine, the same episodes with a heavy tail of lengths, and a training step as long as the mean episode, in
three ways: coupled (one loop that plays a batch, waits, trains, loads), the pipeline with max_staleness = 0, and the
pipeline with staleness 1 to 4. Real RabbitMQ, Postgres, fleets, feeder, reaper, weight keepers and trainer loop; only
the model is not: the engine is scripted, and a training step waits. All ways train as many groups in as many versions.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.speedup_report import OVER_COUPLED, OVER_SYNCHRONOUS, best, figures, line, table, write_report
from benchmarks.speedup_ways import Shape, Trained, Way, load_policy, play_coupled, play_pipelined
from benchmarks.stack import Servers, servers
from benchmarks.timed_policy import TimedPolicy
from common.db.session import Database
from common.episode import Stage
from deploy.ports import free_port, http_ok
from deploy.process import ProcessSpec

STALENESS = (1, 2, 3, 4)
"""Each with late_groups = "drop" and "wait"."""
TOKEN_S = 0.1
"""At scale 1: the median episode takes 2 s, one of the tail 20 s."""
LOAD_S = 0.1
RUN_PROCESSES = 2
RUN_CONCURRENCY = 1024
"""Episodes at once in a process, of all ways together, so that none of them waits for another's."""
SETTINGS = {"ROLLMILL_REQUEST_TIMEOUT_S": "600", "ROLLMILL_ENGINE_WAIT_S": "600", "ROLLMILL_LOG_LEVEL": "WARNING"}
POLL_EVERY_S = 0.05


class Comparison:
    """Plays ways on one stack, several at once."""

    def __init__(self, stack: Servers, shape: Shape, pool: ThreadPoolExecutor) -> None:
        self._stack = stack
        self._shape = shape
        self._pool = pool
        self._stop = threading.Event()
        self._database = Database.connect(stack.database_url, pool_size=16)
        self.loads: list[float] = []
        """Of the machine over a minute, at the end of each way."""

    def close(self) -> None:
        """Trainers that still run end."""
        self._stop.set()
        self._pool.shutdown()
        self._database.dispose()

    def play(self, ways: Sequence[Way], *, at_once: int) -> list[Trained]:
        """What comes of the ways; raises what the first that fails raised. Waits for the ends of their runs.

        The synchronous ones begin at once, as they mostly wait; of the others, `at_once` run at a time.
        """
        waiting = [way for way in ways if way.max_staleness]
        synchronous = [self._start(way) for way in ways if not way.max_staleness]
        others: list[Future[Trained]] = []
        while waiting or not all(future.done() for future in (*synchronous, *others)):
            self._stack.supervisor.poll()
            for future in (*synchronous, *others):
                if future.done():
                    future.result()
            if waiting and sum(not future.done() for future in others) < at_once:
                others.append(self._start(waiting.pop(0)))
            time.sleep(POLL_EVERY_S)
        return [future.result() for future in (*synchronous, *others)]

    def _start(self, way: Way) -> Future[Trained]:
        self._stack.supervisor.start(self._engine(way))
        # Here and not in the threads: transformers loads one model at a time.
        return self._pool.submit(self._play, way, load_policy(way, self._shape))

    def _play(self, way: Way, policy: TimedPolicy) -> Trained:
        data_dir = self._stack.data_dir
        if way.max_staleness is None:
            trained = play_coupled(way, self._shape, policy, data_dir=data_dir)
        else:
            trained = play_pipelined(
                way,
                self._shape,
                policy,
                database=self._database,
                data_dir=data_dir,
                broker_url=self._stack.broker_url,
                stop=self._stop,
            )
        self.loads.append(os.getloadavg()[0])
        print(line(trained, self._shape), flush=True)
        return trained

    def _engine(self, way: Way) -> ProcessSpec:
        options = {
            "seed": way.seed,
            "port": way.port,
            "group-size": self._shape.group_size,
            "max-running": self._shape.batch,
            "token-s": self._shape.token_s,
            "load-s": self._shape.load_s,
        }
        given = (part for name, value in options.items() for part in (f"--{name}", str(value)))
        return ProcessSpec(
            name=f"engine-{way.name}",
            argv=(sys.executable, "-m", "benchmarks.tailed_engine", *given),
            ready=http_ok(way.port, "/health"),
        )


@contextmanager
def comparison(shape: Shape, *, num_ways: int) -> Iterator[Comparison]:
    """A stack of one feeder, one reaper, and the fleets, for all ways."""
    with (
        tempfile.TemporaryDirectory(prefix="speedup-") as folder,
        servers(Path(folder) / "data", SETTINGS) as stack,
        ThreadPoolExecutor(max_workers=num_ways) as pool,
    ):
        fleets = stack.fleets({Stage.INIT: 1, Stage.EVAL: 1})
        fleets += [
            stack.python(f"fleet-run-{index}", "workers.fleet", Stage.RUN, "--concurrency", str(RUN_CONCURRENCY))
            for index in range(RUN_PROCESSES)
        ]
        stack.supervisor.start(
            *fleets, stack.python("feeder", "workers.feeder"), stack.python("reaper", "workers.reaper")
        )
        compared = Comparison(stack, shape, pool)
        try:
            yield compared
        finally:
            compared.close()


def all_ways(seeds: Sequence[int]) -> list[Way]:
    """Each with a free port for its engine."""
    ways = []
    for seed in seeds:
        ways += [Way(max_staleness=bound, seed=seed, port=free_port()) for bound in (None, 0, *STALENESS)]
        ways += [Way(max_staleness=bound, late_groups="wait", seed=seed, port=free_port()) for bound in STALENESS]
    return ways


def compare(shape: Shape, seeds: Sequence[int], *, at_once: int) -> tuple[list[Trained], float]:
    """All ways with all seeds, and the machine's mean load meanwhile."""
    ways = all_ways(seeds)
    with comparison(shape, num_ways=len(ways)) as compared:
        trained = compared.play(ways, at_once=at_once)
        return trained, sum(compared.loads) / len(compared.loads)


def main() -> int:
    """Measure; exit 1 below the targets."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_speedup", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--groups-per-step", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--scale", type=float, default=1.0, help="of all times; 1 = a median episode of 2 s")
    parser.add_argument("--at-once", type=int, default=4, help="ways with staleness that run beside each other")
    parser.add_argument("--report", type=Path, help="write the table into this Markdown file, and a picture beside it")
    arguments = parser.parse_args()
    shape = Shape(
        num_versions=arguments.versions,
        groups_per_step=arguments.groups_per_step,
        group_size=arguments.group_size,
        token_s=TOKEN_S * arguments.scale,
        load_s=LOAD_S * arguments.scale,
    )
    torch.set_num_threads(1)
    started = time.monotonic()
    trained, load = compare(shape, arguments.seeds, at_once=arguments.at_once)
    found = figures(trained, shape)
    print(table(found))
    fastest, waiting = best(found, wait=False), best(found, wait=True)
    over_coupled, over_synchronous = found[fastest].over_coupled.mean, found[fastest].over_synchronous.mean
    held = over_coupled >= OVER_COUPLED and over_synchronous >= OVER_SYNCHRONOUS
    last_line = (
        f"async_speedup: best={fastest} over_coupled={over_coupled:.2f} over_staleness_0={over_synchronous:.2f} "
        f"best_without_drops={waiting} over_coupled={found[waiting].over_coupled.mean:.2f} "
        f"over_staleness_0={found[waiting].over_synchronous.mean:.2f} targets={OVER_COUPLED:g},{OVER_SYNCHRONOUS:g} "
        f"seeds={len(arguments.seeds)} scale={arguments.scale:g} load={load:.1f} "
        f"seconds={time.monotonic() - started:.0f}"
    )
    if arguments.report:
        write_report(arguments.report, trained, shape, last_line=last_line)
    print(last_line)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
