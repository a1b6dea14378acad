"""The trainer killed at every point of a step: nothing is trained twice or lost, and the numbers are the same."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import pytest

from tests.integration import fixed_run, test_trainer
from tests.integration.conftest import REPORT
from tests.integration.doomed import Point
from tests.integration.fixed_run import Curve, MakeRun

start_folder = test_trainer.start_folder
make_run = fixed_run.make_run
undisturbed = fixed_run.undisturbed
NUM_KILLS = 3
VERSION = r"00000[1-9]"
DRAFT = rf"\.draft-{VERSION}-\w+"
PUBLISH = r"INSERT INTO policy_version .*'number': [1-9]"


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A point of the step protocol."""

    pattern: str
    """As in doomed.Point."""
    per_step: int = 1
    """Lines of a step that match; the first of them is where it dies."""
    leaves: str = "open"
    """How the step stands then: `none` = not begun, `open`, or `done`."""


STOPS = {
    # No process comes further than this before the last.
    "before the start weights' rename": Stop(pattern="os.rename .*/weights/.*/000000 ", per_step=0, leaves="none"),
    "before the take commits": Stop(pattern=r"commit after UPDATE episode_group SET state = 'TAKEN'", leaves="none"),
    "with the step open, before its groups are read": Stop(pattern=r"sql SELECT e\.id, e\.group_id, e\.outcome"),
    "in the forward pass": Stop(pattern="forward Qwen3MLP", per_step=4),
    "in the backward pass": Stop(pattern="backward Qwen3MLP", per_step=4),
    "between the optimizer's steps": Stop(pattern="optimizer step", per_step=2),
    "before the checkpoint": Stop(pattern=r"tempfile.mkdtemp .*/checkpoints/"),
    "with half a checkpoint": Stop(pattern=rf"open .*/checkpoints/.*/{DRAFT}/manifest.json w"),
    "before the checkpoint's rename": Stop(pattern=rf"os.rename .*/checkpoints/.*/{VERSION} "),
    "after the checkpoint's rename": Stop(pattern=r"open .*/checkpoints/run-\d+ None"),
    "with half a version": Stop(pattern=rf"open .*/weights/.*/{DRAFT}/manifest.json w"),
    "before the version's rename": Stop(pattern=rf"os.rename .*/weights/.*/{VERSION} "),
    "after the version's rename": Stop(pattern=r"sql SELECT state FROM train_step .* FOR UPDATE"),
    "within the transaction that marks it done": Stop(pattern=r"sql INSERT INTO trained_episode"),
    "before that transaction's commit": Stop(pattern=f"commit after {PUBLISH}"),
    "after the commit, before the announcement": Stop(pattern=f"after commit of {PUBLISH}", leaves="done"),
    "with an old checkpoint half deleted": Stop(pattern=rf"os.rmdir .*/checkpoints/.*/{VERSION} ", leaves="done"),
}


@dataclass
class Figures:
    """Over all points."""

    points: int = 0
    kills: int = 0
    trained_twice: int = 0
    lost: int = 0
    curve_max_diff: float = 0.0


@pytest.fixture(scope="module")
def figures(pytestconfig: pytest.Config) -> Iterator[Figures]:
    """Shown as the last line of the output."""
    found = Figures()
    yield found
    shown = " ".join(f"{name}={value:g}" for name, value in asdict(found).items())
    pytestconfig.stash[REPORT].append(f"crash_points: {shown}")


@pytest.mark.parametrize("where", STOPS)
def test_killed_trainer_trains_each_group_once_and_ends_with_the_same_weights(
    make_run: MakeRun, undisturbed: Curve, figures: Figures, where: str
) -> None:
    stop, run = STOPS[where], make_run()
    for kill in range(NUM_KILLS):
        # A process that comes after a kill in an open step trains that step again, and dies in the next.
        at = 1 if kill == 0 or stop.leaves == "done" else 1 + stop.per_step
        assert run.train(Point(pattern=stop.pattern, at=at)) == -signal.SIGKILL, run.log()
        figures.kills += 1
        assert run.standing()[1] == (stop.leaves == "open")
    assert run.train() == 0, run.log()
    wrongs, curve = run.wrongs(), run.curve()
    figures.points += 1
    figures.trained_twice += wrongs.get("trained_twice", 0)
    figures.lost += wrongs.get("groups_lost", 0)
    figures.curve_max_diff = max(figures.curve_max_diff, curve.distance(undisturbed))
    assert wrongs == {}
    assert run.drafts() == []
    assert curve == undisturbed
