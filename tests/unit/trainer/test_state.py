"""A policy goes on from its state as if it had never stopped, and refuses one that is not its own or not whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from common.errors import SetupError
from trainer.policy import Policy
from trainer.samples import Sample

MakeSample = Callable[..., Sample]
MakePolicy = Callable[..., Policy]
ADVANTAGES = {1: 1.0, 2: -1.0, 3: -1.0, 4: 1.0}


def weights_of(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.model.parameters()])


def test_going_on_from_the_state_gives_the_same_weights_as_never_stopping(
    make_policy: MakePolicy, group: list[Sample]
) -> None:
    policy, restored = make_policy(), make_policy()
    policy.train_step(group, ADVANTAGES, version=0)
    restored.restore({name: tensor.clone() for name, tensor in policy.state().items()})
    for one in (policy, restored):
        one.train_step(group, ADVANTAGES, version=1)
    assert torch.equal(weights_of(policy), weights_of(restored))


def test_parameters_that_were_never_trained_have_no_optimizer_state_and_need_none(
    make_policy: MakePolicy, group: list[Sample]
) -> None:
    policy, restored = make_policy(), make_policy()
    for one in (policy, restored):
        one.model.get_parameter("model.norm.weight").requires_grad = False
    policy.train_step(group, ADVANTAGES, version=0)
    state = {name: tensor.clone() for name, tensor in policy.state().items()}
    assert "optimizer.step.model.norm.weight" not in state
    restored.restore(state)
    for one in (policy, restored):
        one.train_step(group, ADVANTAGES, version=1)
    assert torch.equal(weights_of(policy), weights_of(restored))


def test_parameters_without_a_gradient_so_far_go_on_as_if_never_stopped(
    make_policy: MakePolicy, group: list[Sample]
) -> None:
    policy, restored = make_policy(), make_policy()
    norm = policy.model.get_parameter("model.norm.weight")
    unused = norm.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    policy.train_step(group, ADVANTAGES, version=0)
    unused.remove()
    assert norm not in policy.optimizer.state
    restored.restore({name: tensor.clone() for name, tensor in policy.state().items()})
    for one in (policy, restored):
        one.train_step(group, ADVANTAGES, version=1)
    assert torch.equal(weights_of(policy), weights_of(restored))


@pytest.mark.parametrize("name", ["optimizer.exp_avg.model.norm.weight", "optimizer.step.model.norm.weight"])
def test_state_without_a_part_of_the_optimizers_is_refused(
    make_policy: MakePolicy, group: list[Sample], name: str
) -> None:
    policy = make_policy()
    policy.train_step(group, ADVANTAGES, version=0)
    state = policy.state()
    del state[name]
    with pytest.raises(SetupError, match=rf"has (\d+) of the optimizer's \d+ tensors: {name} is missing there"):
        policy.restore(state)


@pytest.mark.parametrize("name", ["optimizer.exp_avg.gone.weight", "optimizer.exp_avg.model.norm.weight"])
def test_optimizer_state_of_other_parameters_is_refused(make_policy: MakePolicy, name: str) -> None:
    policy = make_policy()
    with pytest.raises(SetupError, match=rf"optimizer trained other parameters: {name} is .*3.* there"):
        policy.restore(policy.state() | {name: torch.zeros(3)})


def test_state_of_another_model_is_refused(make_policy: MakePolicy) -> None:
    policy = make_policy()
    state = policy.state() | {"model.model.norm.weight": torch.zeros(3)}
    with pytest.raises(SetupError, match=r"another model: model\.model\.norm\.weight is .*3.* there, .*64.* here"):
        policy.restore(state)
