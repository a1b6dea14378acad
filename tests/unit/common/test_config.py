from __future__ import annotations

from pathlib import Path

import pytest

from common.config import load_run_config
from common.errors import SetupError

MINIMAL = 'name = "a"\nmodel = "m"\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_a_minimal_file_gets_the_defaults(tmp_path: Path):
    config = load_run_config(write(tmp_path, MINIMAL))
    assert (config.handler, config.train.max_staleness, config.groups_in_flight) == ("calculator", 1, 32)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name = ", "is not TOML"),
        (MINIMAL + "[train]\nlearning_rat = 1.0", "train.learning_rat: Extra inputs are not permitted"),
        (MINIMAL + "[rollout]\ngroup_size = 1", "rollout.group_size: .*greater than or equal to 2"),
        (MINIMAL + "[rollout]\ntemperature = 0", "rollout.temperature: .*greater than 0"),
        (MINIMAL + "[train]\nminibatches = 17", "a minibatch would be empty"),
        (MINIMAL + "[sharing]\nweight = -1", "sharing.weight: .*greater than or equal to 0"),
        (MINIMAL + "[sharing]\nweight = inf", "sharing.weight: .*finite number"),
        (
            MINIMAL + "[rollout]\noversample = 2\n[sharing]\nmax_sandboxes = 9",
            "sharing.max_sandboxes = 9 is less than the 10 episodes of a group",
        ),
        (MINIMAL + '[train]\nzero_variance = "drop"', "train.zero_variance: .*'train' or 'refill'"),
        ('name = "A b"\nmodel = "m"', "name: "),
    ],
)
def test_a_wrong_file_names_the_field_and_the_value(tmp_path: Path, text: str, expected: str):
    with pytest.raises(SetupError, match=expected):
        load_run_config(write(tmp_path, text))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(SetupError, match="cannot be read: Is a directory"):
        load_run_config(tmp_path)
    with pytest.raises(SetupError, match=r"run\.toml cannot be read: No such file"):
        load_run_config(tmp_path / "run.toml")


def test_refills_are_bounded_by_ten_times_the_groups_of_a_step_and_off_by_default(tmp_path: Path):
    refill = MINIMAL + '[train]\nzero_variance = "refill"\n'
    given = [MINIMAL, refill, refill + "max_refills_per_step = 7"]
    assert [load_run_config(write(tmp_path, text)).train.max_refills for text in given] == [0, 160, 7]


def test_a_group_is_made_with_the_extra_episodes_and_wants_no_more_scores_than_its_size(tmp_path: Path):
    plain, extra = (load_run_config(write(tmp_path, MINIMAL + more)) for more in ("", "[rollout]\noversample = 2"))
    assert [(config.episodes_per_group, config.wanted) for config in (plain, extra)] == [(8, None), (10, 8)]
