"""What a run will do, in words, before anything starts: `--dry-run` prints it. Refuses what does not fit the model."""

from __future__ import annotations

from collections.abc import Iterator

from common.config import RunConfig
from common.config_train import TrainConfig
from common.errors import SetupError
from common.memory import LORA_MODULES, MemoryEstimate, estimate_memory
from common.model_folder import ModelShape, read_model_shape
from common.settings import Settings, masked

MIB = 2**20


def check_fits_model(config: RunConfig, shape: ModelShape) -> None:
    """Raise SetupError for a length that the model's context leaves without effect."""
    if shape.context is None:
        return
    for field, value in (
        ("rollout.max_row_tokens", config.rollout.max_row_tokens),
        ("rollout.compact_tokens", config.rollout.compact_tokens),
        ("rollout.max_tokens_per_turn", config.rollout.max_tokens_per_turn),
    ):
        if value is not None and value > shape.context:
            raise SetupError(
                f"{field} = {value} is more than the {shape.context} positions of model {config.model} "
                "(max_position_embeddings): no episode could get there"
            )


def plan(config: RunConfig, *, settings: Settings, engines: str, unset: str) -> str:
    """Lines of what is done, in which amounts, and where it goes.

    `engines` says who samples, `unset` what happens where no database or broker is named.

    Raises SetupError for a model that is missing or does not fit.
    """
    shape = read_model_shape(config.model)
    check_fits_model(config, shape)
    parts = [
        *_run(config, shape),
        *_amounts(config),
        *_objective(config),
        *_places(config, settings, engines=engines, unset=unset),
    ]
    parts += _memory(estimate_memory(config, shape))
    return "".join(f"{name:<13} {what}\n" for name, what in parts)


def _run(config: RunConfig, shape: ModelShape) -> Iterator[tuple[str, str]]:
    tasks = config.dataset or f"{config.num_tasks:,} that the handler makes"
    yield "run", f"{config.name}: handler {config.handler}, tasks {tasks}, seed {config.seed}"
    size = "unknown" if shape.num_parameters is None else f"{shape.num_parameters:,}"
    yield (
        "model",
        f"{config.model}: {size} parameters, vocabulary {shape.vocab_size:,}, context {shape.context or 'unknown'}",
    )


def _amounts(config: RunConfig) -> Iterator[tuple[str, str]]:
    train, rollout = config.train, config.rollout
    extra = f" + {rollout.oversample} that the last of a group are not waited for" if rollout.oversample else ""
    num_trained = config.num_groups * rollout.group_size
    yield (
        "steps",
        f"{counted(train.num_versions, 'version')} x {counted(train.groups_per_step, 'group')} x "
        f"{rollout.group_size} episodes{extra}; {counted(train.minibatches, 'optimizer step')} each",
    )
    num_played = config.num_groups * config.episodes_per_group
    yield (
        "episodes",
        f"{num_trained:,} trained in {counted(config.num_groups, 'group')}; at least {num_played:,} played",
    )
    per_episode = rollout.max_turns * rollout.max_tokens_per_turn
    row = f", rows of at most {rollout.max_row_tokens:,} ids" if rollout.max_row_tokens else ""
    yield (
        "tokens",
        f"at most {per_episode:,} sampled in an episode "
        f"({counted(rollout.max_turns, 'turn')} x {rollout.max_tokens_per_turn}), "
        f"{num_trained * per_episode:,} trained in the run{row}; temperature {rollout.temperature:g}, "
        f"top-p {rollout.top_p:g}",
    )
    if train.zero_variance == "refill":
        yield "refills", f"groups of equal rewards are replaced, up to {train.max_refills:,} for a step"
    bound = f"episodes at most {counted(train.max_staleness, 'version')} old" if train.max_staleness else "synchronous"
    yield (
        "staleness",
        f"{bound}; at most {counted(config.groups_in_flight, 'group')} "
        f"({config.groups_in_flight * config.episodes_per_group:,} episodes) in flight",
    )


def _objective(config: RunConfig) -> Iterator[tuple[str, str]]:
    train = config.train
    if config.eval is not None:
        held_out = config.eval
        tasks = held_out.dataset or "tasks that the handler makes"
        yield (
            "evaluation",
            f"{_how_often(held_out.every_versions)}: {counted(held_out.num_tasks, 'held-out task')} x "
            f"{held_out.samples_per_task}, {tasks}",
        )
    yield "advantage", train.advantage + (f", k = {train.pass_k}" if train.pass_k else "")
    dual = "" if train.loss == "cispo" or train.dual_clip >= 1e9 else f", dual clip {train.dual_clip:g}"
    divisor = f" by {train.divisor_tokens:,}" if train.divisor_tokens else ""
    yield (
        "loss",
        f"{train.loss}, ratio to the {train.anchor} policy clipped to {1 - train.clip_low:g} .. {1 + train.clip_high:g}"
        f"{dual}; mean by {train.average}{divisor}",
    )
    yield "correction", _correction(config)
    terms = []
    if train.kl != "none":
        terms.append(f"{train.kl_coefficient:g} x KL ({train.kl_estimator}) in the {train.kl}")
    if train.entropy_coefficient:
        terms.append(f"{train.entropy_coefficient:g} x entropy bonus")
    if train.distill is not None:
        of = "rewards and " if train.distill.with_rewards else "nothing but "
        terms.append(f"advantages of {of}{train.distill.weight:g} x what {train.distill.teacher} thinks of each token")
    if train.overlong_tokens:
        terms.append(
            f"length penalty up to {counted(train.overlong_tokens, 'token')}, over the last {train.overlong_buffer:,}"
        )
    if train.truncated == "mask":
        terms.append("episodes cut off for their length are left out")
    yield "also in it", "; ".join(terms) or "nothing: no KL, no entropy bonus, no length penalty"
    if train.lora_rank is not None:
        alpha = train.lora_alpha or 2 * train.lora_rank
        yield (
            "adapter",
            f"LoRA of rank {train.lora_rank}, alpha {alpha}, on {', '.join(train.lora_modules or LORA_MODULES)}",
        )
    decay = f", weight decay {train.weight_decay:g}" if train.weight_decay else ""
    yield "optimizer", f"AdamW{decay}, {_rate(train)}; gradients clipped at {train.grad_clip:g}"


def _rate(train: TrainConfig) -> str:
    if 0 < train.num_versions <= train.warmup_steps:
        last = train.learning_rate * train.num_versions / train.warmup_steps
        return (
            f"learning rate rising to {last:g} in the last step: the warm-up to {train.learning_rate:g} takes "
            f"{counted(train.warmup_steps, 'step')}, and the run has {train.num_versions}"
        )
    after = f"learning rate {train.learning_rate:g} after {counted(train.warmup_steps, 'step')}"
    if train.lr_schedule == "constant":
        return f"{after}, and to the end"
    return f"{after}, {train.lr_schedule} to {train.learning_rate * train.lr_end:g} at the end"


def _correction(config: RunConfig) -> str:
    train = config.train
    if train.anchor == "behaviour":
        return "none beside the ratio, which is taken to the policy that sampled"
    if train.correction == "none":
        return "none"
    floor = f"below {train.importance_floor:g} or " if train.importance_floor else ""
    what = "cut down" if train.correction == "truncate" else "left out"
    return f"importance weights per {train.correction_level}, {floor}above {train.importance_cap:g} {what}"


def _how_often(every: int) -> str:
    return "every version" if every == 1 else f"every {every} versions and the last"


def _places(config: RunConfig, settings: Settings, *, engines: str, unset: str) -> Iterator[tuple[str, str]]:
    data_dir = settings.data_dir.resolve()
    yield "engines", engines
    where = masked(settings.weights_url) if settings.weights_url else str(data_dir / "weights")
    yield "weights", f"{where}/{config.name}/, a version a step; {_kept(config.train.keep_version_every)}"
    yield "checkpoints", f"{data_dir / 'checkpoints' / config.name}, the newest {config.train.keep_checkpoints}"
    for name, url in (("database", settings.database_url), ("broker", settings.broker_url)):
        yield name, masked(url) if url else unset
    port = settings.metrics_port
    prometheus = f", Prometheus at http://{settings.metrics_host}:{port}/metrics" if port else ""
    yield "metrics", ", ".join(["Postgres (train_step)" + prometheus, *config.tracking.sinks])


def _kept(every: int | None) -> str:
    if every == 1:
        return "all of them stay"
    but = f", but every {ordinal(every)} stays" if every else ""
    return f"old ones are deleted when nobody needs them{but}"


def ordinal(number: int) -> str:
    """2nd, 3rd, 4th, 11th, 21st …"""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


def counted(number: int, what: str) -> str:
    """`1 version`, `2 versions`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _memory(estimate: MemoryEstimate | None) -> Iterator[tuple[str, str]]:
    if estimate is None:
        yield "memory", "not known: the model folder has no safetensors files"
        return
    yield "memory", f"about {_size(estimate.total)} of tensors in the trainer, on one rank:"
    yield "", f"parameters {_size(estimate.parameters)}, gradients {_size(estimate.gradients)},"
    yield "", f"AdamW {_size(estimate.optimizer)}, start weights or teacher beside it {_size(estimate.reference)},"
    yield (
        "",
        f"a micro-batch of {estimate.positions:,} ids: activations {_size(estimate.activations)}, "
        f"logits {_size(estimate.logits)}",
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / MIB / 1024:.1f} GiB" if num_bytes >= 1024 * MIB else f"{num_bytes / MIB:.1f} MiB"
