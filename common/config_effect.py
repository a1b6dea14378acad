"""Settings of [train] that others leave without effect: refused, as their user would think that they were trained with.

A value that is the default may stand: a configuration that is stored, or written out for another process, has them all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    from common.config_train import TrainConfig

FRESH = "the weight of a token that the policy would sample as it was sampled"


def check_effect(train: TrainConfig) -> None:
    """Raise ValueError for a setting that does nothing, with its value and why."""
    _check_weights(train)
    for name, why in _without_effect(train):
        refuse_change(train, name, why=why)
    if train.distill is not None and not train.distill.is_server:
        for name in ("request_timeout_s", "max_requests"):
            refuse_change(train.distill, name, why="with a teacher that is a folder", section_name="distill.")


def refuse_change(section: BaseModel, name: str, *, why: str, section_name: str = "") -> None:
    """Raise ValueError unless the field has its default."""
    value = getattr(section, name)
    if value != type(section).model_fields[name].get_default(call_default_factory=True, validated_data=vars(section)):
        raise ValueError(f"{section_name}{name} = {json.dumps(value)} has no effect {why}")


def _check_weights(train: TrainConfig) -> None:
    """Bounds on the other side of 1 would cut down, or leave out, what needs no correction at all."""
    if train.importance_cap < 1:
        raise ValueError(f"importance_cap = {train.importance_cap:g} is less than 1, {FRESH}: take 1 or more")
    if train.importance_floor is not None and train.importance_floor > 1:
        raise ValueError(f"importance_floor = {train.importance_floor:g} is more than 1, {FRESH}: take 1 or less")


def _without_effect(train: TrainConfig) -> Iterator[tuple[str, str]]:
    """(field, why), whatever the field's value."""
    if train.kl == "none":
        yield "kl_estimator", "without kl"
    if train.zero_variance != "refill":
        yield "max_refills_per_step", 'without zero_variance = "refill"'
    if train.max_staleness == 0:
        yield "late_groups", "with max_staleness = 0: a step takes all groups that there are, none is late"
    if train.lr_schedule == "constant":
        yield "lr_end", 'with lr_schedule = "constant"'
    yield from _of_the_ratio(train)
    yield from _of_the_correction(train)
    if train.distill is not None and not train.distill.with_rewards:
        of_rewards = ["advantage", "overlong_tokens", *(["kl"] if train.kl == "reward" else [])]
        yield from (
            (name, "with distill.with_rewards = false, which learns nothing from rewards") for name in of_rewards
        )


def _of_the_ratio(train: TrainConfig) -> Iterator[tuple[str, str]]:
    if train.loss == "cispo":
        yield "dual_clip", 'with loss = "cispo"'
    if not train.has_ratio:
        why = 'with anchor = "proximal" and minibatches = 1: at the only update the policy is its anchor, the ratio 1'
        yield from ((name, why) for name in ("clip_low", "clip_high", "dual_clip"))


def _of_the_correction(train: TrainConfig) -> Iterator[tuple[str, str]]:
    if train.anchor == "behaviour":
        yield "importance_cap", 'with anchor = "behaviour": the importance weight is 1'
    if train.correction != "none":
        yield "allow_uncorrected", 'without correction = "none"'
        return
    why = 'with correction = "none"'
    yield from ((name, why) for name in ("correction_level", "importance_cap"))
    if train.max_staleness == 0:
        yield "allow_uncorrected", "with max_staleness = 0: no episode is of an older version"
