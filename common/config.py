"""The configuration of one training run: a TOML file, typed, every field documented. Stored resolved with the run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from common.config_effect import refuse_change
from common.config_errors import first_problem
from common.config_network import NetworkConfig
from common.config_section import STORED, Section
from common.config_tracking import TrackingConfig
from common.config_train import TrainConfig
from common.errors import SetupError
from common.storable import MAX_COUNT, MAX_SMALL_COUNT

TINY_MODELS = Path(__file__).parent / "models"
MIN_TEMPERATURE = 0.01
"""vLLM takes less for this, and says so in its log only: the log-probs would be those of another temperature."""


def by_its_name(kind: object) -> object:
    """A kind of sandbox as it is called now."""
    return "subprocess" if kind == "restricted" else kind


SandboxKind = Annotated[Literal["bubblewrap", "docker", "apptainer", "subprocess"], BeforeValidator(by_its_name)]
"""docs/sandbox.md says what keeps commands in with each. `subprocess`, once called `restricted`, has no walls."""
InFlight = Literal["keep", "wait", "abort"]


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
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=2)
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
    """Sampling temperature; 0 = the likeliest token always, None = as in training. Between 0 and 0.01 there is none."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """None = as in training."""
    max_tokens_per_turn: int | None = Field(default=None, ge=1)
    """None = as in training."""
    max_episodes_in_flight: int = Field(default=32, ge=1, le=MAX_COUNT)
    """Evaluation episodes at once. They come beyond the limits in [sharing] and ROLLMILL_MAX_EPISODES_IN_FLIGHT, and
    are counted in them: training gets the rest."""

    @model_validator(mode="after")
    def _temperature_is_kept(self) -> Self:
        if self.temperature is not None and 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature = {self.temperature:g} is no temperature that engines keep to: "
                f"take 0, or {MIN_TEMPERATURE:g} or more"
            )
        return self

    @model_validator(mode="after")
    def _a_task_fits(self) -> Self:
        if self.samples_per_task > self.max_episodes_in_flight:
            raise ValueError(
                f"samples_per_task = {self.samples_per_task} is more than max_episodes_in_flight = "
                f"{self.max_episodes_in_flight}: not one task could be played"
            )
        return self

    @model_validator(mode="after")
    def _all_has_effect(self, info: ValidationInfo) -> Self:
        if info.context != STORED:
            if self.dataset is not None:
                refuse_change(self, "seed", why=f"with dataset = {self.dataset}: it has its tasks")
            if self.temperature == 0:
                refuse_change(self, "top_p", why="with temperature = 0: the likeliest token is taken always")
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
    """Tasks that a procedural handler makes; of a data set all are played."""
    seed: int = 0
    """Seed of the task order, of procedural tasks and of the trainer."""
    rollout: RolloutConfig = RolloutConfig()
    """How episodes are played."""
    render: RenderConfig = RenderConfig()
    """How conversations become ids."""
    train: TrainConfig = TrainConfig()
    """How the policy is updated."""
    eval: EvalConfig | None = None
    """None = no version is evaluated."""
    sharing: SharingConfig = SharingConfig()
    """Its part of a fleet that several runs share."""
    tracking: TrackingConfig = TrackingConfig()
    """Where each step's metrics go."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where its agents run their commands."""

    @model_validator(mode="after")
    def _all_has_effect(self, info: ValidationInfo) -> Self:
        if info.context != STORED and self.dataset is not None:
            refuse_change(self, "num_tasks", why=f"with dataset = {self.dataset}: all its tasks are played")
        return self

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
    def _length_penalty_applies(self, info: ValidationInfo) -> Self:
        limit, buffer = self.train.overlong_tokens, self.train.overlong_buffer
        most = self.rollout.max_turns * self.rollout.max_sampled(1)
        if info.context != STORED and limit is not None and buffer is not None and most <= limit - buffer:
            raise ValueError(
                f"train.overlong_tokens = {limit} with overlong_buffer = {buffer} has no effect: an episode samples at "
                f"most {most} tokens (rollout.max_turns x max_tokens_per_turn, or max_row_tokens - 1 a turn)"
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
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        # Strictly: TOML has types, and `true` is no number, nor is "2". A date has none in JSON, and is no value here.
        return RunConfig.model_validate_json(json.dumps(document, default=str), strict=True)
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
