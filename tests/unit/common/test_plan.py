"""What --dry-run says, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.config import TINY_MODELS, RunConfig
from common.errors import SetupError
from common.memory import estimate_memory
from common.model_folder import read_model_shape
from common.plan import plan
from common.settings import Settings

MODEL = TINY_MODELS / "tiny-calculator"
NUM_PARAMETERS = 160_192


def run_config(model: Path = MODEL, **sections: object) -> RunConfig:
    return RunConfig.model_validate({"name": "mine", "model": model} | sections)


def lines_of(config: RunConfig, **settings: object) -> dict[str, str]:
    """What is said, by its first word."""
    said = plan(config, settings=Settings.model_validate(settings), engines="those of others", unset="none named")
    pairs = [(line[:14].strip(), line[14:]) for line in said.splitlines()]
    found: dict[str, str] = {}
    for name, what in pairs:
        key = name or list(found)[-1]
        found[key] = f"{found[key]} {what}" if key in found else what
    return found


def test_amounts_are_those_of_the_whole_run() -> None:
    said = lines_of(
        run_config(
            rollout={"group_size": 4, "oversample": 1, "max_turns": 3, "max_tokens_per_turn": 10},
            train={"groups_per_step": 2, "num_versions": 5, "max_staleness": 2},
        )
    )
    assert said["steps"].startswith("5 versions x 2 groups x 4 episodes + 1 ")
    assert said["episodes"] == "40 trained in 10 groups; at least 50 played"
    assert said["tokens"].startswith("at most 30 sampled in an episode (3 turns x 10), 1,200 trained in the run")
    assert said["staleness"] == "episodes at most 2 versions old; at most 6 groups (30 episodes) in flight"


def test_what_is_in_the_loss_is_said_in_words() -> None:
    plain = lines_of(run_config())
    assert plain["loss"] == "ppo, ratio to the behaviour policy clipped to 0.8 .. 1.28, dual clip 3; mean by token"
    assert plain["also in it"] == "nothing: no KL, no entropy bonus, no length penalty"
    train = {"anchor": "proximal", "correction": "mask", "importance_floor": 0.5, "importance_cap": 5.0}
    train |= {"kl": "loss", "kl_coefficient": 0.04, "entropy_coefficient": 0.01, "truncated": "mask"}
    said = lines_of(run_config(train=train))
    assert said["correction"] == "importance weights per token, below 0.5 or above 5 left out"
    assert said["also in it"] == (
        "0.04 x KL (k3) in the loss; 0.01 x entropy bonus; episodes cut off for their length are left out"
    )


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({}, "AdamW, learning rate 0.001 after 5 steps, linear to 0.0005 at the end; gradients clipped at 0.2"),
        (
            {"lr_schedule": "cosine", "lr_end": 0.1, "weight_decay": 0.01, "warmup_steps": 2},
            "AdamW, weight decay 0.01, learning rate 0.001 after 2 steps, cosine to 0.0001 at the end; ",
        ),
        ({"lr_schedule": "constant"}, "AdamW, learning rate 0.001 after 5 steps, and to the end; "),
        (
            {"num_versions": 4, "warmup_steps": 8},
            "AdamW, learning rate rising to 0.0005 in the last step: the warm-up to 0.001 takes 8 steps, and the run "
            "has 4; ",
        ),
    ],
)
def test_the_learning_rate_is_told_from_start_to_end(train: dict[str, object], expected: str) -> None:
    assert lines_of(run_config(train=train))["optimizer"].startswith(expected)


def test_places_hide_passwords() -> None:
    url = "postgresql://rl:secret@db:5432/rollmill"
    said = lines_of(
        run_config(tracking={"sinks": ["wandb"]}), database_url=url, metrics_port=9100, data_dir="/data/rollmill"
    )
    assert said["weights"].startswith("/data/rollmill/weights/mine/, a version a step")
    assert said["checkpoints"] == "/data/rollmill/checkpoints/mine, the newest 2"
    assert (said["database"], said["broker"]) == ("postgresql://rl:***@db:5432/rollmill", "none named")
    assert said["metrics"] == "Postgres (train_step), Prometheus at http://127.0.0.1:9100/metrics, wandb"


def test_memory_counts_what_the_objective_needs() -> None:
    shape = read_model_shape(MODEL)
    assert (shape.num_parameters, shape.vocab_size, shape.context) == (NUM_PARAMETERS, 576, 512)
    plain = estimate_memory(run_config(), shape)
    assert plain is not None
    weights = 4 * NUM_PARAMETERS
    assert (plain.parameters, plain.gradients, plain.optimizer, plain.reference) == (weights, weights, 2 * weights, 0)
    assert plain.logits == 3 * 4096 * 576 * 4
    tiny_chunks = estimate_memory(run_config(train={"max_logits": 1}), shape)
    assert tiny_chunks is not None
    assert tiny_chunks.logits == 3 * 576 * 4  # of one position
    with_kl = estimate_memory(run_config(train={"kl": "loss", "kl_coefficient": 0.1}), shape)
    assert with_kl is not None
    assert with_kl.total - plain.total == weights


def test_memory_of_an_adapter_is_not_that_of_all_weights() -> None:
    shape = read_model_shape(MODEL)
    estimate = estimate_memory(run_config(train={"lora_rank": 2, "lora_modules": ["q_proj", "v_proj"]}), shape)
    assert estimate is not None
    adapter = 4 * 2 * 2 * ((64 + 128) + (64 + 64))
    assert (estimate.parameters, estimate.gradients) == (4 * NUM_PARAMETERS + adapter, adapter)


@pytest.mark.parametrize(
    ("rollout", "field"),
    [
        ({"max_row_tokens": 513}, "rollout.max_row_tokens = 513"),
        ({"compact_tokens": 600}, "rollout.compact_tokens = 600"),
        ({"max_tokens_per_turn": 600}, "rollout.max_tokens_per_turn = 600"),
    ],
)
def test_a_length_beyond_the_model_is_refused(rollout: dict[str, int], field: str) -> None:
    with pytest.raises(SetupError, match=f"{field} is more than the 512 positions of model"):
        lines_of(run_config(rollout=rollout))


def test_a_model_that_cannot_be_read_is_refused_by_file(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"has no config.json"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SetupError, match=f"model folder {tmp_path} cannot be read: "):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    with pytest.raises(SetupError, match=r"does not say how large the model is: KeyError.'hidden_size'"):
        read_model_shape(tmp_path)
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(SetupError, match=r"model.safetensors is no safetensors file, or is cut short"):
        read_model_shape(tmp_path)


def test_without_safetensors_the_memory_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((MODEL / "config.json").read_text())
    assert lines_of(run_config(tmp_path))["memory"] == "not known: the model folder has no safetensors files"


def test_a_teacher_is_named_and_takes_memory_only_where_it_is_loaded() -> None:
    loaded = run_config(train={"distill": {"teacher": str(MODEL), "weight": 0.5}})
    served = run_config(train={"distill": {"teacher": "http://teacher:8000", "with_rewards": False}})
    assert lines_of(loaded)["also in it"] == f"advantages of rewards and 0.5 x what {MODEL} thinks of each token"
    assert lines_of(served)["also in it"].startswith("advantages of nothing but 1 x what http://teacher:8000 thinks")
    shape = read_model_shape(MODEL)
    memory = [estimate_memory(config, shape) for config in (loaded, served)]
    assert [one and one.reference for one in memory] == [4 * NUM_PARAMETERS, 0]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (None, "; old ones are deleted when nobody needs them"),
        (1, "; all of them stay"),
        (2, "; old ones are deleted when nobody needs them, but every 2nd stays"),
        (12, "; old ones are deleted when nobody needs them, but every 12th stays"),
        (23, "; old ones are deleted when nobody needs them, but every 23rd stays"),
    ],
)
def test_which_versions_stay_is_said_as_one_says_it(every: int | None, expected: str) -> None:
    said = lines_of(run_config(train={"keep_version_every": every}))
    assert said["weights"].endswith(f"a version a step{expected}")


def test_one_of_a_thing_is_said_without_an_s() -> None:
    said = lines_of(
        run_config(
            rollout={"max_turns": 1},
            train={"num_versions": 1, "groups_per_step": 1, "minibatches": 1, "max_staleness": 0, "warmup_steps": 1},
            eval={"every_versions": 1, "num_tasks": 1},
        )
    )
    assert said["steps"] == "1 version x 1 group x 8 episodes; 1 optimizer step each"
    assert "trained in 1 group;" in said["episodes"]
    assert "(1 turn x 40)" in said["tokens"]
    assert said["staleness"] == "synchronous; at most 1 group (8 episodes) in flight"
    assert said["evaluation"].startswith("every version: 1 held-out task x ")
    assert "takes 1 step, and the run has 1;" in said["optimizer"]
