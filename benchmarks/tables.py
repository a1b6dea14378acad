"""`python -m benchmarks.tables`: what the hot statements take while the tables grow to millions of rows.

A private Postgres with its durable defaults; for each size a run with a long past, whose work in flight is claimed,
reaped, announced again and taken for training, each in a transaction of its own, commit included.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from uuid import uuid4

from rich.console import Console
from rich.table import Table
from sqlalchemy import Connection, text

from benchmarks.big_run import GROUP_SIZE, GROUPS_PER_STEP, Size, fill
from common.config import TINY_MODELS, RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, episodes, retries, runs, steps, tasks
from common.db.episodes import Wakeup
from common.db.runs import Run
from common.db.session import Database, migrate
from common.episode import STAGE_OF, EpisodeState
from deploy.folder import DataFolder
from deploy.postgres import prepare_postgres
from deploy.supervisor import Supervisor

MAX_CLAIM_P95_MS = 5.0
MANY, FEW = 300, 20
"""Repeats of a statement that takes one episode, and of one that takes many."""


@contextmanager
def database_in(folder: Path) -> Iterator[Database]:
    """A private server with the schema; it ends with the block."""
    with DataFolder(folder) as data, Supervisor(data) as supervisor:
        postgres = prepare_postgres(data)
        supervisor.launch(postgres.process)
        supervisor.wait_ready()
        database = Database.connect(postgres.url)
        try:
            migrate(database)
            yield database
        finally:
            database.dispose()


def open_run(database: Database) -> Run:
    """With six tasks and an engine."""
    config = RunConfig(
        name="tables",
        model=TINY_MODELS / "tiny-calculator",
        rollout=RolloutConfig(group_size=GROUP_SIZE),
        train=TrainConfig(groups_per_step=GROUPS_PER_STEP),
    )
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        tasks.load(conn, dataset="tables", handler=config.handler, payloads=[(str(n), {}) for n in range(6)])
        engines.register(conn, "http://engine", run_id=run.id)
    return run


def times_ms(database: Database, statement: Callable[[Connection], object], repeats: int) -> list[float]:
    """Of each transaction, its commit included."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        with database.begin() as conn:
            statement(conn)
        times.append(1000 * (time.perf_counter() - started))
    return times


def measure(database: Database, run: Run, size: Size) -> dict[str, list[float]]:
    """Milliseconds by statement."""
    with database.begin() as conn:
        waiting = conn.execute(
            text("SELECT id, attempt, state FROM episode WHERE claim_token IS NULL AND state = ANY(:takes)"),
            {"takes": list(STAGE_OF)},
        ).all()
    wakeups = iter(
        [Wakeup(stage=STAGE_OF[EpisodeState(row.state)], episode_id=row.id, attempt=row.attempt) for row in waiting]
    )

    def claim(conn: Connection) -> None:
        assert episodes.claim(conn, next(wakeups), worker="w", token=uuid4(), lease_s=30, configs={run.id: run.config})

    versions = count(size.num_steps)

    def take(conn: Connection) -> None:
        version = next(versions)
        steps.take_groups(conn, run.id, version_in=version, num_groups=GROUPS_PER_STEP, max_staleness=version)
        conn.execute(text("UPDATE train_step SET state = 'DROPPED' WHERE state = 'OPEN'"))

    return {
        "SELECT 1": times_ms(database, lambda conn: conn.execute(text("SELECT 1")), MANY),
        "claim": times_ms(database, claim, MANY),
        "reap": times_ms(database, lambda conn: retries.reap(conn, max_attempts=5, limit=5), FEW),
        "resend": times_ms(database, lambda conn: episodes.resend(conn, after_s=30, limit=5), FEW),
        "take": times_ms(database, take, FEW // 5),
    }


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> int:
    """Measure; exit 1 when a claim is too slow at any size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--episodes", type=int, nargs="+", default=[10_000, 200_000, 1_000_000])
    parser.add_argument("--turns", type=int, default=20, help="turns of each episode")
    arguments = parser.parse_args()
    console = Console()
    table = Table("episodes", "turns", "GiB", "statement", "p50 ms", "p95 ms")
    p95s: dict[int, float] = {}
    for episodes_wanted in arguments.episodes:
        size = Size(num_steps=episodes_wanted // (GROUP_SIZE * GROUPS_PER_STEP), turns_per_episode=arguments.turns)
        console.print(f"filling {size.num_episodes:,} episodes, {size.num_turns:,} turns …", highlight=False)
        with tempfile.TemporaryDirectory(prefix="tables-") as folder, database_in(Path(folder) / "data") as database:
            run = open_run(database)
            fill(database, run.id, size)
            measured = measure(database, run, size)
            with database.begin() as conn:
                gib = conn.execute(text("SELECT pg_database_size(current_database())")).scalar_one() / 2**30
        for name, times in measured.items():
            row = (
                (f"{size.num_episodes:,}", f"{size.num_turns:,}", f"{gib:.1f}") if name == "SELECT 1" else ("", "", "")
            )
            table.add_row(*row, name, f"{percentile(times, 0.5):.2f}", f"{percentile(times, 0.95):.2f}")
        p95s[size.num_episodes] = percentile(measured["claim"], 0.95)
    console.print(table)
    figures = " ".join(f"claim_p95_ms_{number}={p95:.2f}" for number, p95 in p95s.items())
    print(f"tables: {figures} turns_per_episode={arguments.turns} limit_ms={MAX_CLAIM_P95_MS:g}")
    return 1 if max(p95s.values()) >= MAX_CLAIM_P95_MS else 0


if __name__ == "__main__":
    sys.exit(main())
