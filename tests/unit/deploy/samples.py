"""A run in the middle and a run at its end, as the database would tell of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from common.config import RunConfig
from common.config_train import TrainConfig
from common.db.examples import EXAMPLES, Answer
from common.db.report import Summary
from common.db.snapshot import EpisodeFailure, Snapshot, StageCounts, VersionReward
from common.episode import DropReason, EpisodeState, GroupState, RunState, Stage
from deploy.progress import Rates, View
from deploy.report import Report, Seconds, Session
from deploy.supervisor import ProcessStatus, State

CONFIG = RunConfig(
    name="demo-shell-seed7", handler="shell", model=Path("/models/tiny"), seed=7, train=TrainConfig(num_versions=40)
)


def make_snapshot(**changes: Any) -> Snapshot:
    snapshot = Snapshot(
        state=RunState.ACTIVE,
        error=None,
        pause_reason=None,
        step_trouble=None,
        engine_trouble=None,
        stages={
            Stage.INIT: StageCounts(waiting=11, working=12, done=1300),
            Stage.RUN: StageCounts(waiting=21, working=22, done=1257),
            Stage.EVAL: StageCounts(waiting=31, working=32, done=1194),
        },
        episodes=dict.fromkeys(EpisodeState, 0) | {EpisodeState.SCORED: 1194, EpisodeState.FAILED: 3},
        groups=dict.fromkeys(GroupState, 0) | {GroupState.OPEN: 9, GroupState.TRAINED: 160, GroupState.DROPPED: 2},
        version_newest=10,
        version_live=9,
        lag_last=0,
        lag_max=1,
        tokens_sampled=45_678,
        rewards=tuple(VersionReward(version=v, episodes=128 if v < 10 else 5, mean_reward=v / 10) for v in range(11)),
        last_failure=None,
    )
    return replace(snapshot, **changes)


def make_process(name: str, **changes: Any) -> ProcessStatus:
    status = ProcessStatus(name=name, state=State.UP, pid=1, restarts=0, start_s=1.0, last_exit=None, last_words=None)
    return replace(status, **changes)


def make_view(**changes: Any) -> View:
    view = View(
        config=CONFIG,
        data_folder=Path("/data"),
        elapsed_s=65.2,
        snapshot=make_snapshot(),
        rates=Rates(tokens_per_s=1234.5, episodes_per_s=23.46, eta_s=90.0),
        processes=(make_process("engine"), make_process("trainer")),
        problem=None,
    )
    return replace(view, **changes)


def make_summary(**changes: Any) -> Summary:
    summary = Summary(
        state=RunState.FINISHED,
        step_trouble=None,
        versions=tuple(range(41)),
        mean_reward_by_version=(0.1, 0.2, 0.3, *[0.5] * 32, 0.7, 0.8, 0.9, 1.0, 1.0),
        episodes_total=5140,
        episodes_trained=5120,
        episodes_failed=4,
        episodes_cancelled=0,
        episodes_stragglers=0,
        episodes_stale=16,
        episodes_dropped_other=0,
        episodes_dropped_zero_variance=0,
        episodes_left_out=0,
        groups_trained=640,
        groups_trained_zero_variance=31,
        groups_dropped={DropReason.STALE: 2},
        episodes_untrainable=0,
        episodes_in_flight=0,
        episodes_lost=0,
        episodes_trained_twice=0,
        lag_max=1,
        lag_mean=0.4321,
        token_mismatches=0,
        logprob_gap_max=3.14e-6,
        tokens_sampled=200_123,
        histories_rewritten=0,
        attempts=5143,
        outcomes={"finished": 5000, "turn_limit": 140},
        failures={"lease_lost": 3, "handler_failed": 1},
        last_failure=EpisodeFailure(episode_id=17, why="handler_failed: run of my:Tool: KeyError: [red]"),
    )
    return replace(summary, **changes)


def make_report(**changes: Any) -> Report:
    answer = Answer(columns=("version", "mean"), rows=tuple((version, version / 40) for version in range(40)))
    report = Report(
        config=CONFIG,
        summary=make_summary(),
        answers=tuple((example, answer) for example in EXAMPLES),
        session=Session(
            seconds=Seconds(setup=31.0, start=6.2, train=101.3, stop=None),
            resumed_from_version=None,
            restarts={"engine": 0, "fleet-run": 2},
        ),
    )
    return replace(report, **changes)
