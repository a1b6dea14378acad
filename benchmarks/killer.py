"""Kills and stops processes of a stack at random times that a seed decides; counts what it did. No clock of its own."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType

from common.db.audit import Kill
from common.episode import Stage
from deploy.supervisor import ProcessStatus, State

WEIGHTS: Mapping[str, float] = MappingProxyType(
    {"fleet-run": 8, "fleet-init": 4, "fleet-eval": 4, "engine": 3, "reaper": 3, "feeder": 2, "trainer": 1}
)
"""How often a kind of process is chosen, beside the others. A kind is a process's name without its last number."""
MIN_AGE_S = 3.0
"""A process is let alone until it has had time to import and to claim something."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """When something happens, in seconds from the start."""

    kill_every_s: float
    """Mean time between two kills."""
    pause_every_s: float
    """Mean time between two pauses of a worker (SIGSTOP … SIGCONT)."""
    pause_s: float
    """How long a pause lasts: past the lease."""
    broker_at_s: float
    """When the broker is killed."""
    postgres_at_s: float
    """When Postgres crashes: SIGQUIT, its immediate shutdown, without a checkpoint."""


class Killer:
    """`step` does what is due. The supervisor starts again what was killed."""

    def __init__(self, plan: Plan, *, seed: int) -> None:
        self._plan = plan
        self._rng = random.Random(seed)
        self._next_kill_s = plan.kill_every_s
        self._next_pause_s = plan.pause_every_s
        self._servers = {"rabbitmq": plan.broker_at_s, "postgres": plan.postgres_at_s}
        self._born_s: dict[int, float] = {}
        self._paused: dict[int, float] = {}
        self.kills: Counter[str] = Counter()
        """By kind, servers included."""
        self.num_pauses = 0
        self.struck: list[Kill] = []
        """Worker processes that were killed while they may have held claims."""

    def step(self, now_s: float, processes: Sequence[ProcessStatus]) -> None:
        """Kill and pause what is due; every process that `processes` calls up may be hit."""
        up = {process.pid: process for process in processes if process.state is State.UP}
        self._born_s = {pid: self._born_s.get(pid, now_s) for pid in up}
        self._wake(now_s)
        self._strike_servers(now_s, up)
        if now_s >= self._next_kill_s and (victim := self._choose(now_s, up)):
            self._kill(victim, signal.SIGKILL)
            # From now on, not from when it was due: after an outage there is no volley.
            self._next_kill_s = now_s + self._plan.kill_every_s * self._rng.uniform(0.5, 1.5)
        if now_s >= self._next_pause_s and (victim := self._choose(now_s, up, kinds=("fleet-run", "fleet-init"))):
            self._pause(victim, now_s)
            self._next_pause_s = now_s + self._plan.pause_every_s * self._rng.uniform(0.5, 1.5)

    def wake_all(self) -> None:
        """Let all that is stopped go on."""
        self._wake(float("inf"))

    def _choose(
        self, now_s: float, up: Mapping[int, ProcessStatus], *, kinds: Sequence[str] = tuple(WEIGHTS)
    ) -> ProcessStatus | None:
        old_enough = [
            process
            for pid, process in up.items()
            if kind_of(process) in kinds and pid not in self._paused and now_s - self._born_s[pid] >= MIN_AGE_S
        ]
        if not old_enough:
            return None
        num = Counter(kind_of(process) for process in old_enough)
        weights = [WEIGHTS[kind_of(process)] / num[kind_of(process)] for process in old_enough]
        return self._rng.choices(old_enough, weights)[0]

    def _kill(self, victim: ProcessStatus, number: signal.Signals) -> None:
        self._note(victim)
        with suppress(ProcessLookupError):
            os.kill(victim.pid, number)
        self.kills[kind_of(victim)] += 1

    def _pause(self, victim: ProcessStatus, now_s: float) -> None:
        with suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGSTOP)
        self._paused[victim.pid] = now_s + self._plan.pause_s
        self.num_pauses += 1

    def _wake(self, now_s: float) -> None:
        for pid in [pid for pid, until_s in self._paused.items() if now_s >= until_s]:
            del self._paused[pid]
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _strike_servers(self, now_s: float, up: Mapping[int, ProcessStatus]) -> None:
        for process in up.values():
            if now_s >= self._servers.get(process.name, float("inf")):
                del self._servers[process.name]
                self._kill(process, signal.SIGQUIT if process.name == "postgres" else signal.SIGKILL)

    def _note(self, victim: ProcessStatus) -> None:
        kind, _, stage = kind_of(victim).partition("-")
        if kind == "fleet":
            worker = f"{Stage(stage)}@{socket.gethostname()}:{victim.pid}"
            self.struck.append(Kill(worker=worker, at=datetime.now(UTC)))


def kind_of(process: ProcessStatus) -> str:
    """`fleet-run-2` is a `fleet-run`."""
    head, _, tail = process.name.rpartition("-")
    return head if tail.isdecimal() else process.name
