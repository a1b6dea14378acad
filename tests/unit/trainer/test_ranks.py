"""Two ranks train as one does, whatever the rows, and end together when one fails."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.config import TINY_MODELS
from tests.ranks import play, policy_of
from trainer.policy import Policy, TrainingError
from trainer.samples import Sample, deal

MakeSample = Callable[..., Sample]
UNEVEN = [8, 40, 12, 100, 20, 16, 30]
REPOSITORY = Path(__file__).parents[3]
LAUNCH_TIMEOUT_S = 240.0
TEACHER = str(TINY_MODELS / "tiny-calculator")

CASES: dict[str, dict[str, Any]] = {
    # One rank has passes that the other has not.
    "uneven": {"lengths": UNEVEN, "train": {"max_positions": 48}},
    "idle": {"lengths": [14], "train": {"minibatches": 1, "distill": {"teacher": TEACHER}}},
    "all": {
        "lengths": UNEVEN,
        "train": {
            "max_positions": 64,
            "packing": True,
            "max_logits": 576 * 8,
            "gradient_checkpointing": True,
            "anchor": "proximal",
            "kl": "loss",
            "kl_coefficient": 0.1,
            "entropy_coefficient": 0.01,
            "average": "episode",
            "distill": {"teacher": TEACHER},
        },
    },
    "lora": {"lengths": UNEVEN, "train": {"lora_rank": 2, "kl": "reward", "kl_coefficient": 0.1}},
    "even": {"lengths": [14, 20], "train": {"minibatches": 1}, "even": True},
    "broken": {"lengths": UNEVEN, "train": {"minibatches": 1}, "broken": 3},
    # The last, as nothing comes after it.
    "dies": {"lengths": UNEVEN, "train": {}, "dies": True},
}


def launch(*, start: Path, out: Path) -> int:
    """Play the cases on two ranks; returns torchrun's exit code."""
    (out / "cases.json").write_text(json.dumps(CASES))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    command = [sys.executable, "-m", *launcher, "-m", "tests.ranks", str(start), str(out / "cases.json"), str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, timeout=LAUNCH_TIMEOUT_S, check=False).returncode


@pytest.fixture(scope="module")
def of_two_ranks(start_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    assert launch(start=start_folder, out=out) == 1, "the case that dies must end the launch, in time"
    return out


def metrics_of(folder: Path) -> dict[str, float]:
    document = json.loads((folder / "metrics.json").read_text())
    by_step = {f"{step}.{name}": value for step, found in enumerate(document["steps"]) for name, value in found.items()}
    return by_step | document["kl"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["uneven", "idle", "all", "lora", "even"])
def test_weights_and_metrics_are_those_of_one_rank(
    name: str, of_two_ranks: Path, start_folder: Path, tmp_path: Path
) -> None:
    alone, two = tmp_path / name, of_two_ranks / name
    play(policy_of(CASES[name], start=start_folder), CASES[name], out=alone, start=start_folder)
    assert metrics_of(two) == pytest.approx(metrics_of(alone), rel=1e-4, abs=1e-5)
    files = sorted(file.name for file in alone.glob("*.safetensors"))
    assert files == sorted(file.name for file in two.glob("*.safetensors"))
    for file in files:
        expected, found = load_file(alone / file), load_file(two / file)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-5)


def test_all_ranks_refuse_a_step_that_is_not_finite_on_one(of_two_ranks: Path, start_folder: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        play(policy_of(CASES["broken"], start=start_folder), CASES["broken"], out=of_two_ranks, start=start_folder)
    assert (of_two_ranks / "broken.error").read_text() == str(caught.value)
    assert "episodes [3]" in str(caught.value)


def test_a_rank_that_dies_ends_the_others(of_two_ranks: Path) -> None:
    assert (of_two_ranks / "broken.error").exists()
    assert not (of_two_ranks / "dies").exists()


def test_rows_are_dealt_by_positions_whatever_their_order(make_random_sample: MakeSample) -> None:
    rows = [make_random_sample(number, length=length) for number, length in enumerate((8, 40, 16, 8, 24))]
    dealt = deal(rows, parts=2)
    assert [sum(len(row.ids_L) for row in part) for part in dealt] == [48, 48]
    assert deal(rows[::-1], parts=2) == dealt
    assert deal(rows, parts=1) == [rows]


def test_one_process_needs_no_launcher(start_folder: Path) -> None:
    policy: Policy = policy_of(CASES["uneven"], start=start_folder)
    assert (policy.ranks.rank, policy.ranks.size, policy.weights()) == (0, 1, None)
