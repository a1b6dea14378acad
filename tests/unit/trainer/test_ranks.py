"""Two ranks train as one does, whatever the rows, and end together when one fails."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.config import TINY_MODELS
from common.db.versions import PolicyVersion
from common.errors import SetupError
from common.weights import WeightStore
from tests.failing_rank import AGREED, GATHERED, LOST
from tests.ranks import NUM_STEPS, OWNER, PUT_TOGETHER, play, policy_of, random_rows
from trainer.checkpoint import CheckpointDamaged, CheckpointStore
from trainer.policy import Policy
from trainer.publish import version_writer
from trainer.ranks import Ranks
from trainer.restore import restore
from trainer.samples import Sample, deal
from trainer.shards import Sharded, write_shards
from trainer.update import TrainingError

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
    "full": {"lengths": [14], "train": {}, "full": True},
    "broken": {"lengths": UNEVEN, "train": {"minibatches": 1}, "broken": 3},
    # The last, as nothing comes after it.
    "dies": {"lengths": UNEVEN, "train": {}, "dies": True},
}


def free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


@pytest.fixture(scope="module")
def cases(start_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Those above, and before them one that goes on from what one process wrote."""
    case, root = {"lengths": UNEVEN, "train": {}}, tmp_path_factory.mktemp("one")
    policy = policy_of(case, start=start_folder)
    rows = random_rows(lengths=[14, 20], seed=2)
    policy.train_step(rows, {0: 1.0, 1: -1.0}, version=0)
    CheckpointStore(root, "one").save(1, policy.write_state)
    return {"from_one": case | {"checkpoint": str(root)}} | CASES


def launch(cases: dict[str, dict[str, Any]], *, start: Path, out: Path) -> int:
    """Play the cases on two ranks; returns torchrun's exit code."""
    (out / "cases.json").write_text(json.dumps(cases))
    port = free_port()
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    command = [sys.executable, "-m", *launcher, "-m", "tests.ranks", str(start), str(out / "cases.json"), str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, timeout=LAUNCH_TIMEOUT_S, check=False).returncode


@pytest.fixture(scope="module")
def of_two_ranks(
    cases: dict[str, dict[str, Any]], start_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    assert launch(cases, start=start_folder, out=out) == 1, "the case that dies must end the launch, in time"
    return out


def metrics_of(folder: Path) -> dict[str, float]:
    document = json.loads((folder / "metrics.json").read_text())
    by_step = {f"{step}.{name}": value for step, found in enumerate(document["steps"]) for name, value in found.items()}
    return by_step | document["kl"]


def state_of(version: int, *, root: Path, case: dict[str, Any], start: Path) -> dict[str, torch.Tensor]:
    """What a process alone has when it goes on from a checkpoint below `root`."""
    policy = policy_of(case, start=start)
    policy.restore(CheckpointStore(root.parent / "checkpoints", root.name).load(version))
    return policy.state()


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["from_one", "uneven", "idle", "all", "lora", "even"])
def test_weights_metrics_and_checkpoints_are_those_of_one_rank(
    name: str, cases: dict[str, dict[str, Any]], of_two_ranks: Path, start_folder: Path, tmp_path: Path
) -> None:
    case, alone, two = cases[name], tmp_path / name, of_two_ranks / name
    play(policy_of(case, start=start_folder), case, out=alone, start=start_folder, restarts=False)
    assert metrics_of(two) == pytest.approx(metrics_of(alone), rel=1e-4, abs=1e-5)
    files = sorted(file.name for file in alone.glob("*.safetensors"))
    assert files == sorted(file.name for file in two.glob("*.safetensors"))
    for file in files:
        assert_close(load_file(two / file), load_file(alone / file))
    for version in (NUM_STEPS, PUT_TOGETHER):
        found, expected = (state_of(version, root=root, case=case, start=start_folder) for root in (two, alone))
        assert_close(found, expected)


def test_each_rank_writes_its_part_alone(of_two_ranks: Path) -> None:
    folder = of_two_ranks / "checkpoints" / "uneven" / "000002"
    whole = sum(
        tensor.numel() * tensor.element_size() for tensor in Sharded.open(folder).tensors.values() if tensor.ndim
    )
    parts = [sum(file.stat().st_size for file in folder.glob(f"__{rank}_*")) for rank in range(2)]
    assert sum(parts) > whole
    # Beside the numbers there is what torch writes of each tensor.
    assert max(parts) < 0.75 * whole


def test_damaged_part_is_named_and_the_one_before_is_taken(of_two_ranks: Path, start_folder: Path, tmp_path: Path):
    case = CASES["uneven"]
    shutil.copytree(of_two_ranks / "checkpoints" / "uneven", tmp_path / "run")
    checkpoints, policy = CheckpointStore(tmp_path, "run"), policy_of(case, start=start_folder)
    published = WeightStore(tmp_path / "weights").publish("run", 2, version_writer(policy.model, start=start_folder))
    (damaged,) = checkpoints.path(2).glob("__1_*")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CheckpointDamaged, match=f"^checkpoint {checkpoints.path(2)}: {damaged} has"):
        checkpoints.load(2)
    newest = PolicyVersion(
        run_id=1,
        run="run",
        number=2,
        location=published.location,
        manifest_sha256=published.manifest_sha256,
        in_flight="keep",
        adapters_kept=None,
        model=start_folder,
        max_row_tokens=None,
    )
    weights = {name: tensor.clone() for name, tensor in policy.state().items()}
    restore(policy, checkpoints, newest)
    before = state_of(1, root=of_two_ranks / "uneven", case=case, start=start_folder)
    assert_close(policy.state(), before | weights)


def test_parts_of_another_model_or_run_are_refused(of_two_ranks: Path, start_folder: Path) -> None:
    checkpoints = CheckpointStore(of_two_ranks / "checkpoints", "uneven", owner=replace(OWNER, made_at="later"))
    with pytest.raises(SetupError, match=r"another model: model\.\S+ is None there, .* here"):
        policy_of(CASES["lora"], start=start_folder).restore(checkpoints.load(1))
    with pytest.raises(SetupError, match=f"is of run one of database .*, made {OWNER.made_at}, and this is run"):
        checkpoints.check_owner()


def test_all_ranks_outlive_a_disk_that_is_full_for_one(of_two_ranks: Path) -> None:
    said = (of_two_ranks / "full.error").read_text()
    assert said.startswith(f"rank 1 cannot write its part of checkpoint {of_two_ranks / 'checkpoints' / 'full'}/")
    assert list((of_two_ranks / "checkpoints" / "full").iterdir()) == []
    assert (of_two_ranks / "broken.error").exists()


def test_folder_that_a_rank_does_not_see_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=rf"^ranks \[0\] do not see folder {tmp_path}/gone: ROLLMILL_DATA_DIR must"):
        write_shards({}, tmp_path / "gone", owner=None, ranks=Ranks.alone())


def test_all_ranks_refuse_a_step_that_is_not_finite_on_one(
    of_two_ranks: Path, start_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError) as caught:
        play(
            policy_of(CASES["broken"], start=start_folder), CASES["broken"], out=tmp_path / "broken", start=start_folder
        )
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


def test_a_rank_that_fails_alone_ends_and_the_first_says_why() -> None:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": "2",
    }
    first, second = (
        subprocess.Popen(
            [sys.executable, "-m", "tests.failing_rank"],
            cwd=REPOSITORY,
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    )
    try:
        told, _ = first.communicate(timeout=LAUNCH_TIMEOUT_S)
        _, log = second.communicate(timeout=LAUNCH_TIMEOUT_S)
    finally:
        for process in (first, second):
            process.kill()
    assert told.splitlines() == [
        f"{AGREED} all of [0, 1]",
        f"{AGREED} each has too long a row",
        f"{GATHERED} [0, 1]",
        f"{LOST} rank 1 failed in gather_without_one: SetupError: only I have too long a row",
    ]
    assert (first.returncode, second.returncode) == (0, 1)
    assert log.splitlines()[-1] == "common.errors.SetupError: only I have too long a row"
