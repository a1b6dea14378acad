"""`python -m benchmarks.pipeline`: episodes a second that the pipeline itself can do, where the task asks for nothing.

Each episode goes through INIT, RUN (one turn, which a scripted engine answers at once) and EVAL, on real RabbitMQ and
Postgres with durable commits. Beside it the floor of the same servers: plain publish and consume, plain commits.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from celery import Celery
from kombu import Connection, Exchange, Queue
from sqlalchemy import text

from benchmarks.stack import Servers, servers
from common.config import TINY_MODELS, RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import groups, tasks, versions
from common.db.runs import Run
from common.db.session import Database
from common.episode import Stage
from common.errors import SetupError
from common.settings import Settings
from common.weights import WeightStore
from deploy.procfs import PROC, all_stats
from workers.app import celery_config
from workers.broker import prepare_broker
from workers.handlers.noop import Noop
from workers.publishing import publisher

GROUP_SIZE = 8
WARM_UP_EPISODES = 200
FED_AT_ONCE = 50
"""Groups in one transaction of the feeder."""
FLOOR_MESSAGES = 2000
FLOOR_COMMITS = 2000
TIMEOUT_S = 300.0
POLL_EVERY_S = 0.1
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One number of RUN processes."""

    run_processes: int
    episodes: int
    seconds: float
    cpu_ms: dict[str, float]
    """Per episode, by kind of process."""

    @property
    def rate(self) -> float:
        return self.episodes / self.seconds


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What the servers do for one plain client."""

    messages_per_s: float
    """Published and then consumed with acknowledgement."""
    commits_per_s: float
    """Of one updated row each, durable."""

    @property
    def episodes_per_s(self) -> float:
        """With one message and one commit for each stage, one after the other."""
        return 1 / (len(Stage) * (1 / self.messages_per_s + 1 / self.commits_per_s))


def config_of(name: str, episodes: int) -> RunConfig:
    return RunConfig(
        name=name,
        handler="workers.handlers.noop:Noop",
        model=TINY_MODELS / "tiny-shell",
        num_tasks=100,
        rollout=RolloutConfig(group_size=GROUP_SIZE, max_turns=1),
        train=TrainConfig(groups_per_step=-(-episodes // GROUP_SIZE), num_versions=1),
    )


def measure(stack: Servers, app: Celery, *, episodes: int, run_processes: int) -> Measured:
    """Feed the episodes at once and wait until all are scored."""
    run = stack.open_run(config_of(f"pipeline-{run_processes}", episodes))
    _publish_start_weights(stack, run)
    stack.start_engines(run, 1, "noop")
    stack.supervisor.start(*stack.fleets({Stage.INIT: 1, Stage.RUN: run_processes, Stage.EVAL: 1}))
    task_ids = _tasks(stack.database, run)
    _feed(stack, app, run, task_ids, WARM_UP_EPISODES)
    _wait_for(stack, run, WARM_UP_EPISODES)
    cpu_before, started = cpu_seconds(stack), time.monotonic()
    _feed(stack, app, run, task_ids, episodes)
    _wait_for(stack, run, WARM_UP_EPISODES + episodes)
    seconds = time.monotonic() - started
    used = {kind: value - cpu_before[kind] for kind, value in cpu_seconds(stack).items()}
    return Measured(
        run_processes=run_processes,
        episodes=episodes,
        seconds=seconds,
        cpu_ms={kind: 1000 * value / episodes for kind, value in used.items()},
    )


def _publish_start_weights(stack: Servers, run: Run) -> None:
    def write(folder: Path) -> None:
        shutil.copy(run.config.model / "model.safetensors", folder)

    published = WeightStore(stack.data_dir / "weights").publish(run.name, 0, write)
    with stack.database.begin() as conn:
        versions.publish(conn, run.id, 0, published)


def _tasks(database: Database, run: Run) -> list[int]:
    payloads = Noop().tasks(seed=run.config.seed, num_tasks=run.config.num_tasks)
    with database.begin() as conn:
        tasks.load(
            conn,
            dataset=run.config.dataset_name,
            handler=run.config.handler,
            payloads=((str(number), payload) for number, payload in enumerate(payloads)),
        )
        return tasks.ids(conn, run.config.dataset_name)


def _feed(stack: Servers, app: Celery, run: Run, task_ids: Sequence[int], episodes: int) -> None:
    """As the feeder does, without its bound on staleness."""
    publish = publisher(app)
    for start in range(0, episodes // GROUP_SIZE, FED_AT_ONCE):
        num = min(FED_AT_ONCE, episodes // GROUP_SIZE - start)
        chosen = [task_ids[(start + index) % len(task_ids)] for index in range(num)]
        with stack.database.begin() as conn:
            wakeups = groups.create(conn, run_id=run.id, task_ids=chosen, size=GROUP_SIZE)
        publish(wakeups)
        stack.supervisor.poll()


def _wait_for(stack: Servers, run: Run, episodes: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        stack.supervisor.poll()
        with stack.database.begin() as conn:
            # Groups, not episodes: a count of thousands of rows ten times a second would be part of what is measured.
            complete = conn.execute(
                text("SELECT count(*) FROM episode_group WHERE run_id = :run_id AND state = 'COMPLETE'"),
                {"run_id": run.id},
            ).scalar_one()
        if complete * GROUP_SIZE >= episodes:
            return
        if time.monotonic() > deadline:
            raise SetupError(
                f"{complete * GROUP_SIZE} of {episodes} episodes scored in {TIMEOUT_S:g} s: see {stack.data_dir}/logs"
            )
        time.sleep(POLL_EVERY_S)


def cpu_seconds(stack: Servers) -> dict[str, float]:
    """CPU time so far by kind of process, the children of servers included; `feeder` is this process."""
    kinds = {process.pid: process.name.rstrip("-0123456789") for process in stack.supervisor.statuses()}
    used: dict[str, float] = {"feeder": time.process_time(), **dict.fromkeys(kinds.values(), 0.0)}
    parents = {stat.pid: stat.ppid for stat in all_stats()}
    for pid in parents:
        ancestor = pid
        while ancestor not in kinds and ancestor in parents:
            ancestor = parents[ancestor]
        if ancestor in kinds:
            used[kinds[ancestor]] += _ticks(pid) / TICKS_PER_S
    return used


def _ticks(pid: int) -> int:
    """User and system time of a process and of its children that have ended; 0 = gone."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(int(field) for field in fields[11:15])


def measure_floor(stack: Servers) -> Floor:
    """Plain kombu, plain SQL, one connection, one thread."""
    return Floor(messages_per_s=_plain_messages(stack.broker_url), commits_per_s=_plain_commits(stack.database))


def _plain_messages(broker_url: str) -> float:
    left = FLOOR_MESSAGES

    def on_message(_: object, message: object) -> None:
        nonlocal left
        message.ack()  # type: ignore[attr-defined]
        left -= 1

    with Connection(broker_url) as connection, connection.channel() as channel:
        queue = Queue("floor", Exchange("floor", durable=True), routing_key="floor", durable=True)(channel)
        queue.declare()
        started = time.monotonic()
        with connection.Producer(channel) as producer:
            for number in range(FLOOR_MESSAGES):
                producer.publish([number, 1], exchange="floor", routing_key="floor", delivery_mode=2)
        with connection.Consumer(queue, callbacks=[on_message], prefetch_count=16, channel=channel):
            while left:
                connection.drain_events(timeout=10)
        seconds = time.monotonic() - started
        queue.delete()
    return FLOOR_MESSAGES / seconds


def _plain_commits(database: Database) -> float:
    with database.begin() as conn:
        conn.execute(text("CREATE TABLE floor (id int PRIMARY KEY, number int)"))
        conn.execute(text("INSERT INTO floor VALUES (1, 0)"))
    with database.engine.connect() as conn:
        started = time.monotonic()
        for _ in range(FLOOR_COMMITS):
            conn.execute(text("UPDATE floor SET number = number + 1 WHERE id = 1"))
            conn.commit()
        seconds = time.monotonic() - started
        conn.execute(text("DROP TABLE floor"))
        conn.commit()
    return FLOOR_COMMITS / seconds


@contextmanager
def stack_and_app() -> Iterator[tuple[Servers, Celery]]:
    with tempfile.TemporaryDirectory(prefix="pipeline-") as folder, servers(Path(folder) / "data", {}) as stack:
        app = Celery("pipeline")
        given = Settings(broker_url=stack.broker_url)
        app.config_from_object(celery_config(given))
        prepare_broker(app, given)
        yield stack, app
        app.close()


def show(measured: Measured) -> None:
    parts = " ".join(f"{kind}={value:.2f}" for kind, value in sorted(measured.cpu_ms.items()) if value >= 0.005)
    print(
        f"run_processes={measured.run_processes} episodes={measured.episodes} seconds={measured.seconds:.1f} "
        f"episodes_per_s={measured.rate:.0f} cpu_ms_per_episode={sum(measured.cpu_ms.values()):.2f} ({parts})",
        flush=True,
    )


def main() -> int:
    """Measure; exit 1 below the target."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--episodes", type=int, default=5000)
    parser.add_argument("--run-processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--target", type=float, default=200.0, help="episodes a second that the best must reach")
    arguments = parser.parse_args()
    measured: list[Measured] = []
    for run_processes in arguments.run_processes:
        with stack_and_app() as (stack, app):
            floor = measure_floor(stack)
            print(
                f"floor: messages_per_s={floor.messages_per_s:.0f} commits_per_s={floor.commits_per_s:.0f} "
                f"episodes_per_s={floor.episodes_per_s:.0f}",
                flush=True,
            )
            measured.append(measure(stack, app, episodes=arguments.episodes, run_processes=run_processes))
        show(measured[-1])
    rates = " ".join(f"episodes_per_s_{one.run_processes}={one.rate:.0f}" for one in measured)
    cpu = " ".join(f"cpu_ms_{one.run_processes}={sum(one.cpu_ms.values()):.2f}" for one in measured)
    print(f"pipeline: {rates} {cpu} floor_episodes_per_s={floor.episodes_per_s:.0f} target={arguments.target:g}")
    return 0 if max(one.rate for one in measured) >= arguments.target else 1


if __name__ == "__main__":
    sys.exit(main())
