"""What scoring takes for granted of a model, found out by computing with it before it trains.

A row's logits are its own, whatever stands right of it or beside it. logprobs.py asks once for each model.

Legend: B rows of a batch, L positions of a row, P positions of all rows of a batch, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from common.config_train import TrainConfig
from common.errors import SetupError
from trainer.modelling import as_single_rows, autocast, base_of, packed_arguments, vocabulary_size
from trainer.samples import Batch

NUM_SHARED = 4
"""Positions that the first two rows of `_rows` have in common."""
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""How far logits may be apart, as a part of their spread. By rounding it is 1e-6 and 1e-2; a row that sees another, or
what comes after it, moves by as much as a token matters."""


@torch.no_grad()
def check_rows_apart(model: PreTrainedModel, *, train: TrainConfig) -> None:
    """Raise SetupError unless a row's logits depend on nothing but what stands left in that row, packed or padded.

    Computes two passes of a few tokens, in float32 where the attention can: there a leak is a thousand times rounding.
    """
    batch = _rows(vocabulary_size(model)).to(next(model.parameters()).device)
    with autocast(train, device=batch.ids_BL.device, enabled=train.attention != "sdpa"):
        with as_single_rows(model, train=train):
            padded_BLV = model(input_ids=batch.ids_BL, use_cache=False).logits.float()
        rounding = ROUNDING[torch.float32 if train.attention == "sdpa" else torch.bfloat16]
        if _apart(*padded_BLV[:2, :NUM_SHARED]) > rounding:
            raise SetupError(
                f"{_name(model)} is not causal: what comes after a token changes what the model says at it. Only "
                "models that look left can be trained"
            )
        if train.packing:
            expected_PV = padded_BLV[batch.real_BL]
            apart = _apart(_packed_logits(model, batch, train=train), expected_PV)
            # NaN = the logits are all alike, and prove nothing.
            if not apart <= rounding and expected_PV.isfinite().all():
                raise SetupError(_refusal(model, "a row packed beside others has other logits than alone"))


@torch.no_grad()
def head_is_last(model: PreTrainedModel) -> bool:
    """Whether logits are the head over the decoder's hidden states and nothing else: some models scale or cap them.

    Other numbers are put in place of what decoder and head return: a model that does more would change them, whatever
    its weights. They are far from 0, where a cap does next to nothing.
    """
    base = base_of(model)
    decoder, head = base.get_decoder(), base.get_output_embeddings()
    hidden: list[torch.Tensor] = []
    into_head: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []

    def replace_hidden(_: torch.nn.Module, args: Any, output: Any) -> Any:
        if isinstance(getattr(output, "last_hidden_state", None), torch.Tensor):
            hidden.append(_in_place_of(output.last_hidden_state, most=10.0))
            output.last_hidden_state = hidden[-1]
        return output

    def replace_logits(_: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        into_head.extend(args[:1])
        logits.append(_in_place_of(output, most=100.0))
        return logits[-1]

    if decoder is None or head is None:
        return False
    handles = [decoder.register_forward_hook(replace_hidden), head.register_forward_hook(replace_logits)]
    try:
        ids_BL = torch.tensor([[0, 1]], device=base.device)
        found_BLV = base(input_ids=ids_BL, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    passed, returned = [hidden, logits], [into_head, [found_BLV]]
    return all(
        len(made) == len(seen) == 1 and torch.equal(made[0].float(), seen[0].float())
        for made, seen in zip(passed, returned, strict=True)
    )


def _packed_logits(model: PreTrainedModel, batch: Batch, *, train: TrainConfig) -> torch.Tensor:
    """[P, V] float32. Raises SetupError where the model does not take what keeps rows apart."""
    try:
        logits_PV: torch.Tensor = model(**packed_arguments(batch, train=train), use_cache=False).logits[0]
    except (TypeError, SetupError) as error:
        raise SetupError(_refusal(model, str(error).partition("\n")[0])) from error
    return logits_PV.float()


def _refusal(model: PreTrainedModel, reason: str) -> str:
    return f"train.packing: rows cannot be packed for {_name(model)}, {reason}: take packing = false"


def _name(model: PreTrainedModel) -> str:
    base = base_of(model)
    return f"{type(base).__name__} (model type {base.config.model_type})"


def _apart(found_LV: torch.Tensor, expected_LV: torch.Tensor) -> float:
    """Distance of logits as a part of the spread over the vocabulary, both as root mean squares; NaN = no spread."""
    spread = expected_LV - expected_LV.mean(dim=-1, keepdim=True)
    return float((found_LV - expected_LV).square().mean().sqrt() / spread.square().mean().sqrt())


def _rows(vocabulary: int) -> Batch:
    """Three rows: two that begin alike and go on apart, and a shorter one."""
    ids_BL = torch.randint(vocabulary, (3, 7), generator=torch.Generator().manual_seed(0))
    ids_BL[1] = ids_BL[0]
    ids_BL[1, NUM_SHARED:] = (ids_BL[1, NUM_SHARED:] + 1) % vocabulary
    ids_BL[2, 5:] = 0
    return Batch(
        ids_BL=ids_BL,
        mask_BL=torch.zeros_like(ids_BL, dtype=torch.bool),
        behaviour_logprobs_BL=torch.zeros(ids_BL.shape),
        lengths_B=torch.tensor([7, 7, 5]),
    )


def _in_place_of(tensor: torch.Tensor, *, most: float) -> torch.Tensor:
    """Numbers from -most to most that are all different, in its shape."""
    return torch.linspace(-most, most, tensor.numel(), device=tensor.device).view(tensor.shape).to(tensor.dtype)
