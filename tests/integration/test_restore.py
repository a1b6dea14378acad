"""A trainer that starts with a damaged checkpoint, or with another run's: nothing is undone or trained again."""

from __future__ import annotations

import shutil
import signal
from functools import partial
from pathlib import Path

import torch

from tests.integration import fixed_run, test_trainer
from tests.integration.doomed import Point
from tests.integration.fixed_run import Curve, FixedRun, MakeRun
from trainer.checkpoint import STATE_FILE, CheckpointStore, write_whole

start_folder = test_trainer.start_folder
make_run = fixed_run.make_run
undisturbed = fixed_run.undisturbed
OUTSIDE_IS_TO_BE_MENDED = 2


def killed_after(run: FixedRun, version: int) -> FixedRun:
    """The run, whose trainer died when it had just made the version."""
    point = Point(pattern=rf"after commit of INSERT INTO policy_version .*'number': {version}")
    assert run.train(point) == -signal.SIGKILL, run.log()
    return run


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def test_damaged_checkpoint_costs_the_optimizer_a_step_and_the_run_none(make_run: MakeRun, undisturbed: Curve) -> None:
    run = killed_after(make_run(keep_checkpoints=2), 3)
    newest = run.checkpoint(3)
    cut(newest / STATE_FILE)
    assert run.train() == 0, run.log()
    assert run.wrongs() == {}
    assert f"ERROR trainer.restore checkpoint {newest}: {newest / STATE_FILE} has" in run.log()
    assert f"the optimizer's state is 1 steps older, of checkpoint {run.checkpoint(2)}" in run.log()
    curve = run.curve()
    assert curve.metrics[:3] == undisturbed.metrics[:3]
    # Taken before the weights change: that they are those of version 3 shows in both to the last bit.
    assert curve.metrics[3]["entropy"] == undisturbed.metrics[3]["entropy"] != curve.metrics[2]["entropy"]
    assert curve.state != undisturbed.state


def test_only_checkpoint_that_is_damaged_is_named_and_can_be_put_back(make_run: MakeRun, undisturbed: Curve) -> None:
    run = killed_after(make_run(keep_checkpoints=1), 3)
    newest = run.checkpoint(3)
    copy = newest.with_name("copy")
    shutil.copytree(newest, copy)
    assert not run.checkpoint(1).exists()
    shutil.rmtree(run.checkpoint(2), ignore_errors=True)
    cut(newest / STATE_FILE)
    assert run.train() == OUTSIDE_IS_TO_BE_MENDED
    last = run.log().splitlines()[-1]
    assert f"trainer: cannot go on: checkpoint {newest}: {newest / STATE_FILE} has" in last
    assert "no older one" in last
    assert str(run.data_dir / "weights" / run.run.name / "000003") in last
    assert run.standing() == (3, 0)
    shutil.rmtree(newest)
    copy.rename(newest)
    assert run.train() == 0, run.log()
    assert run.curve() == undisturbed


def test_checkpoint_and_version_both_damaged_are_both_named(make_run: MakeRun) -> None:
    run = killed_after(make_run(keep_checkpoints=2), 3)
    version = run.data_dir / "weights" / run.run.name / "000003" / "model.safetensors"
    cut(run.checkpoint(3) / STATE_FILE)
    cut(version)
    assert run.train() == OUTSIDE_IS_TO_BE_MENDED
    last = run.log().splitlines()[-1]
    assert f"checkpoint {run.checkpoint(3)}: " in last
    assert f"nor from version 3 as it was published: {version} has" in last
    assert run.standing() == (3, 0)


def test_checkpoint_of_another_model_is_refused_by_its_folder_and_a_tensor(make_run: MakeRun) -> None:
    run = killed_after(make_run(keep_checkpoints=2), 3)
    foreign = CheckpointStore(run.data_dir / "checkpoints", run.run.name)
    foreign.save(3, partial(write_whole, {"model.model.norm.weight": torch.zeros(3)}))
    assert run.train() == OUTSIDE_IS_TO_BE_MENDED
    last = run.log().splitlines()[-1]
    assert f"trainer: cannot go on from checkpoint {run.checkpoint(3)}: the checkpoint belongs to another model" in last
    assert run.standing() == (3, 0)
