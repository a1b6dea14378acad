"""The `[train]` section of a run's configuration."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from common.config_distill import DistillConfig
from common.config_effect import check_effect
from common.config_section import STORED, Section

Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "pass_at_k"]
Estimator = Literal["k1", "k2", "k3"]
"""Schulman's of the KL divergence; trainer/kl.py has them."""


def _needs(field: str, value: object, *, when: bool, what: str) -> None:
    """Raise ValueError unless the field is set exactly when it has a meaning."""
    if when != (value is not None):
        raise ValueError(
            f"{field} must be set with {what}" if when else f"{field} = {value} has no effect without {what}"
        )


CLIPS = {
    "gspo": "would hardly ever clip the ratio of a row, where 3e-4 and 4e-4 are usual",
    "cispo": "would raise the weight of tokens that the policy has turned from: take clip_low = 1.0, no lower bound, "
    "and clip_high = 4.0",
}
"""Losses whose clip ranges are not PPO's, and what PPO's would do to them."""


def _estimator(train: dict[str, Any]) -> Estimator:
    """What kl_estimator is where it is not set, by `kl`."""
    return "k1" if train.get("kl") == "reward" else "k3"


class TrainConfig(Section):
    """How the policy is updated."""

    groups_per_step: int = Field(default=16, ge=1)
    """Groups in one training step, which makes one version."""
    num_versions: int = Field(default=40, ge=0)
    """The run is finished when this version is published, and evaluated where there is an [eval]. 0 = nothing is
    trained: the start weights are evaluated. The learning rate's schedule ends there, so it is another one where a run
    is given more versions (`rollmill run extend`)."""
    max_staleness: int = Field(default=1, ge=0)
    """Largest allowed (version being trained - oldest version among an episode's tokens). 0 = synchronous."""
    late_groups: Literal["wait", "drop"] = "wait"
    """What becomes of groups that take so long that max_staleness would be exceeded: the step that would make them too
    old waits for them; or they are dropped when they are complete, which is faster, but the policy then hardly ever
    learns from its longest episodes."""
    minibatches: int = Field(default=2, ge=1)
    """At most so many optimizer steps per training step, each over whole groups; groups without a gradient are in none
    of them. The metric num_updates has how many there were."""
    keep_version_every: int | None = Field(default=None, ge=1)
    """Every n-th version stays in the weight store; None = all but the newest max_staleness + 2 are deleted once no
    engine and no episode that goes on names them. Version 0 always stays."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints that stay, each about three times the weights in float32; one more while a step is written.
    When the newest is damaged, the optimizer's state comes from the one before: with 1 there is none."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """AdamW's, at its highest: after the warm-up."""
    warmup_steps: int = Field(default=5, ge=0)
    """Training steps of linear warm-up. A run that has no more of them never leaves it."""
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the rate falls from there to lr_end in the last step; "constant" = not at all."""
    lr_end: float = Field(default=0.5, ge=0, le=1)
    """Share of learning_rate that the last training step has. With 0 it changes nothing."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """AdamW's: each optimizer step takes rate x weight_decay off all weights that are trained (with lora_rank the
    adapter's), in proportion to themselves. A step without any advantage has no optimizer step."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's: how much of the gradients' mean stays at each optimizer step."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """The same of their squares' mean."""
    grad_clip: float = Field(default=0.2, gt=0)
    """Largest gradient norm."""
    max_positions: int = Field(default=4096, ge=1)
    """Token positions of one forward and backward pass; the gradient adds up over the passes. Padding counts, unless
    there is packing. A longer row has a pass of its own."""
    packing: bool = False
    """Put the rows of a pass one after the other, without padding and without attention between them. Refused at the
    start for models that do not keep them apart."""
    max_logits: int = Field(default=2**26, ge=1)
    """Logits (token positions x vocabulary) that exist at once, in float32, three times; 2**26 are 256 MiB each time. A
    pass that needs more computes them in chunks, twice; models that scale or cap logits after the head cannot."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What matrix products are computed in. Weights, gradients and the optimizer's state are float32 in either case."""
    attention: Literal["sdpa", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """torch's own attention, or that of the flash-attn package, which must be installed and takes bfloat16 on a GPU."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of each layer for the backward pass and compute the layer again there: a third more work."""
    lora_rank: int | None = Field(default=None, ge=1, le=512)
    """Train a LoRA adapter of this rank over the frozen start weights, and publish adapters in place of whole models;
    None = train all weights. learning_rate is then the adapter's, usually some ten times higher."""
    lora_alpha: int | None = Field(default=None, ge=1)
    """The adapter's product is added times lora_alpha / lora_rank; None = 2 x lora_rank."""
    lora_modules: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Names of the linear layers that get an adapter, such as q_proj; None = those of attention and MLP."""
    advantage: Advantage = "grpo"
    """How rewards become advantages; trainer/advantages.py has the papers. All compare the episodes of a group, but
    reinforce_plus_plus, which compares those of a whole step."""
    pass_k: int | None = Field(default=None, ge=2)
    """k of pass_at_k, less than the group size; None for the others."""
    loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    """What is done with the ratio policy / anchor: clipped per token (PPO, GRPO, DAPO), clipped per row (GSPO, whose
    clip ranges are about a thousandth of PPO's and must be given), or a bounded weight of each token's log-prob
    (CISPO, which is usually bounded from above alone; its ranges must be given, too)."""
    average: Literal["token", "episode", "constant"] = "token"
    """What the loss of a step is a mean of: all its tokens (DAPO), its episodes' means over their tokens (GRPO, GSPO),
    or the sum of each episode divided by divisor_tokens (Dr. GRPO)."""
    divisor_tokens: int | None = Field(default=None, ge=1)
    """Divisor of average = "constant", such as the most tokens an episode may have; None for the others."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Lower clip range; 1 = no lower bound."""
    clip_high: float = Field(default=0.28, gt=0)
    """Upper clip range, wider than the lower (DAPO, clip-higher)."""
    dual_clip: float = Field(default=3.0, gt=1)
    """Bound of the ratio where the advantage is negative (dual-clip PPO); 1e9 = no bound. CISPO has none."""
    anchor: Literal["behaviour", "proximal"] = "behaviour"
    """What the ratio is taken against: the stored behaviour log-probs, or the policy at the step's start (decoupled
    PPO, where the importance weight proximal/behaviour corrects for the age of the episodes)."""
    correction: Literal["truncate", "mask", "none"] = "truncate"
    """What is done with an importance weight above importance_cap: cut down to it (TIS), or the token or row leaves
    the loss (MIS; IcePop with importance_floor). "none" = no weight at all. Without effect for anchor = behaviour."""
    correction_level: Literal["token", "sequence"] = "token"
    """Whether each token has a weight of its own, or a row has one, the product over its tokens."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Largest importance weight proximal/behaviour, 1 or more. Without effect for anchor = behaviour."""
    importance_floor: float | None = Field(default=None, gt=0)
    """Smallest importance weight that correction = "mask" leaves in the loss (IcePop), 1 or less; None = no bound."""
    allow_uncorrected: bool = False
    """Train episodes of older versions with correction = "none" all the same; such runs collapse."""
    kl: Literal["none", "loss", "reward"] = "none"
    """Where the distance to the start weights is held against the policy: as a term of the loss, or off the reward of
    each episode, before its advantage. Keeps a second copy of the model in memory; with lora_rank the model
    without its adapter does."""
    kl_coefficient: float | None = Field(default=None, gt=0)
    """Weight of the KL divergence in nats, summed over the tokens as the rest of the loss; None without kl."""
    kl_estimator: Estimator = Field(default_factory=_estimator)
    """Schulman's estimators. By default k1 in the reward, where no other has the divergence's gradient, and k3 in the
    loss, where k1 has none in the mean."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus in nats; 0 = none."""
    distill: DistillConfig | None = None
    """On-policy distillation from a teacher; None = there is none."""
    overlong_tokens: int | None = Field(default=None, ge=1)
    """Sampled tokens of an episode from which on its reward is 1 less (DAPO, soft overlong punishment); None = no such
    penalty. Advantages are of the rewards with the penalty, but equal rewards are those that are equal without it."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """Tokens before overlong_tokens over which the penalty rises from 0 to 1."""
    truncated: Literal["train", "mask"] = "train"
    """Episodes that end at the token or context limit: trained, or left out of the loss and its divisor (DAPO, overlong
    filtering). They count in the baseline in either case."""
    zero_variance: Literal["train", "refill"] = "train"
    """Groups whose rewards are all equal, or with pass_at_k the best ones of all teams, which have no gradient: train
    them, or drop and replace them (DAPO, dynamic sampling)."""
    max_refills_per_step: int | None = Field(default=None, ge=1)
    """Groups that `refill` may drop for one training step, before the further ones are trained; None = 10 x
    groups_per_step. So a policy that has solved everything still comes to an end."""
    max_dropped_groups: int | None = Field(default=None, ge=1)
    """Groups that may be dropped for failed episodes while one version is waited for, before the trainer pauses the run
    and says why (`rollmill run list`): at once if it is mostly the handler that fails, for failures of infrastructure
    only when they have gone on for ten minutes. After `rollmill run resume` they count anew. None = 5 x
    groups_per_step."""

    @model_validator(mode="after")
    def _parts_of_the_objective_fit(self) -> Self:
        _needs("pass_k", self.pass_k, when=self.advantage == "pass_at_k", what='advantage = "pass_at_k"')
        _needs("divisor_tokens", self.divisor_tokens, when=self.average == "constant", what='average = "constant"')
        _needs("kl_coefficient", self.kl_coefficient, when=self.kl != "none", what="kl")
        if self.advantage == "reinforce_plus_plus" and self.zero_variance == "refill":
            raise ValueError(
                'advantage = "reinforce_plus_plus" learns from groups of equal rewards: take zero_variance = "train"'
            )
        _needs("overlong_buffer", self.overlong_buffer, when=self.overlong_tokens is not None, what="overlong_tokens")
        if self.overlong_tokens and self.overlong_buffer and self.overlong_buffer > self.overlong_tokens:
            raise ValueError(
                f"overlong_buffer = {self.overlong_buffer} is more than overlong_tokens = {self.overlong_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _clip_fits(self, info: ValidationInfo) -> Self:
        is_given = {"clip_low", "clip_high"} <= self.model_fields_set
        if self.loss in CLIPS and self.has_ratio and not is_given and info.context != STORED:
            low, high = (type(self).model_fields[name].default for name in ("clip_low", "clip_high"))
            raise ValueError(
                f'loss = "{self.loss}" needs clip_low and clip_high: the defaults, {low} and {high}, are PPO\'s for '
                f"single tokens and {CLIPS[self.loss]}"
            )
        return self

    @model_validator(mode="after")
    def _estimator_fits(self, info: ValidationInfo) -> Self:
        if self.kl == "loss" and self.kl_estimator == "k1":
            raise ValueError('kl_estimator = "k1" in the loss has a gradient of mean zero: take "k2" or "k3"')
        if self.kl == "reward" and self.kl_estimator != "k1" and info.context != STORED:
            raise ValueError(
                f'kl_estimator = "{self.kl_estimator}" in the reward does not have the gradient of the divergence, and '
                'may drive the policy away from the start weights: take "k1", or kl = "loss"'
            )
        return self

    @model_validator(mode="after")
    def _computing_fits(self) -> Self:
        if self.attention != "sdpa" and self.dtype != "bfloat16":
            raise ValueError(f'attention = {self.attention!r} is for dtype = "bfloat16" (got {self.dtype!r})')
        return self

    @model_validator(mode="after")
    def _correction_fits(self) -> Self:
        changed = self.correction != "truncate" or self.correction_level != "token"
        if changed and self.anchor == "behaviour":
            raise ValueError(
                f"correction = {self.correction!r} at the {self.correction_level} level needs "
                'anchor = "proximal": the ratio to the behaviour policy is a correction already'
            )
        if self.importance_floor is not None and self.correction != "mask":
            raise ValueError(f'importance_floor = {self.importance_floor} needs correction = "mask"')
        if self.importance_floor is not None and self.importance_floor >= self.importance_cap:
            raise ValueError(
                f"importance_floor = {self.importance_floor} is not less than importance_cap = {self.importance_cap}"
            )
        if self.correction == "none" and self.max_staleness > 0 and not self.allow_uncorrected:
            raise ValueError(
                f'correction = "none" with max_staleness = {self.max_staleness} trains episodes of older versions as '
                "if they were new: correct them, or set allow_uncorrected = true"
            )
        return self

    @model_validator(mode="after")
    def _distilling_fits(self) -> Self:
        if self.distill is not None and not self.distill.with_rewards and self.zero_variance == "refill":
            raise ValueError(
                'zero_variance = "refill" drops groups of equal rewards, and distill.with_rewards = false learns '
                'nothing from rewards: take zero_variance = "train"'
            )
        return self

    @model_validator(mode="after")
    def _lora_fits(self) -> Self:
        for name, value in (("lora_alpha", self.lora_alpha), ("lora_modules", self.lora_modules)):
            if value is not None and self.lora_rank is None:
                raise ValueError(f"{name} = {value} has no effect without lora_rank")
        return self

    @model_validator(mode="after")
    def _all_has_effect(self, info: ValidationInfo) -> Self:
        if info.context != STORED:
            check_effect(self)
        return self

    @property
    def has_ratio(self) -> bool:
        """False where the policy is its own anchor at the only update, so that all ratios are 1."""
        return self.anchor == "behaviour" or self.minibatches > 1

    @property
    def adapters_kept(self) -> int | None:
        """Adapters that an engine keeps: those that may still be trained, and one more; None without LoRA.

        The one more is for requests that were sent before their sender knew of the newest. Engines hold one beyond it
        while a new one comes in.
        """
        return None if self.lora_rank is None else self.max_staleness + 2

    @property
    def max_refills(self) -> int:
        """Zero-variance groups that may be dropped for one training step; 0 = they are trained."""
        if self.zero_variance == "train":
            return 0
        return self.max_refills_per_step or 10 * self.groups_per_step

    @property
    def max_dropped(self) -> int:
        """Groups that may be dropped for failed episodes while one version is waited for."""
        return self.max_dropped_groups or 5 * self.groups_per_step
