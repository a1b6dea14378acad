"""`python -m benchmarks.chaos`: kill everything again and again while a run goes on; nothing is lost, doubled or stuck.

Real RabbitMQ and Postgres, three processes for each fleet, two feeders, two reapers, the trainer, two engines. The task
is `shell`, with a sandbox for each episode. The engines are scripted: a script is their policy, so that they take next
to no CPU and each token takes its time, as with a large model.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from rich.console import Console

from benchmarks.chaos_display import Display
from benchmarks.killer import Killer, Plan
from benchmarks.stack import Servers, servers
from common.config import TINY_MODELS, RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import audit
from common.db.runs import Run
from common.db.snapshot import Snapshot
from common.episode import FINAL_STATES, EpisodeState, RunState, Stage
from common.errors import SetupError
from deploy.process import Restart
from deploy.procfs import PROC, all_stats
from deploy.watch import RunReader

LEASE_S = 4.0
SETTINGS = {
    # Short, so that what a kill takes with it comes back while we look.
    "ROLLMILL_LEASE_S": f"{LEASE_S:g}",
    "ROLLMILL_HEARTBEAT_S": "1",
    "ROLLMILL_RESEND_AFTER_S": "4",
    # An episode here meets more deaths than in years of service; each counts as a failure.
    "ROLLMILL_MAX_ATTEMPTS": "1000",
    "ROLLMILL_RETRY_BACKOFF_MAX_S": "1",
}
GROUP_SIZE, GROUPS_PER_STEP, MAX_STALENESS = 4, 3, 3
IN_FLIGHT = (MAX_STALENESS + 1) * GROUPS_PER_STEP * GROUP_SIZE
TOKENS_PER_EPISODE = 45
"""Of three turns: ls, cat, the answer."""
WARM_UP_TIMEOUT_S = 120.0
DRAIN_TIMEOUT_S = 60.0
POLL_EVERY_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the user asked for."""

    episodes: int
    seed: int
    seconds: float
    """How long we kill."""
    kills: int
    """How many kills are wanted in that time."""
    data_dir: Path


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a session showed."""

    killer: Killer
    other_ends: int
    """Ends of processes that we did not kill: those that could not start without a server, for the most part."""
    snapshot: Snapshot
    violations: dict[str, int]
    resumptions: list[audit.Resumption]
    sandbox_processes: int
    sandbox_folders: int
    seconds: float


def run_config(order: Order) -> RunConfig:
    """As many versions as give the episodes that are wanted."""
    per_version = GROUPS_PER_STEP * GROUP_SIZE
    return RunConfig(
        name="chaos",
        handler="shell",
        model=TINY_MODELS / "tiny-shell",
        seed=order.seed,
        rollout=RolloutConfig(group_size=GROUP_SIZE, max_turns=4, max_tokens_per_turn=64),
        train=TrainConfig(
            num_versions=-(-order.episodes // per_version),
            groups_per_step=GROUPS_PER_STEP,
            minibatches=1,
            max_staleness=MAX_STALENESS,
        ),
    )


def chaos(order: Order, console: Console) -> Found:
    """One session, from the first process to the audit."""
    config = run_config(order)
    with ExitStack() as stack:
        stack_of = stack.enter_context(servers(order.data_dir, SETTINGS))
        run = stack_of.open_run(config)
        # A quarter of the time that room allows: kills make every episode take more than one attempt.
        token_s = 0.25 * IN_FLIGHT * order.seconds / order.episodes / TOKENS_PER_EPISODE
        stack_of.start_engines(run, 2, "shell", "--token-s", f"{token_s:.4f}")
        _start_work(stack_of, config)
        plan = Plan(
            # A little faster than ordered, for the times when nothing is left to kill.
            kill_every_s=0.9 * order.seconds / order.kills,
            pause_every_s=order.seconds / 8,
            pause_s=2.5 * LEASE_S,
            broker_at_s=0.35 * order.seconds,
            postgres_at_s=0.7 * order.seconds,
        )
        killer = Killer(plan, seed=order.seed)
        reader = stack.enter_context(RunReader(stack_of.database, run.id))
        display = stack.enter_context(Display(console, episodes=order.episodes, seconds=order.seconds))
        started_s = time.monotonic()
        snapshot = _until_over(stack_of, reader, killer, display, order)
        display.say(f"the run is {snapshot.state}: waiting for the reapers")
        _until_swept(stack_of, run)
        display.say("auditing")
        return _look(stack_of, run, killer, snapshot, seconds=time.monotonic() - started_s)


def _start_work(stack: Servers, config: RunConfig) -> None:
    config_file = stack.data_dir / "run.toml"
    config_file.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
    stack.supervisor.start(
        *stack.fleets(dict.fromkeys(Stage, 3)),
        *(stack.python(f"feeder-{index}", "workers.feeder") for index in range(2)),
        *(stack.python(f"reaper-{index}", "workers.reaper") for index in range(2)),
        stack.python("trainer", "trainer", "--config", str(config_file), restart=Restart.ON_FAILURE),
    )


def _until_over(stack: Servers, reader: RunReader, killer: Killer, display: Display, order: Order) -> Snapshot:
    """Kill for the time that was ordered, from the first scored episode on, then wait for the end of the run."""
    started_s = time.monotonic()
    while (first := reader.latest.snapshot) is None or not first.episodes[EpisodeState.SCORED]:
        stack.supervisor.poll()
        if time.monotonic() - started_s > WARM_UP_TIMEOUT_S:
            raise SetupError(f"no episode was scored within {WARM_UP_TIMEOUT_S:g} s: see {stack.data_dir / 'logs'}")
        time.sleep(POLL_EVERY_S)
    started_s = time.monotonic()
    deadline_s = 3 * order.seconds + DRAIN_TIMEOUT_S
    while True:
        stack.supervisor.poll()
        now_s = time.monotonic() - started_s
        if now_s < order.seconds:
            killer.step(now_s, stack.supervisor.statuses())
        else:
            killer.wake_all()
        snapshot = reader.latest.snapshot
        display.show(now_s, snapshot, killer)
        if snapshot is not None and (snapshot.state is RunState.FINISHED or now_s > deadline_s):
            killer.wake_all()
            return snapshot
        time.sleep(POLL_EVERY_S)


def _until_swept(stack: Servers, run: Run) -> None:
    """Wait until the reapers have removed what the last kills left behind."""
    deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
    while time.monotonic() < deadline_s:
        stack.supervisor.poll()
        with stack.database.begin() as conn:
            left = audit.violations(conn, run.id)["sandboxes_left"]
        if not left and not _sandbox_processes():
            return
        time.sleep(1.0)


def _look(stack: Servers, run: Run, killer: Killer, snapshot: Snapshot, *, seconds: float) -> Found:
    with stack.database.begin() as conn:
        found, resumed = audit.violations(conn, run.id), audit.resumptions(conn, run.id, killer.struck)
    restarts = sum(process.restarts for process in stack.supervisor.statuses())
    return Found(
        killer=killer,
        other_ends=restarts - killer.kills.total(),
        snapshot=snapshot,
        violations=found,
        resumptions=resumed,
        sandbox_processes=_sandbox_processes(),
        # Number 0 belongs to no episode: a worker tries its backend with it when it starts.
        sandbox_folders=sum(not path.name.startswith("0-") for path in (stack.data_dir / "sandboxes").iterdir()),
        seconds=seconds,
    )


def _sandbox_processes() -> int:
    """Processes of sandboxes among our offspring: we adopt those whose worker died."""
    stats = {stat.pid: stat for stat in all_stats() if not stat.is_zombie}
    ours = {os.getpid()}
    grown = True
    while grown:
        more = {pid for pid, stat in stats.items() if stat.ppid in ours} - ours
        ours |= more
        grown = bool(more)
    return sum(_is_sandbox(pid) for pid in ours)


def _is_sandbox(pid: int) -> bool:
    """The walls themselves, and whatever runs inside them: nothing else here has a process namespace of its own."""
    process = PROC / str(pid)
    try:
        is_inside = (process / "ns" / "pid").readlink() != (PROC / "self" / "ns" / "pid").readlink()
        return is_inside or (process / "comm").read_text().strip() in ("bwrap", "unshare", "setpriv")
    except OSError:
        return False


def shortfalls(order: Order, found: Found) -> list[str]:
    """What breaks the promise; [] = nothing."""
    episodes = sum(found.snapshot.episodes.values())
    return [
        *(f"{name} = {count}" for name, count in found.violations.items() if count),
        *([f"the run is {found.snapshot.state}"] if found.snapshot.state is not RunState.FINISHED else []),
        *([f"{episodes} episodes < {order.episodes}"] if episodes < order.episodes else []),
        *([f"{found.killer.kills.total()} kills < {order.kills}"] if found.killer.kills.total() < order.kills else []),
        *([f"{found.sandbox_processes} sandbox processes alive"] if found.sandbox_processes else []),
        *([f"{found.sandbox_folders} sandbox folders left"] if found.sandbox_folders else []),
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """0 for none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def figures(found: Found) -> dict[str, str]:
    """Of one session, for its last line and the report."""
    states = found.snapshot.episodes
    held = found.resumptions
    taken_back = [resumption.taken_back_s for resumption in held]
    resumed = [resumption.resumed_s for resumption in held if resumption.resumed_s is not None]
    return {
        "kills": str(found.killer.kills.total()),
        "pauses": str(found.killer.num_pauses),
        "other_ends": str(found.other_ends),
        "episodes": str(sum(states.values())),
        "final": str(sum(states[state] for state in FINAL_STATES)),
        "lost": str(found.violations["lost"]),
        "doubled": str(found.violations["doubled"] + found.violations["turns_doubled"]),
        "violations": str(sum(found.violations.values())),
        "failed": str(states[EpisodeState.FAILED]),
        "versions": str(found.snapshot.version_newest),
        "held_at_kill": str(len(held)),
        "taken_back_p50_s": f"{percentile(taken_back, 0.5):.1f}",
        "taken_back_p95_s": f"{percentile(taken_back, 0.95):.1f}",
        "resumed_p50_s": f"{percentile(resumed, 0.5):.1f}",
        "resumed_p95_s": f"{percentile(resumed, 0.95):.1f}",
        "seconds": f"{found.seconds:.0f}",
    }


def session(order: Order, console: Console) -> tuple[dict[str, str], bool]:
    """One session, its figures and whether it held."""
    found = chaos(order, console)
    by_kind = "  ".join(f"{kind} {num}" for kind, num in sorted(found.killer.kills.items()))
    console.print(f"killed: {by_kind}", highlight=False)
    complaints = shortfalls(order, found)
    console.print("; ".join(complaints) or "ok", highlight=False)
    return figures(found), not complaints


def as_markdown(rows: Sequence[tuple[int, Mapping[str, str]]]) -> str:
    """A table, one row a seed."""
    names = list(rows[0][1])
    lines = [["seed", *names], ["---"] * (len(names) + 1), *([str(seed), *row.values()] for seed, row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    """A session for each seed; exit 1 when one falls short."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a session for each")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long processes are killed")
    parser.add_argument("--kills", type=int, help="how many in that time; default one every two seconds")
    parser.add_argument("--data-dir", type=Path, help="kept afterwards, with its logs; default a temporary one")
    parser.add_argument("--table", type=Path, help="write the figures of all sessions as a Markdown table")
    arguments = parser.parse_args()
    console = Console()
    rows, held = [], []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            order = Order(
                episodes=arguments.episodes,
                seed=seed,
                seconds=arguments.seconds,
                kills=arguments.kills or int(arguments.seconds / 2),
                data_dir=(arguments.data_dir / str(seed) if arguments.data_dir else Path(folder) / "data").absolute(),
            )
            found, ok = session(order, console)
        rows.append((seed, found))
        held.append(ok)
        print(f"chaos: seed={seed} {' '.join(f'{name}={value}' for name, value in found.items())}", flush=True)
    if arguments.table:
        arguments.table.write_text(as_markdown(rows))
    if len(rows) > 1:
        totals = " ".join(
            f"{name}={sum(int(row[name]) for _, row in rows)}"
            for name in ("kills", "episodes", "final", "lost", "doubled", "violations")
        )
        print(f"chaos: runs={len(rows)} failed_runs={held.count(False)} {totals}")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
