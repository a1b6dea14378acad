"""One training run in one process: the demo's model, engine batch, renderer, agent loop, handlers and trainer.

No queue, no database, no clock between them: what is left is what decides whether a policy learns. Every group of step
v is sampled by version v - lag, the oldest that a staleness bound of `lag` lets in; a real run is fresher than that.
"""

from __future__ import annotations

import asyncio
import itertools
import shlex
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import JsonValue

from benchmarks.commands_only import CommandsOnly
from common.config import TINY_MODELS, RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db.steps import ScoredGroup
from common.episode import FinishReason, Sampled, ScoredEpisode, ToolCall, Turn, TurnTokens, VersionSpan
from trainer.loop import prepare, rows_of
from trainer.modelling import load_model
from trainer.policy import Policy
from workers.agent import Agent, Generated, Played
from workers.engine.batch import Batch
from workers.engine.checkpoint import expected_shapes, read_config, read_eos_ids, read_tensors
from workers.engine.decoding import DecodingThread
from workers.engine.model import Model, Weights, fuse
from workers.engine.request import Request
from workers.engine.sampling import SamplingParams
from workers.handlers.base import Handler
from workers.handlers.calculator import Calculator
from workers.handlers.shell import Shell
from workers.render import Renderer
from workers.sandbox.protocol import ExecResult

MAX_MODEL_LEN = 512
HANDLERS: Mapping[str, type[Handler]] = {"calculator": Calculator, "shell": Shell}
RECIPES: Mapping[str, Mapping[str, object]] = {
    "behaviour": {},
    "decoupled": {"anchor": "proximal", "correction": "truncate", "importance_cap": 2.0},
    "masked": {"anchor": "proximal", "correction": "mask", "importance_cap": 2.0, "importance_floor": 0.5},
    "none": {"anchor": "proximal", "correction": "none", "allow_uncorrected": True},
    "kept_divisor": {},
}
"""Fields of [train] beside the defaults. "behaviour" is the default: the ratio is taken to the stored log-probs.
"kept_divisor" is the same, with the loss divided by the tokens of the groups that have a gradient alone."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One run."""

    task: str
    recipe: str
    lag: int
    """Versions between the one that sampled and the one that is trained."""
    seed: int
    num_versions: int = 40

    def config(self) -> RunConfig:
        train = {"num_versions": self.num_versions, "max_staleness": self.lag, **RECIPES[self.recipe]}
        if self.lag == 0:
            # There is nothing to correct then, and nothing to allow.
            train.pop("allow_uncorrected", None)
        return RunConfig(
            name="learning",
            handler=self.task,
            model=TINY_MODELS / f"tiny-{self.task}",
            seed=self.seed,
            num_tasks=self.num_versions * TrainConfig().groups_per_step,
            rollout=RolloutConfig(),
            train=TrainConfig.model_validate(train),
        )


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a run came to."""

    rewards: tuple[float, ...]
    """Mean reward of the episodes of each step."""
    cpu_s: float

    @property
    def start(self) -> float:
        """Mean of the first three steps."""
        return float(np.mean(self.rewards[:3]))

    @property
    def end(self) -> float:
        """Mean of the last five."""
        return float(np.mean(self.rewards[-5:]))


def learn(setup: Setup) -> Learned:
    """Train from the start weights; the same set-up gives the same tasks, and other samples."""
    torch.set_num_threads(1)
    started = time.process_time()
    config = setup.config()
    policy = Policy(
        load_model(config.model), train=config.train, temperature=config.rollout.temperature, seed=config.seed
    )
    with _Sampler(config) as sampler:
        versions = deque([sampler.weights], maxlen=setup.lag + 1)
        rewards = []
        tasks = HANDLERS[setup.task]().tasks(seed=setup.seed, num_tasks=config.num_tasks)
        for version in range(setup.num_versions):
            sampler.use(versions[0])
            payloads = list(itertools.islice(tasks, config.train.groups_per_step))
            groups = asyncio.run(sampler.play(payloads, version=max(0, version - setup.lag)))
            rewards.append(_train(policy, groups, version=version, kept_only=setup.recipe == "kept_divisor"))
            versions.append(sampler.weights_of(policy))
    return Learned(rewards=tuple(rewards), cpu_s=time.process_time() - started)


def _train(policy: Policy, groups: tuple[ScoredGroup, ...], *, version: int, kept_only: bool) -> float:
    """One step of the trainer's own; returns the mean reward of its episodes."""
    samples = rows_of(groups)
    advantages, metrics = prepare(
        groups, samples, version=version, train=policy.train, reference_kl=policy.reference_kl
    )
    if kept_only:
        samples = [sample for sample in samples if advantages.by_episode[sample.episode_id] != 0]
    policy.train_step(samples, advantages.by_episode, version=version)
    return metrics["reward_mean"]


class _Sampler:
    """Plays groups with given weights, all episodes of a step at once."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._handler = HANDLERS[config.handler]()
        self._renderer = Renderer.from_folder(config.model)
        self._model_config = read_config(config.model)
        self._eos_ids = read_eos_ids(config.model, self._model_config)
        self.weights = fuse(self._model_config, read_tensors(config.model, expected_shapes(self._model_config)))
        """Of the model's folder."""
        num_slots = config.train.groups_per_step * config.rollout.group_size
        model = Model(self._model_config, self.weights, num_slots=num_slots, max_model_len=MAX_MODEL_LEN)
        self._decoding = DecodingThread(Batch(model))
        self._numbers = itertools.count()

    def __enter__(self) -> _Sampler:
        self._decoding.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._decoding.stop(timeout_s=10)

    def use(self, weights: Weights) -> None:
        self._decoding.call(lambda batch: batch.swap_weights(weights)).result(timeout=10)

    def weights_of(self, policy: Policy) -> Weights:
        shapes = expected_shapes(self._model_config)
        state = policy.model.state_dict()
        return fuse(self._model_config, {name: state[name].detach().clone() for name in shapes})

    async def play(self, payloads: Sequence[dict[str, JsonValue]], *, version: int) -> tuple[ScoredGroup, ...]:
        """One group for each payload."""
        return tuple(await asyncio.gather(*(self._group(payload, version) for payload in payloads)))

    async def _group(self, payload: dict[str, JsonValue], version: int) -> ScoredGroup:
        group_id, size = next(self._numbers), self._config.rollout.group_size
        played = await asyncio.gather(*(self._episode(payload, version, group_id) for _ in range(size)))
        return ScoredGroup(group_id=group_id, episodes=tuple(played))

    async def _episode(self, payload: dict[str, JsonValue], version: int, group_id: int) -> ScoredEpisode:
        prepared = self._handler.init(payload)
        sandbox = _ReadOnlyFiles(prepared.files) if prepared.needs_sandbox else None
        turns: list[Turn] = []

        async def save(turn: Turn) -> None:
            turns.append(turn)

        async def generate(prompt_ids: list[int]) -> Generated:
            return await self._generate(prompt_ids, version)

        async def call_tool(call: ToolCall) -> str:
            return await self._handler.call_tool(call, payload, sandbox)

        agent = Agent(
            renderer=self._renderer,
            config=self._config.rollout,
            generate=generate,
            call_tool=call_tool,
            save=save,
            spent_s=lambda: 0.0,
        )
        played: Played = await agent.play(prepared.messages, prepared.tools, [])
        if played.last is not None:
            turns.append(played.last)
        transcript = (*prepared.messages, *(message for turn in turns for message in turn.messages))
        return ScoredEpisode(
            episode_id=next(self._numbers),
            group_id=group_id,
            outcome=played.outcome,
            reward=self._handler.eval(payload, transcript).reward,
            turns=tuple(_tokens(turn) for turn in turns),
        )

    async def _generate(self, prompt_ids: list[int], version: int) -> Generated:
        rollout = self._config.rollout
        params = SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            max_tokens=rollout.max_tokens_per_turn,
            stop_token_ids=list(self._renderer.stop_ids),
            logprobs=0,
        )
        request = Request(
            f"{next(self._numbers)}", prompt_ids, params, eos_ids=self._eos_ids, max_model_len=MAX_MODEL_LEN
        )
        done = await asyncio.wrap_future(self._decoding.submit(request))
        sampled = Sampled(
            ids=tuple(done.token_ids),
            logprobs=tuple(done.logprobs),
            spans=(VersionSpan(version=version, start=0, end=len(done.token_ids)),),
            finish_reason=FinishReason(done.finish_reason.value),
        )
        return Generated(sampled=sampled, engine="in this process", latency_ms=0)


def _tokens(turn: Turn) -> TurnTokens:
    versions = [span.version for span in turn.sampled.spans for _ in range(span.start, span.end)]
    return TurnTokens(
        suffix_ids=np.array(turn.suffix_ids, dtype=np.int32),
        sampled_ids=np.array(turn.sampled.ids, dtype=np.int32),
        logprobs=np.array(turn.sampled.logprobs, dtype=np.float32),
        versions=np.array(versions, dtype=np.int32),
    )


class _ReadOnlyFiles(CommandsOnly):
    """What the shell task needs of a sandbox, without one: `ls` and `cat FILE`; all else is an unknown command."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        try:
            words = shlex.split(command)
        except ValueError:
            return _result(2, "sh: 1: Syntax error: Unterminated quoted string\n")
        match words:
            case ["ls"]:
                return _result(0, "".join(f"{name}\n" for name in sorted(self._files)))
            case ["cat", *names] if names:
                return self._cat(names)
            case [name, *_]:
                return _result(127, f"sh: 1: {name}: not found\n")
            case _:
                return _result(0, "")

    def _cat(self, names: Sequence[str]) -> ExecResult:
        missing = [name for name in names if name not in self._files]
        told = "".join(f"cat: {name}: No such file or directory\n" for name in missing)
        return _result(1 if missing else 0, "".join(self._files.get(name, "") for name in names) + told)


def _result(exit_code: int, output: str) -> ExecResult:
    return ExecResult(exit_code=exit_code, output=output, timed_out=False)


def setups(tasks: Sequence[str], recipes: Sequence[str], lags: Sequence[int], seeds: Sequence[int]) -> Iterator[Setup]:
    """All combinations."""
    for task, recipe, lag, seed in itertools.product(tasks, recipes, lags, seeds):
        yield Setup(task=task, recipe=recipe, lag=lag, seed=seed)
