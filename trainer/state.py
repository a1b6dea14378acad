"""What is kept of a policy in training: `model.<name>` is a weight, `optimizer.<key>.<name>` the optimizer's of it.

checkpoint.py keeps it in files.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from common.errors import SetupError

STEP = "step"
"""What AdamW has of each parameter: the number of its steps, in host memory …"""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""… and two tensors in the parameter's shape."""


def state_of(parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The state by name, where `parameters` are the trained ones: of a sharded one this rank's part.

    Before the first optimizer step there are weights alone.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        tensors[f"model.{name}"] = parameter.detach()
        if optimizer.state:
            for key, value in (optimizer.state.get(parameter) or _unmoved(parameter)).items():
                tensors[f"optimizer.{key}.{name}"] = value
    return tensors


def _unmoved(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """What the optimizer begins with when a parameter has its first gradient, such as that of an expert."""
    return {STEP: torch.tensor(0.0)} | {key: torch.zeros_like(parameter) for key in MOMENTS}


def places_for(
    tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Where a state with these names is to be written: the parameters themselves, and room for the optimizer's part."""
    places = {}
    for name, tensor in tensors.items():
        key, parameter_name = _split(name)
        parameter = parameters[parameter_name].detach()
        if not key:
            places[name] = parameter
        else:
            # The count of steps is a number, which the optimizer keeps in host memory.
            places[name] = torch.empty_like(parameter) if tensor.ndim else torch.empty_like(tensor, device="cpu")
    return places


def put_moments(
    tensors: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Let the optimizer go on from its part of `tensors`, which are its own from now on, and from nothing else."""
    optimizer.state.clear()
    for name, tensor in tensors.items():
        key, parameter_name = _split(name)
        if key:
            optimizer.state[parameters[parameter_name]][key] = tensor


def check_state(tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise SetupError unless `tensors` are the weights of all `parameters`, and the optimizer's all or none.

    Only names and shapes are looked at.
    """
    shapes = {f"model.{name}": parameter.shape for name, parameter in parameters.items()}
    found = {name: tensor.shape for name, tensor in tensors.items() if name.startswith("model.")}
    if shapes != found:
        odd = min(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        raise SetupError(
            f"the checkpoint belongs to another model: {odd} is {found.get(odd)} there, {shapes.get(odd)} here"
        )
    of_optimizer = {name: tensor.shape for name, tensor in tensors.items() if name.startswith("optimizer.")}
    for name, shape in of_optimizer.items():
        parameter = parameters.get(_split(name)[1])
        # Of the whole parameter, or a number such as the count of steps.
        if parameter is None or shape not in (parameter.shape, ()):
            raise SetupError(f"the checkpoint's optimizer trained other parameters: {name} is {shape} there")
    wanted = {f"optimizer.{key}.{name}" for name in parameters for key in (STEP, *MOMENTS)}
    if of_optimizer and (missing := wanted - of_optimizer.keys()):
        raise SetupError(
            f"the checkpoint has {len(of_optimizer)} of the optimizer's {len(wanted)} tensors: "
            f"{min(missing)} is missing there"
        )


def _split(name: str) -> tuple[str, str]:
    """(the optimizer's key, or "" for the weight itself; the parameter's name)."""
    kind, _, rest = name.partition(".")
    if kind == "model":
        return "", rest
    key, _, parameter_name = rest.partition(".")
    return key, parameter_name
