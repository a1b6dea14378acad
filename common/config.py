"""The configuration of one training run: a TOML file, typed, every field documented. Stored resolved with the run."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from common.config_distill import DistillConfig
from common.config_errors import first_problem
from common.config_network import NetworkConfig
from common.config_section import Section
from common.config_tracking import TrackingConfig
from common.errors import SetupError
from common.storable import MAX_COUNT, MAX_SMALL_COUNT

TINY_MODELS = Path(__file__).parent / "models"


def by_its_name(kind: object) -> object:
    """A kind of sandbox as it is called now."""
    return "subprocess" if kind == "restricted" else kind


SandboxKind = Annotated[Literal["bubblewrap", "docker", "apptainer", "subprocess"], BeforeValidator(by_its_name)]
"""docs/sandbox.md says what keeps commands in with each. `subprocess`, once called `restricted`, has no walls."""
InFlight = Literal["keep", "wait", "abort"]
Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "pass_at_k"]


def _needs(field: str, value: object, *, when: bool, what: str) -> None:
    """Raise ValueError unless the field is set exactly when it has a meaning."""
    if when != (value is not None):
        raise ValueError(
            f"{field} must be set with {what}" if when else f"{field} = {value} has no effect without {what}"
        )


class RolloutConfig(Section):
    """How episodes are played."""

    group_size: int = Field(default=8, ge=2, le=MAX_COUNT // 2)
    """Episodes per task (G of GRPO); the group's mean reward is the baseline."""
    oversample: int = Field(default=0, ge=0, le=MAX_COUNT // 2)
    """Episodes that a group gets beyond group_size. When group_size of them are scored, the rest is cancelled."""
    max_turns: int = Field(default=4, ge=1, le=MAX_SMALL_COUNT)
    """Model calls per episode."""
    max_tokens_per_turn: int = Field(default=40, ge=1)
    """Sampled tokens per turn."""
    max_row_tokens: int | None = Field(default=None, ge=2)
    """Ids of a training row, prompts and sampled: the turn that fills it ends the episode, as does a prompt that leaves
    no room in it (token_limit). None = the policy's context is the only limit (context_limit)."""
    compact_tokens: int | None = Field(default=None, ge=1)
    """A prompt of more ids is first given to the handler's `compact`, which may shorten the conversation; the turn then
    begins a new training row. None = never."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature; greedy sampling has no log-probs to train on, and vLLM takes none above 2."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of likeliest tokens with at least this probability; 1 = from all."""
    episode_timeout_s: float = Field(default=120.0, gt=0)
    """Time budget of the agent in RUN, queue time and waiting for an engine excluded. A request or tool call that is
    under way when it is used up is cut off, and the episode is scored with its turns."""
    init_timeout_s: float = Field(default=300.0, gt=0)
    """Time budget of an episode in INIT, queue time excluded; then the attempt has failed."""
    eval_timeout_s: float = Field(default=300.0, gt=0)
    """Time budget of an episode in EVAL, queue time excluded; then EVAL is tried again."""
    in_flight: InFlight = "keep"
    """What new weights do to requests under way: they go on with them, and have tokens of both versions; the engine is
    loaded when they are done; or they end at once and are asked for again, with what is left of their tokens."""
    on_format_error: Literal["end", "tell"] = "end"
    """What a turn does that cannot be parsed: end the episode, or be answered with the error as a tool result."""

    @model_validator(mode="after")
    def _compacts_in_time(self) -> Self:
        if self.max_row_tokens is not None and (self.compact_tokens or 0) >= self.max_row_tokens:
            raise ValueError(
                f"compact_tokens = {self.compact_tokens} must be less than max_row_tokens = {self.max_row_tokens}: "
                "no prompt would ever be compacted"
            )
        return self

    def max_sampled(self, num_prompt: int) -> int:
        """Ids that may be sampled after a prompt of `num_prompt`; less than 1 = none."""
        if self.max_row_tokens is None:
            return self.max_tokens_per_turn
        return min(self.max_tokens_per_turn, self.max_row_tokens - num_prompt)

    def needs_compacting(self, num_prompt: int) -> bool:
        """Whether a prompt of so many ids is first given to the handler's `compact`."""
        return self.compact_tokens is not None and num_prompt > self.compact_tokens


class RenderConfig(Section):
    """How conversations become ids; the rest is in the model folder's tokenizer and chat template."""

    family: Literal["qwen3", "qwen2.5", "llama3", "chatml", "generic"] | None = None
    """Whose turn ends and tool calls the model has; None = told by its vocabulary."""
    keep_thinking: bool = True
    """Leave the thinking of earlier turns in the prompt, as sampled. False = show earlier turns as the chat template
    does: where that drops their thinking, the turn begins a new training row."""
    template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Variables for the chat template in every render alike, such as enable_thinking."""


class TrainConfig(Section):
    """How the policy is updated."""

    groups_per_step: int = Field(default=16, ge=1)
    """Groups in one training step, which makes one version."""
    num_versions: int = Field(default=40, ge=0)
    """The run is finished when this version is published, and evaluated where there is an [eval]. 0 = nothing is
    trained: the start weights are evaluated."""
    max_staleness: int = Field(default=1, ge=0)
    """Largest allowed (version being trained - oldest version among an episode's tokens). 0 = synchronous."""
    late_groups: Literal["wait", "drop"] = "wait"
    """What becomes of groups that take so long that max_staleness would be exceeded: the step that would make them too
    old waits for them; or they are dropped when they are complete, which is faster, but the policy then hardly ever
    learns from its longest episodes."""
    minibatches: int = Field(default=2, ge=1)
    """Optimizer steps per training step."""
    keep_version_every: int | None = Field(default=None, ge=1)
    """Every n-th version stays in the weight store; None = all but the newest max_staleness + 2 are deleted once no
    engine and no episode that goes on names them. Version 0 always stays."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints that stay, each about three times the weights in float32; one more while a step is written.
    When the newest is damaged, the optimizer's state comes from the one before: with 1 there is none."""
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=5, ge=0)
    """Training steps of linear warm-up; then linear decay to half."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    grad_clip: float = Field(default=0.2, gt=0)
    """Largest gradient norm."""
    max_positions: int = Field(default=4096, ge=1)
    """Token positions of one forward and backward pass; the gradient adds up over the passes. Padding counts, unless
    there is packing. A longer row has a pass of its own."""
    packing: bool = False
    """Put the rows of a pass one after the other, without padding and without attention between them."""
    max_logits: int = Field(default=2**26, ge=1)
    """Logits (token positions x vocabulary) that exist at once, in float32, some four times; 2**26 are 256 MiB. A pass
    that needs more computes them in chunks, twice."""
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
    clip ranges are about a thousandth of PPO's), or a bounded weight of each token's log-prob (CISPO)."""
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
    """Largest importance weight proximal/behaviour."""
    importance_floor: float | None = Field(default=None, gt=0)
    """Smallest importance weight that correction = "mask" leaves in the loss (IcePop); None = no bound."""
    allow_uncorrected: bool = False
    """Train episodes of older versions with correction = "none" all the same; such runs collapse."""
    kl: Literal["none", "loss", "reward"] = "none"
    """Where the distance to the start weights is held against the policy: as a term of the loss, or off the reward of
    each episode, before its advantage. Keeps a second copy of the model in memory; with lora_rank the model
    without its adapter does."""
    kl_coefficient: float | None = Field(default=None, gt=0)
    """Weight of the KL divergence in nats, summed over the tokens as the rest of the loss; None without kl."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators. k1 has no gradient in the mean, so it is for kl = "reward" alone."""
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
    """Groups whose rewards are all equal, which have no gradient: train them, or drop and replace them (DAPO, dynamic
    sampling)."""
    max_refills_per_step: int | None = Field(default=None, ge=1)
    """Groups that `refill` may drop for one training step, before the further ones are trained; None = 10 x
    groups_per_step. So a policy that has solved everything still comes to an end."""

    @model_validator(mode="after")
    def _parts_of_the_objective_fit(self) -> Self:
        _needs("pass_k", self.pass_k, when=self.advantage == "pass_at_k", what='advantage = "pass_at_k"')
        _needs("divisor_tokens", self.divisor_tokens, when=self.average == "constant", what='average = "constant"')
        _needs("kl_coefficient", self.kl_coefficient, when=self.kl != "none", what="kl")
        if self.kl == "loss" and self.kl_estimator == "k1":
            raise ValueError('kl_estimator = "k1" in the loss has a gradient of mean zero: take "k2" or "k3"')
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


class EvalConfig(Section):
    """Evaluation of versions on held-out tasks, beside the training and never part of it.

    While a version is evaluated, engines that serve it stay with it, so all tokens are its own; training goes on with
    it as far as max_staleness allows. An evaluation that takes longer than max_staleness steps so holds training up.
    """

    every_versions: int = Field(default=10, ge=1, le=MAX_COUNT)
    """Each n-th version is evaluated, from version 0 on, and the last one; before that the run is not finished."""
    dataset: Path | None = None
    """JSON lines, one held-out task a line; None = the handler makes them from `seed`."""
    num_tasks: int = Field(default=64, ge=1, le=MAX_COUNT)
    """Tasks at most: of the data set the first ones. Those that are also trained on are left out."""
    seed: int = 1_000_003
    """Of the tasks that the handler makes."""
    samples_per_task: int = Field(default=1, ge=1, le=1000)
    """Episodes of each task: the more, the less noise, and pass@k up to this k."""
    success_reward: float = 1.0
    """Reward from which on an episode counts as solved, for pass@k."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """Sampling temperature; 0 = the likeliest token always, None = as in training."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """None = as in training."""
    max_tokens_per_turn: int | None = Field(default=None, ge=1)
    """None = as in training."""
    max_episodes_in_flight: int = Field(default=32, ge=1, le=MAX_COUNT)
    """Evaluation episodes at once. They come beyond the limits in [sharing] and ROLLMILL_MAX_EPISODES_IN_FLIGHT, and
    are counted in them: training gets the rest."""

    @model_validator(mode="after")
    def _a_task_fits(self) -> Self:
        if self.samples_per_task > self.max_episodes_in_flight:
            raise ValueError(
                f"samples_per_task = {self.samples_per_task} is more than max_episodes_in_flight = "
                f"{self.max_episodes_in_flight}: not one task could be played"
            )
        return self


class SharingConfig(Section):
    """The run's part of a fleet that several runs share. `rollmill run share` changes it while the run goes on."""

    weight: float = Field(default=1.0, ge=0, le=1e6)
    """Its share of ROLLMILL_MAX_EPISODES_IN_FLIGHT is in proportion to it; 0 = only what the others leave."""
    max_episodes_in_flight: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Episodes of the run that may be in flight, which is not final; None = what its share and staleness allow."""
    max_sandboxes: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Sandboxes of the run that may be in flight: those that stand, and one for each NEW episode, which will make one.
    A dead attempt's counts until the reaper has swept it away, a round or so later. None = no bound."""

    def check(self, *, episodes_per_group: int) -> None:
        """Raise ValueError if a limit is less than a group, which are made whole."""
        for name, limit in (
            ("max_episodes_in_flight", self.max_episodes_in_flight),
            ("max_sandboxes", self.max_sandboxes),
        ):
            if limit is not None and limit < episodes_per_group:
                raise ValueError(
                    f"sharing.{name} = {limit} is less than the {episodes_per_group} episodes of a group "
                    "(rollout.group_size + rollout.oversample): the run would never get one"
                )


class SandboxConfig(Section):
    """Where the run's agents run their commands."""

    kind: SandboxKind | None = None
    """None = as ROLLMILL_SANDBOX of the fleets' nodes says; "docker" for an image."""
    image: str | None = Field(default=None, min_length=1)
    """Image with bash and python3, for tasks that name none; None = ROLLMILL_SANDBOX_IMAGE.

    A name that Docker or Podman knows; a file or folder for kind = "apptainer"."""
    network: NetworkConfig = NetworkConfig()
    """What commands reach, for tasks that say nothing of it."""
    lifetime_s: float = Field(default=86_400.0, gt=0)
    """A sandbox that runs for longer is ended, and its attempt with it (sandbox_expired)."""

    @model_validator(mode="after")
    def _image_fits(self) -> Self:
        if self.image is not None and self.kind not in (None, "docker", "apptainer"):
            raise ValueError(
                f'image = {self.image!r} has no effect with kind = {self.kind!r}: take "docker" or "apptainer"'
            )
        return self


class RunConfig(Section):
    """One training run."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """Unique among the runs of the database; part of every weights path."""
    handler: str = "calculator"
    """A registered handler, or an import path `package.module:Class`."""
    model: Path
    """Folder of the start weights, tokenizer and chat template."""
    dataset: Path | None = None
    """JSON lines, one task a line; None = the handler makes its own tasks."""
    num_tasks: int = Field(default=2000, ge=1)
    """Tasks that a procedural handler makes."""
    seed: int = 0
    """Seed of the task order, of procedural tasks and of the trainer."""
    rollout: RolloutConfig = RolloutConfig()
    render: RenderConfig = RenderConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig | None = None
    """None = no version is evaluated."""
    sharing: SharingConfig = SharingConfig()
    tracking: TrackingConfig = TrackingConfig()
    sandbox: SandboxConfig = SandboxConfig()

    @model_validator(mode="after")
    def _minibatches_fit(self) -> Self:
        if self.train.minibatches > self.train.groups_per_step:
            raise ValueError(
                f"train.minibatches = {self.train.minibatches} is more than "
                f"train.groups_per_step = {self.train.groups_per_step}: a minibatch would be empty"
            )
        return self

    @model_validator(mode="after")
    def _pass_k_fits(self) -> Self:
        if self.train.pass_k is not None and self.train.pass_k >= self.rollout.group_size:
            raise ValueError(
                f"train.pass_k = {self.train.pass_k} must be less than rollout.group_size = {self.rollout.group_size}: "
                "a group would have one subset of that size, and nothing to compare it with"
            )
        return self

    @model_validator(mode="after")
    def _length_penalty_applies(self) -> Self:
        limit, buffer = self.train.overlong_tokens, self.train.overlong_buffer
        most = self.rollout.max_turns * self.rollout.max_tokens_per_turn
        if limit is not None and buffer is not None and most <= limit - buffer:
            raise ValueError(
                f"train.overlong_tokens = {limit} with overlong_buffer = {buffer} has no effect: an episode samples at "
                f"most {most} tokens (rollout.max_turns x max_tokens_per_turn)"
            )
        return self

    @model_validator(mode="after")
    def _sandboxes_live_long_enough(self) -> Self:
        if self.sandbox.lifetime_s <= self.rollout.episode_timeout_s:
            raise ValueError(
                f"sandbox.lifetime_s = {self.sandbox.lifetime_s:g} must be more than rollout.episode_timeout_s = "
                f"{self.rollout.episode_timeout_s:g}: agents could end their attempts by taking their time"
            )
        return self

    @model_validator(mode="after")
    def _teacher_fits(self) -> Self:
        distill, temperature = self.train.distill, self.rollout.temperature
        if distill is not None and distill.is_server and temperature != 1:
            raise ValueError(
                f"train.distill.teacher = {distill.teacher} says the log-probs of temperature 1, and "
                f"rollout.temperature = {temperature}: take 1, or give the folder of the teacher's model"
            )
        return self

    @model_validator(mode="after")
    def _limits_fit(self) -> Self:
        self.sharing.check(episodes_per_group=self.episodes_per_group)
        return self

    @model_validator(mode="after")
    def _has_something_to_do(self) -> Self:
        if self.train.num_versions == 0 and self.eval is None:
            raise ValueError("train.num_versions = 0 trains nothing: add an [eval] section, or train a version")
        return self

    @property
    def eval_rollout(self) -> RolloutConfig:
        """How evaluation episodes are played."""
        assert self.eval is not None, f"run {self.name} has no [eval]"
        own = self.eval.model_dump(include={"temperature", "top_p", "max_tokens_per_turn"}, exclude_none=True)
        return self.rollout.model_copy(update=own)

    @property
    def episodes_per_group(self) -> int:
        """Episodes that a group is made with."""
        return self.rollout.group_size + self.rollout.oversample

    @property
    def wanted(self) -> int | None:
        """Scored episodes that complete a group; None = all its episodes are waited for."""
        return self.rollout.group_size if self.rollout.oversample else None

    @property
    def dataset_name(self) -> str:
        """Name of the task set in the database: the file, or how the handler made it."""
        return str(self.dataset) if self.dataset else f"{self.handler}:seed={self.seed}:num={self.num_tasks}"

    @property
    def num_groups(self) -> int:
        """Groups that the whole run trains."""
        return self.train.num_versions * self.train.groups_per_step

    @property
    def groups_in_flight(self) -> int:
        """Groups that may be in flight at once under the staleness bound."""
        return (self.train.max_staleness + 1) * self.train.groups_per_step


def load_run_config(path: Path) -> RunConfig:
    """Read a run's TOML file. Raises SetupError that names the file, the field and the value."""
    try:
        return RunConfig.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SetupError(f"run configuration {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SetupError(f"run configuration {path} is not UTF-8: {error}") from None
    except RecursionError:
        raise SetupError(f"run configuration {path} is nested too deeply") from None
    except ValidationError as error:
        raise SetupError(f"run configuration {path}: {first_problem(error, RunConfig)}") from None
    except ValueError as error:
        # Not only tomllib's own: a number of thousands of digits is one of Python's.
        raise SetupError(f"run configuration {path} is not TOML: {error}") from None
