from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from common.config import EvalConfig, RolloutConfig, RunConfig, load_run_config
from common.config_train import TrainConfig
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
        (MINIMAL + "[train]\nlearning_rat = 1.0", "unknown field train.learning_rat: did you mean train.learning_rate"),
        (MINIMAL + "seeds = 1", r"unknown field seeds: did you mean seed\?"),
        (MINIMAL + "group_size = 8", r"unknown field group_size: did you mean rollout.group_size\?"),
        (MINIMAL + "[trian]\nloss = 'ppo'", r"unknown field trian: did you mean train\?"),
        (
            MINIMAL + "[eval]\nevery_version = 1",
            r"unknown field eval.every_version: did you mean eval.every_versions\?",
        ),
        (
            MINIMAL + '[train.distill]\nteacher = "t"\nwieght = 1',
            r"unknown field train.distill.wieght: did you mean train.distill.weight\?",
        ),
        (MINIMAL + "success_reward = 1", r"unknown field success_reward: did you mean eval.success_reward\?"),
        (MINIMAL + "[render]\nxyz = 1", "unknown field render.xyz: known are family, keep_thinking, template_kwargs"),
        (MINIMAL + '[tracking]\nsinks = ["wandbb"]', "tracking.sinks.0: .*'tensorboard', 'wandb' or 'mlflow'"),
        (MINIMAL + '[tracking]\nsinks = ["wandb", "wandb"]', "tracking.sinks: each sink once"),
        (
            MINIMAL + "[train]\noverlong_tokens = 500\noverlong_buffer = 100",
            "overlong_tokens = 500 with overlong_buffer = 100 has no effect: an episode samples at most 160 tokens",
        ),
        (
            MINIMAL
            + "[rollout]\nmax_tokens_per_turn = 1000\nmax_row_tokens = 500\n"
            + "[train]\noverlong_tokens = 3000\noverlong_buffer = 500",
            "overlong_tokens = 3000 with overlong_buffer = 500 has no effect: an episode samples at most 1996 tokens",
        ),
        (MINIMAL + "[rollout]\ngroup_size = 1", "rollout.group_size: .*greater than or equal to 2"),
        (MINIMAL + "[rollout]\ntemperature = 0", "rollout.temperature: .*greater than or equal to 0.01"),
        (MINIMAL + "[rollout]\ntemperature = 0.009", "rollout.temperature: .*greater than or equal to 0.01"),
        (MINIMAL + "[eval]\ntemperature = 0.009", "eval: temperature = 0.009 .* take 0, or 0.01 or more"),
        (MINIMAL + "[train]\nminibatches = 17", "a minibatch would be empty"),
        (MINIMAL + "[rollout]\ncompact_tokens = 9\nmax_row_tokens = 9", "no prompt would ever be compacted"),
        (MINIMAL + "[sharing]\nweight = -1", "sharing.weight: .*greater than or equal to 0"),
        (MINIMAL + "[sharing]\nweight = inf", "sharing.weight: .*finite number"),
        (
            MINIMAL + "[rollout]\noversample = 2\n[sharing]\nmax_sandboxes = 9",
            "sharing.max_sandboxes = 9 is less than the 10 episodes of a group",
        ),
        (MINIMAL + '[train]\nzero_variance = "drop"', "train.zero_variance: .*'train' or 'refill'"),
        (MINIMAL + '[train]\nadvantage = "pass_at_k"', 'pass_k must be set with advantage = "pass_at_k"'),
        (MINIMAL + "[train]\npass_k = 2", 'pass_k = 2 has no effect without advantage = "pass_at_k"'),
        (
            MINIMAL + '[train]\nadvantage = "pass_at_k"\npass_k = 8',
            "train.pass_k = 8 must be less than rollout.group_size = 8",
        ),
        (
            MINIMAL + '[train]\nadvantage = "reinforce_plus_plus"\nzero_variance = "refill"',
            "learns from groups of equal rewards",
        ),
        (MINIMAL + '[train]\naverage = "constant"', 'divisor_tokens must be set with average = "constant"'),
        (MINIMAL + "[train]\ndivisor_tokens = 5", "divisor_tokens = 5 has no effect without average"),
        (MINIMAL + '[train]\nkl = "loss"', "kl_coefficient must be set with kl"),
        (MINIMAL + "[train]\nkl_coefficient = 0.1", "kl_coefficient = 0.1 has no effect without kl"),
        (
            MINIMAL + '[train]\nkl = "loss"\nkl_coefficient = 0.1\nkl_estimator = "k1"',
            'kl_estimator = "k1" in the loss has a gradient of mean zero',
        ),
        (
            MINIMAL + '[train]\nkl = "reward"\nkl_coefficient = 0.1\nkl_estimator = "k3"',
            'kl_estimator = "k3" in the reward does not have the gradient of the divergence, .*take "k1"',
        ),
        (
            MINIMAL + '[train]\nkl = "reward"\nkl_coefficient = 0.1\nkl_estimator = "k2"',
            'kl_estimator = "k2" in the reward',
        ),
        (MINIMAL + "[train]\noverlong_tokens = 5", "overlong_buffer must be set with overlong_tokens"),
        (MINIMAL + '[train]\nloss = "gspo"\nclip_low = 3e-4', 'loss = "gspo" needs clip_low and clip_high'),
        (
            MINIMAL + '[train]\nloss = "cispo"\nclip_high = 4.0',
            'loss = "cispo" needs clip_low and clip_high: .* clip_low = 1.0, no lower bound, and clip_high = 4.0',
        ),
        (MINIMAL + "[train]\noverlong_buffer = 5", "overlong_buffer = 5 has no effect without overlong_tokens"),
        (
            MINIMAL + "[train]\noverlong_tokens = 5\noverlong_buffer = 6",
            "overlong_buffer = 6 is more than overlong_tokens = 5",
        ),
        (
            MINIMAL + '[train]\ncorrection = "mask"',
            "correction = 'mask' at the token level needs anchor = \"proximal\"",
        ),
        (MINIMAL + '[train]\ncorrection_level = "sequence"', "at the sequence level needs anchor"),
        (
            MINIMAL + '[train]\nanchor = "proximal"\nimportance_floor = 0.5',
            'importance_floor = 0.5 needs correction = "mask"',
        ),
        (
            MINIMAL + '[train]\nanchor = "proximal"\ncorrection = "mask"\nimportance_floor = 2.0',
            "importance_floor = 2.0 is not less than importance_cap = 2.0",
        ),
        (
            MINIMAL + '[train]\nanchor = "proximal"\ncorrection = "none"',
            'correction = "none" with max_staleness = 1 trains episodes of older versions',
        ),
        (MINIMAL + "[train]\ndual_clip = inf", "train.dual_clip: .*finite number"),
        ('name = "A b"\nmodel = "m"', r"name: .* \(got 'A b'\)$"),
        (MINIMAL + "[rollout]\nepisode_timeout_s = inf", r"rollout.episode_timeout_s: .*finite number \(got inf\)"),
        (MINIMAL + "[rollout]\ninit_timeout_s = nan", "rollout.init_timeout_s: "),
        (MINIMAL + "[rollout]\neval_timeout_s = 1e300", "rollout.eval_timeout_s: it is more than 1e\\+09 seconds"),
        (MINIMAL + "[rollout]\ntemperature = nan", "rollout.temperature: "),
        (MINIMAL + "[rollout]\nmax_turns = 40000", "rollout.max_turns: .*less than or equal to 32767"),
        (MINIMAL + "[train]\nlearning_rate = inf", "train.learning_rate: .*finite number"),
        (MINIMAL + "[train]\ngrad_clip = inf", "train.grad_clip: .*finite number"),
        (MINIMAL + "[train]\nbeta1 = nan", "train.beta1: "),
        (MINIMAL + "[train]\nmax_staleness = true", r"train.max_staleness: .*valid integer \(got True\)"),
        (MINIMAL + '[train]\nmax_staleness = "2"', r"train.max_staleness: .*valid integer \(got '2'\)"),
        (MINIMAL + '[train]\nlearning_rate = "1e-4"', r"train.learning_rate: .*valid number \(got '1e-4'\)"),
        (MINIMAL + "[train]\ngroups_per_step = 2.0", r"train.groups_per_step: .*valid integer \(got 2.0\)"),
        (MINIMAL + "[train]\npacking = 1", r"train.packing: .*valid boolean \(got 1\)"),
        (MINIMAL + "num_tasks = 2026-11-30", r"num_tasks: .*valid integer \(got '2026-11-30'\)"),
        (MINIMAL + "[sharing]\nweight = 1e308", "sharing.weight: .*less than or equal to 1000000"),
        (MINIMAL + "[sharing]\nmax_sandboxes = 99999999999", "sharing.max_sandboxes: .*or equal to 2147483647"),
        (MINIMAL + "[render]\ntemplate_kwargs = { x = [inf] }", "render.template_kwargs: inf is no finite number"),
        (MINIMAL + '[render]\ntemplate_kwargs = { x = "\\u0000" }', "render.template_kwargs.*Postgres cannot store"),
        ('name = "a"\nmodel = "m\\u0000"', "model: .*Postgres cannot store"),
        pytest.param(MINIMAL + "x = " + "[" * 100_000, "is nested too deeply", id="deep"),
        pytest.param(MINIMAL + "x = " + "9" * 5000, "is not TOML: Exceeds the limit", id="long number"),
    ],
)
def test_a_wrong_file_names_the_field_and_the_value(tmp_path: Path, text: str, expected: str):
    with pytest.raises(SetupError, match=expected):
        load_run_config(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[sharing]\nmax_sandboxes = 7", "sharing.max_sandboxes = 7 is less than the 8 episodes of a group "),
        ("[train]\npass_k = 2", 'train: pass_k = 2 has no effect without advantage = "pass_at_k"'),
        ("[rollout]\nmax_turns = {}", "rollout.max_turns: Input should be a valid integer"),
    ],
)
def test_what_does_not_fit_together_is_told_without_the_rest_of_the_file(tmp_path: Path, text: str, expected: str):
    path = write(tmp_path, MINIMAL + text)
    with pytest.raises(SetupError) as refused:
        load_run_config(path)
    assert str(refused.value).startswith(f"run configuration {path}: {expected}")
    assert "got" not in str(refused.value)


def test_a_missing_field_is_told_without_the_rest_of_the_file(tmp_path: Path):
    path = write(tmp_path, 'name = "a"')
    with pytest.raises(SetupError, match=r"run\.toml: model: Field required$"):
        load_run_config(path)


def test_a_file_that_is_no_text_is_named(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(SetupError, match=r"run\.toml is not UTF-8"):
        load_run_config(path)


def test_old_episodes_without_correction_need_a_yes_and_fresh_ones_do_not(tmp_path: Path):
    none = MINIMAL + '[train]\nanchor = "proximal"\ncorrection = "none"\n'
    for more in ("max_staleness = 0", "allow_uncorrected = true"):
        assert load_run_config(write(tmp_path, none + more)).train.correction == "none"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(SetupError, match="cannot be read: Is a directory"):
        load_run_config(tmp_path)
    with pytest.raises(SetupError, match=r"run\.toml cannot be read: No such file"):
        load_run_config(tmp_path / "run.toml")


def test_refills_are_bounded_by_ten_times_the_groups_of_a_step_and_off_by_default(tmp_path: Path):
    refill = MINIMAL + '[train]\nzero_variance = "refill"\n'
    given = [MINIMAL, refill, refill + "max_refills_per_step = 7"]
    assert [load_run_config(write(tmp_path, text)).train.max_refills for text in given] == [0, 160, 7]


def test_groups_with_failed_episodes_are_bounded_by_five_times_the_groups_of_a_step(tmp_path: Path):
    given = ["", "groups_per_step = 3", "max_dropped_groups = 7"]
    bounds = [load_run_config(write(tmp_path, f"{MINIMAL}[train]\n{text}")).train.max_dropped for text in given]
    assert bounds == [80, 15, 7]
    with pytest.raises(SetupError, match=r"max_dropped_groups: .*greater than or equal to 1"):
        load_run_config(write(tmp_path, MINIMAL + "[train]\nmax_dropped_groups = 0"))


def test_a_group_is_made_with_the_extra_episodes_and_wants_no_more_scores_than_its_size(tmp_path: Path):
    plain, extra = (load_run_config(write(tmp_path, MINIMAL + more)) for more in ("", "[rollout]\noversample = 2"))
    assert [(config.episodes_per_group, config.wanted) for config in (plain, extra)] == [(8, None), (10, 8)]


def test_evaluation_keeps_what_it_does_not_set_of_the_way_in_which_the_run_plays():
    config = RunConfig(
        name="r",
        model=Path("m"),
        rollout=RolloutConfig(temperature=0.7, top_p=0.9, max_tokens_per_turn=50),
        eval=EvalConfig(temperature=0.0),
    )
    assert config.eval_rollout == config.rollout.model_copy(update={"temperature": 0.0})


def test_a_run_that_trains_nothing_must_evaluate():
    with pytest.raises(ValidationError, match=r"num_versions = 0 trains nothing: add an \[eval\] section"):
        RunConfig(name="r", model=Path("m"), train=TrainConfig(num_versions=0))


def test_samples_of_a_task_that_could_never_be_in_flight_are_refused():
    with pytest.raises(ValidationError, match="samples_per_task = 64 is more than max_episodes_in_flight = 32"):
        EvalConfig(samples_per_task=64)


@pytest.mark.parametrize("field", [{"lora_alpha": 16}, {"lora_modules": ["q_proj"]}])
def test_an_adapters_settings_need_a_rank(field: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="has no effect without lora_rank"):
        TrainConfig.model_validate(field)
    assert TrainConfig.model_validate({"lora_rank": 8, **field}).adapters_kept == 3
    assert TrainConfig().adapters_kept is None


def test_sandboxes_outlive_what_agents_may_take() -> None:
    with pytest.raises(ValueError, match=r"sandbox.lifetime_s = 100 must be more than rollout.episode_timeout_s = 120"):
        RunConfig.model_validate(tomllib.loads(MINIMAL + "\n[sandbox]\nlifetime_s = 100"))
