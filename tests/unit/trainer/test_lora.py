"""A policy that trains an adapter over frozen start weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from common.errors import SetupError
from common.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, WeightStore, verify
from tests.unit.trainer.conftest import MakePolicy, MakeSample
from trainer.lora import adapter_writer
from trainer.modelling import load_model
from trainer.policy import Policy
from trainer.samples import Sample, pad

ADVANTAGES = {1: 1.0, 2: -1.0}


@pytest.fixture
def group(make_policy: MakePolicy, make_random_sample: MakeSample) -> list[Sample]:
    policy = make_policy()
    return [make_random_sample(number, policy=policy) for number in ADVANTAGES]


def trained(policy: Policy, group: list[Sample], *, steps: int = 2) -> Policy:
    for version in range(steps):
        policy.train_step(group, ADVANTAGES, version=version)
    return policy


def of_adapter(policy: Policy) -> torch.Tensor:
    return torch.cat([tensor.flatten() for name, tensor in policy.state().items() if name.startswith("model.")])


def test_version_0_is_the_start_weights_and_the_same_after_every_start(
    make_policy: MakePolicy, group: list[Sample]
) -> None:
    batch = pad(group)
    first, second = (make_policy(lora_rank=4) for _ in range(2))
    assert torch.equal(first.logprobs(batch), make_policy().logprobs(batch))
    assert torch.equal(of_adapter(first), of_adapter(second))


def test_a_step_moves_the_adapter_alone_and_learns(make_policy: MakePolicy, group: list[Sample]) -> None:
    policy = make_policy(lora_rank=4, learning_rate=1e-2)
    frozen = {name: value.clone() for name, value in policy.model.named_parameters() if not value.requires_grad}
    before = policy.logprobs(pad(group)).sum(dim=1)
    trained(policy, group)
    gained = policy.logprobs(pad(group)).sum(dim=1) - before
    assert gained[0] > 0 > gained[1]
    assert all(torch.equal(value, dict(policy.model.named_parameters())[name]) for name, value in frozen.items())
    assert len(frozen) > 20


def test_checkpoint_holds_the_adapter_and_its_optimizer_alone(make_policy: MakePolicy, group: list[Sample]) -> None:
    state = trained(make_policy(lora_rank=4), group).state()
    assert all(".lora_A." in name or ".lora_B." in name for name in state)
    assert {name.split(".")[1] for name in state if name.startswith("optimizer.")} == {"exp_avg", "exp_avg_sq", "step"}


def test_going_on_from_a_checkpoint_is_as_never_stopping(make_policy: MakePolicy, group: list[Sample]) -> None:
    policy, restored = (make_policy(lora_rank=4) for _ in range(2))
    trained(policy, group)
    restored.restore({name: tensor.clone() for name, tensor in policy.state().items()})
    for one in (policy, restored):
        one.train_step(group, ADVANTAGES, version=2)
    assert torch.equal(of_adapter(policy), of_adapter(restored))


def test_checkpoint_of_another_rank_is_refused(make_policy: MakePolicy) -> None:
    with pytest.raises(SetupError, match=r"another model: .*lora_A.* is .*\[8, 192\].* there, .*\[4, 192\].* here"):
        make_policy(lora_rank=4).restore(make_policy(lora_rank=8).state())
    with pytest.raises(SetupError, match="another model"):
        make_policy(lora_rank=4).restore(make_policy().state())


def test_distance_is_to_the_model_without_its_adapter(make_policy: MakePolicy, group: list[Sample]) -> None:
    """No second copy of the model, and the adapter is on again afterwards."""
    policy = make_policy(lora_rank=4, kl="reward", kl_coefficient=0.1, kl_estimator="k1", learning_rate=1e-2)
    assert policy.reference is None
    trained(policy, group)
    after = policy.logprobs(pad(group))
    assert policy.reference_kl(group) == pytest.approx({1: 0.0, 2: 0.0}, abs=1e-4)
    assert torch.equal(policy.logprobs(pad(group)), after)
    policy.train_step(group, ADVANTAGES, version=2)
    assert not torch.equal(policy.logprobs(pad(group)), after)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_published_folder_is_a_small_adapter_that_peft_reads(
    make_policy: MakePolicy, group: list[Sample], start_folder: Path, tmp_path: Path
) -> None:
    policy = trained(make_policy(lora_rank=4, lora_alpha=6), group)
    published = WeightStore(tmp_path).publish("run", 1, adapter_writer(policy.model))
    manifest = verify(published.path, published.manifest_sha256)
    assert set(manifest.files) == {ADAPTER_CONFIG, ADAPTER_WEIGHTS}
    assert sum(entry.size_bytes for entry in manifest.files.values()) < 100_000
    config = json.loads((published.path / ADAPTER_CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 6, str(start_folder))
    read = PeftModel.from_pretrained(load_model(start_folder), published.path)
    batch = pad(group)
    assert torch.equal(read(input_ids=batch.ids_BL).logits, policy.model(input_ids=batch.ids_BL).logits)


def test_unknown_layer_is_refused_with_those_there_are(make_policy: MakePolicy) -> None:
    with pytest.raises(SetupError, match=r"no linear layer c_attn, it has \['down_proj', .*'v_proj'\]"):
        make_policy(lora_rank=4, lora_modules=["q_proj", "c_attn"])
