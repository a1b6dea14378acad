from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from signal import Signals

import pytest

from common.db.snapshot import Snapshot
from common.db.step_troubles import MAX_FAILURES, StepTrouble
from common.episode import RunState
from common.errors import SetupError
from deploy.display import plain_line
from deploy.progress import View
from deploy.supervisor import ProcessStatus, StopRequested
from deploy.watch import Movement, Reading, Watched, problem_of, watch
from tests.unit.deploy.samples import CONFIG, make_process, make_snapshot


class CountingStack:
    """Counts how often it is polled; asks to stop at the n-th time."""

    def __init__(self, *, stop_at: int | None = None) -> None:
        self.num_polls = 0
        self._stop_at = stop_at

    def poll(self) -> None:
        self.num_polls += 1
        if self.num_polls == self._stop_at:
            raise StopRequested(Signals.SIGINT)

    def statuses(self) -> Sequence[ProcessStatus]:
        return [make_process("engine", restarts=self.num_polls)]


class Frames:
    """A display that keeps what it was shown."""

    def __init__(self) -> None:
        self.views: list[View] = []

    def show(self, view: View) -> None:
        self.views.append(view)


class Readings:
    """Gives one reading after the other, and then the last for ever."""

    def __init__(self, *snapshots: Snapshot | None) -> None:
        self._readings = [
            Reading(snapshot=snapshot, at_s=float(number), error=None) for number, snapshot in enumerate(snapshots)
        ]

    def __call__(self) -> Reading:
        return self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]


def watched(*, stall_limit_s: float | None = None) -> Watched:
    return Watched(config=CONFIG, data_folder=Path("/data"), started_s=0.0, stall_limit_s=stall_limit_s)


def test_watching_ends_with_the_run_and_polls_the_stack_before_every_frame() -> None:
    stack, frames = CountingStack(), Frames()
    finished = make_snapshot(state=RunState.FINISHED, version_newest=40)
    readings = Readings(None, make_snapshot(tokens_sampled=100), make_snapshot(tokens_sampled=300), finished)
    assert watch(watched(), stack=stack, latest=readings, display=frames) is finished
    assert [view.processes[0].restarts for view in frames.views] == [1, 2, 3, 4]
    assert frames.views[0].snapshot is None
    assert frames.views[2].rates.tokens_per_s == 200
    assert frames.views[-1].snapshot is finished


def test_a_run_that_somebody_stopped_is_over_too() -> None:
    stopped = make_snapshot(state=RunState.STOPPED)
    assert watch(watched(), stack=CountingStack(), latest=Readings(stopped), display=Frames()) is stopped


def test_the_stacks_errors_end_the_watching() -> None:
    stack = CountingStack(stop_at=3)
    with pytest.raises(StopRequested):
        watch(watched(), stack=stack, latest=Readings(make_snapshot()), display=Frames())
    assert stack.num_polls == 3


def test_a_run_that_cannot_be_fed_ends_the_watching_with_the_reason() -> None:
    broken = make_snapshot(error="unknown handler 'nope'")
    with pytest.raises(SetupError, match="run demo-shell-seed7 cannot be fed: unknown handler 'nope'"):
        watch(watched(), stack=CountingStack(), latest=Readings(broken), display=Frames())


def test_step_that_failed_too_often_ends_the_watching_with_the_error_and_ways_on() -> None:
    failing = make_snapshot(step_trouble=trouble(MAX_FAILURES))
    with pytest.raises(SetupError) as given_up:
        watch(watched(), stack=CountingStack(), latest=Readings(failing), display=Frames())
    assert str(given_up.value) == (
        "run demo-shell-seed7: training step from version 4 failed 3 times: ValueError: no. The traceback is in "
        "/data/logs/trainer.log; the same command tries it again, `rollmill run stop demo-shell-seed7` ends the run"
    )
    stopped = replace(failing, state=RunState.STOPPED)
    assert watch(watched(), stack=CountingStack(), latest=Readings(stopped), display=Frames()) is stopped


def test_a_run_that_was_paused_for_a_reason_is_shown_and_ends_the_watching_with_ways_on() -> None:
    frames, paused = Frames(), make_snapshot(state=RunState.PAUSED, pause_reason="80 groups were dropped")
    with pytest.raises(SetupError) as given_up:
        watch(watched(), stack=CountingStack(), latest=Readings(paused), display=frames)
    assert str(given_up.value) == (
        "run demo-shell-seed7 is paused: 80 groups were dropped. Mend the cause, then `rollmill run resume "
        "demo-shell-seed7` and the same command let it go on; `rollmill run stop demo-shell-seed7` ends it"
    )
    assert "paused: 80 groups were dropped" in plain_line(frames.views[-1])


def test_a_run_that_somebody_paused_by_hand_is_waited_for() -> None:
    finished = make_snapshot(state=RunState.FINISHED)
    readings = Readings(make_snapshot(state=RunState.PAUSED), finished)
    assert watch(watched(), stack=CountingStack(), latest=readings, display=Frames()) is finished


def test_step_that_failed_is_shown_while_it_is_tried_again() -> None:
    frames = Frames()
    finished = make_snapshot(state=RunState.FINISHED)
    readings = Readings(make_snapshot(step_trouble=trouble(1)), finished)
    watch(watched(), stack=CountingStack(), latest=readings, display=frames)
    assert "training step from version 4 failed 1 time: ValueError: no" in (frames.views[0].problem or "")
    assert "training step" not in (frames.views[-1].problem or "")
    assert "! " in plain_line(frames.views[0])


def trouble(failures: int) -> StepTrouble:
    return StepTrouble(version_in=4, error="ValueError: no", failures=failures)


def test_figures_that_stand_still_too_long_are_an_error_that_names_run_and_logs() -> None:
    with pytest.raises(SetupError, match=r"run demo-shell-seed7: no figure has changed .* /data/logs"):
        watch(watched(stall_limit_s=0.1), stack=CountingStack(), latest=Readings(make_snapshot()), display=Frames())


def test_a_paused_run_may_stand_still() -> None:
    movement = Movement(CONFIG, now_s=0.0)
    for at_s in (1.0, 900.0):
        movement.note(Reading(snapshot=make_snapshot(state=RunState.PAUSED), at_s=at_s, error=None))
    assert movement.moved_s == 900.0


def test_old_figures_are_explained() -> None:
    fresh = Reading(snapshot=make_snapshot(), at_s=100.0, error=None)
    assert problem_of(fresh, now_s=101.0) is None
    assert problem_of(fresh, now_s=112.0) == "the database takes its time: figures are 12 s old"
    away = Reading(snapshot=make_snapshot(), at_s=100.0, error="connection refused")
    assert problem_of(away, now_s=103.0) == ("the database does not answer (connection refused): figures are 3 s old")


def test_a_broker_that_is_away_is_named_beside_what_else_is_wrong() -> None:
    away = Reading(snapshot=make_snapshot(), at_s=100.0, error=None, broker_away="amqp://me:***@host//: refused")
    assert problem_of(away, now_s=101.0) == "broker away: amqp://me:***@host//: refused"
    assert problem_of(replace(away, error="gone"), now_s=103.0) == (
        "the database does not answer (gone): figures are 3 s old; broker away: amqp://me:***@host//: refused"
    )
