"""The policy in training: float32 weights, log-probs of given tokens, one training step. publish.py saves it.

Legend: B rows of a batch, L positions of a row, N sampled tokens of a batch, V vocabulary.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from common.config import RunConfig, TrainConfig
from common.errors import RollmillError, SetupError
from common.memory import MAX_POSITIONS
from trainer.kl import kl_estimate
from trainer.lora import with_adapter, without_adapter
from trainer.losses import StepTotals, TokenStats, needs_all_rows, policy_loss
from trainer.samples import Batch, Sample, fresh_mask, microbatches, pad

NUM_PROBED = 32
"""Rows whose log-probs are compared with the engine's at the start of a step."""


class TrainingError(RollmillError):
    """The numbers of a training step are not finite. The message names the step and the episodes."""


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """A batch with all that its loss needs."""

    samples: tuple[Sample, ...]
    batch: Batch
    anchor_logprobs_BL: torch.Tensor
    """float32, nats; what the ratio is taken against."""
    reference_logprobs_BL: torch.Tensor | None
    """float32, nats, by the start weights; None where the loss has no KL term."""
    advantages_B: torch.Tensor
    """float32."""
    episode_tokens_B: torch.Tensor
    """int64; sampled tokens of the row's episode, over all its rows."""


class Policy:
    """A causal language model with its optimizer. Everything random is a function of (seed, version)."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        train: TrainConfig,
        temperature: float,
        seed: int,
        top_p: float = 1.0,
        reference: PreTrainedModel | None = None,
    ) -> None:
        """`reference` has the start weights; None where train.kl = "none", or where they are under an adapter."""
        # Without dropout: the ratio to the behaviour log-probs must be 1 where the weights are the same.
        self.model: PreTrainedModel = model.eval()  # type: ignore[no-untyped-call]
        self.reference = reference
        self.train = train
        self.temperature = temperature
        self.top_p = top_p
        self.seed = seed
        # An optimizer that knew the frozen weights would save no state for them, and miss it when it is restored.
        self.optimizer = torch.optim.AdamW(
            self._trained().values(), lr=train.learning_rate, betas=(train.beta1, train.beta2), weight_decay=0.0
        )

    @classmethod
    def load(cls, config: RunConfig) -> Self:
        """The start weights of a run, in float32, and its new adapter if it trains one.

        Raises SetupError when the folder holds no model, or none that fits the adapter.
        """
        model, train = load_model(config.model), config.train
        adapted = train.lora_rank is not None
        return cls(
            with_adapter(model, train=train, seed=config.seed) if adapted else model,
            train=train,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            seed=config.seed,
            reference=None if train.kl == "none" or adapted else load_model(config.model),
        )

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        """By name: all parameters, or the adapter's where there is one."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """[B, L] log-probs in nats of the sampled tokens at the run's temperature and top-p; 0 elsewhere."""
        return _scatter(_of_sampled(self._log_softmax(batch), batch), batch)

    @torch.no_grad()
    def reference_kl(self, samples: Sequence[Sample]) -> dict[int, float]:
        """Episode id -> estimate of KL(behaviour || start weights) in nats, summed over the episode's tokens.

        What train.kl = "reward" takes off the reward, as in Ahmadian et al. 2024, "Back to basics", the section on
        preliminaries. An episode without tokens is not in it.
        """
        by_episode: dict[int, float] = {}
        for rows in microbatches([row for row in samples if row.num_tokens], max_positions=MAX_POSITIONS):
            batch = pad(rows)
            estimate_BL = kl_estimate(
                batch.behaviour_logprobs_BL, self._reference_logprobs(batch), estimator=self.train.kl_estimator
            )
            # Both arguments are 0 outside the mask, and so is each estimate.
            for row, kl in zip(rows, estimate_BL.sum(dim=1).tolist(), strict=True):
                by_episode[row.episode_id] = by_episode.get(row.episode_id, 0.0) + kl
        return by_episode

    def train_step(
        self, samples: Sequence[Sample], advantages: Mapping[int, float], *, version: int
    ) -> dict[str, float]:
        """Turn policy `version` into version + 1; `advantages` are by episode id. Returns the step's metrics.

        Rows with advantage 0 count in the loss's divisor. Where they have no gradient (losses.needs_all_rows) they are
        not computed.
        Raises TrainingError before the weights change when a loss or a gradient is not finite.
        """
        randomness = random.Random(f"{self.seed}:{version}")
        probe = self._probe(samples, version=version, randomness=randomness)
        with_tokens = [sample for sample in samples if sample.num_tokens]
        all_rows = needs_all_rows(self.train)
        kept = [sample for sample in with_tokens if all_rows or advantages[sample.episode_id] != 0]
        minibatches = [
            self._prepare(part, advantages)
            for part in split_by_group(kept, parts=self.train.minibatches, randomness=randomness)
        ]
        rate = learning_rate(self.train, version)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        tokens = num_tokens_by_episode(with_tokens)
        totals = StepTotals(num_tokens=tokens.total(), num_episodes=len(tokens))
        loss, stats, grad_norms = 0.0, TokenStats(), [0.0]
        for minibatch in minibatches:
            minibatch_loss, minibatch_stats, grad_norm = self._update(minibatch, version=version, totals=totals)
            loss += minibatch_loss
            stats += minibatch_stats
            grad_norms.append(grad_norm)
        return probe | {"loss": loss, "grad_norm": max(grad_norms), "learning_rate": rate} | stats.metrics()

    def state(self) -> dict[str, torch.Tensor]:
        """Trained weights and optimizer state by name; with the start weights, the whole of what a checkpoint needs."""
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._trained().items():
            tensors[f"model.{name}"] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        return tensors

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put back what `state` returned. Raises SetupError when it belongs to another model."""
        parameters = self._trained()
        shapes = {f"model.{name}": parameter.shape for name, parameter in parameters.items()}
        found = {name: tensor.shape for name, tensor in tensors.items() if name.startswith("model.")}
        if shapes != found:
            odd = min(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
            raise SetupError(
                f"the checkpoint belongs to another model: {odd} is {found.get(odd)} there, {shapes.get(odd)} here"
            )
        self.optimizer.state.clear()
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "model":
                parameters[rest].data.copy_(tensor)
            else:
                key, _, parameter_name = rest.partition(".")
                self.optimizer.state[parameters[parameter_name]][key] = tensor.clone()

    def _reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """[B, L] log-probs in nats by the start weights, at the same temperature and top-p; 0 elsewhere."""
        if self.train.lora_rank is not None:
            with without_adapter(self.model):
                return _scatter(_of_sampled(self._log_softmax(batch), batch), batch)
        assert self.reference is not None
        return _scatter(_of_sampled(self._log_softmax(batch, model=self.reference), batch), batch)

    def _logprobs_and_entropies(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, L] log-probs, and the entropies in nats before each sampled token where the loss needs them."""
        log_softmax_NV = self._log_softmax(batch)
        logprobs_BL = _scatter(_of_sampled(log_softmax_NV, batch), batch)
        if self.train.entropy_coefficient == 0:
            return logprobs_BL, None
        # Outside the nucleus 0 times -inf would be NaN. Not entr(exp(x)): its gradient is infinite there.
        finite_NV = log_softmax_NV.masked_fill(log_softmax_NV == -torch.inf, 0.0)
        return logprobs_BL, _scatter(-(log_softmax_NV.exp() * finite_NV).sum(dim=-1), batch)

    def _log_softmax(self, batch: Batch, *, model: PreTrainedModel | None = None) -> torch.Tensor:
        """[N, V] log-probs before each sampled token. No attention mask: padding stands right, attention looks left."""
        logits_BLV: torch.Tensor = (model or self.model)(input_ids=batch.ids_BL, use_cache=False).logits
        before_sampled_BL = batch.mask_BL.roll(-1, dims=1)
        logits_NV = logits_BLV[before_sampled_BL].float() / self.temperature
        if self.top_p < 1:
            outside_NV = outside_nucleus(logits_NV.detach(), self.top_p)
            # Under newer weights a token may have left the nucleus that it was sampled from: it is kept, or its
            # ratio would be 0 and its log-prob infinite.
            outside_NV.scatter_(1, batch.ids_BL[batch.mask_BL][:, None], value=False)
            logits_NV = logits_NV.masked_fill(outside_NV, -torch.inf)
        return logits_NV.log_softmax(dim=-1)

    @torch.no_grad()
    def _probe(self, samples: Sequence[Sample], *, version: int, randomness: random.Random) -> dict[str, float]:
        """Entropy, and the distance to the engine's log-probs where both had the same weights.

        Tokens of turns that this very version sampled from start to end must come out the same here: a gap beyond
        rounding means other ids, other weights or another sampling distribution. Rows with such turns go first.
        """
        candidates = sorted((row for row in samples if row.num_tokens), key=lambda row: (row.episode_id, row.index))
        randomness.shuffle(candidates)
        candidates.sort(key=lambda row: not fresh_mask(row, version).any())
        gap, num_compared, entropies = 0.0, 0, [torch.zeros(0)]
        for rows in microbatches(candidates[:NUM_PROBED], max_positions=MAX_POSITIONS):
            batch = pad(rows)
            log_softmax_NV = self._log_softmax(batch)
            gaps_N = (_of_sampled(log_softmax_NV, batch) - batch.behaviour_logprobs_BL[batch.mask_BL]).abs()
            fresh_N = torch.from_numpy(np.concatenate([fresh_mask(row, version)[row.mask_L] for row in rows]))
            gap = max([gap, *gaps_N[fresh_N].tolist()])
            num_compared += int(fresh_N.sum())
            entropies.append(torch.special.entr(log_softmax_NV.exp()).sum(dim=-1))
        entropy_N = torch.cat(entropies)
        entropy = entropy_N.mean().item() if len(entropy_N) else 0.0
        return {"logprob_gap_max": gap, "logprob_gap_tokens": float(num_compared), "entropy": entropy}

    def _prepare(self, samples: Sequence[Sample], advantages: Mapping[int, float]) -> list[TrainBatch]:
        """The rows of one optimizer step in batches that fit the memory, with anchors from the present weights."""
        prepared = []
        tokens = num_tokens_by_episode(samples)
        for rows in microbatches(samples, max_positions=MAX_POSITIONS):
            batch = pad(rows)
            if self.train.anchor == "proximal":
                with torch.no_grad():
                    anchor_BL = self.logprobs(batch)
            else:
                anchor_BL = batch.behaviour_logprobs_BL
            advantages_B = torch.tensor([advantages[row.episode_id] for row in rows], dtype=torch.float32)
            reference_BL = None
            if self.train.kl == "loss":
                with torch.no_grad():
                    reference_BL = self._reference_logprobs(batch)
            prepared.append(
                TrainBatch(
                    samples=tuple(rows),
                    batch=batch,
                    anchor_logprobs_BL=anchor_BL,
                    reference_logprobs_BL=reference_BL,
                    advantages_B=advantages_B,
                    episode_tokens_B=torch.tensor([tokens[row.episode_id] for row in rows]),
                )
            )
        return prepared

    def _update(
        self, minibatch: Sequence[TrainBatch], *, version: int, totals: StepTotals
    ) -> tuple[float, TokenStats, float]:
        """One optimizer step; returns loss, token figures and the gradient norm before clipping."""
        self.optimizer.zero_grad()
        loss, stats = 0.0, TokenStats()
        for part in minibatch:
            logprobs_BL, entropies_BL = self._logprobs_and_entropies(part.batch)
            loss_B, part_stats = policy_loss(
                logprobs_BL,
                behaviour_logprobs_BL=part.batch.behaviour_logprobs_BL,
                anchor_logprobs_BL=part.anchor_logprobs_BL,
                advantages_B=part.advantages_B,
                mask_BL=part.batch.mask_BL,
                totals=totals,
                train=self.train,
                reference_logprobs_BL=part.reference_logprobs_BL,
                entropies_BL=entropies_BL,
                episode_tokens_B=part.episode_tokens_B,
            )
            # A clipped ratio hides an infinite log-prob from the loss.
            finite_B = loss_B.isfinite() & logprobs_BL.isfinite().all(dim=1)
            wrong = {row.episode_id for row, good in zip(part.samples, finite_B, strict=True) if not good}
            if wrong:
                raise TrainingError(
                    f"step {version} -> {version + 1}: the loss is not finite in episodes {sorted(wrong)}"
                )
            total = loss_B.sum()
            total.backward()  # type: ignore[no-untyped-call]
            loss += total.item()
            stats += part_stats
        grad_norm = torch.nn.utils.clip_grad_norm_(self._trained().values(), self.train.grad_clip).item()
        if not np.isfinite(grad_norm):
            episodes = sorted({row.episode_id for part in minibatch for row in part.samples})
            raise TrainingError(
                f"step {version} -> {version + 1}: the gradient is {grad_norm} over episodes {episodes}"
            )
        self.optimizer.step()
        return loss, stats, grad_norm


def outside_nucleus(logits_NV: torch.Tensor, top_p: float) -> torch.Tensor:
    """[N, V] True outside the smallest set of likeliest tokens with at least `top_p` of the probability.

    Nucleus sampling (Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, section 3.1).
    """
    probs_NV, order_NV = logits_NV.softmax(dim=-1).sort(dim=-1, descending=True)
    outside_NV = probs_NV.cumsum(dim=-1) - probs_NV >= top_p
    return torch.empty_like(outside_NV).scatter_(1, order_NV, outside_NV)


def load_model(folder: Path) -> PreTrainedModel:
    """The model of a folder in float32. Raises SetupError that names the folder."""
    if not (folder / "config.json").is_file():
        raise SetupError(f"model folder {folder} has no config.json: set `model` to a folder of Hugging Face format")
    # stderr is the log.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise SetupError(f"model folder {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
    assert isinstance(model, PreTrainedModel)
    return model


def learning_rate(train: TrainConfig, version: int) -> float:
    """Rate of the step that trains `version`: linear warm-up to the full rate, then linear decay to half at the end."""
    if version < train.warmup_steps:
        return train.learning_rate * (version + 1) / train.warmup_steps
    decay_steps = max(train.num_versions - 1 - train.warmup_steps, 1)
    return train.learning_rate * (1 - 0.5 * (version - train.warmup_steps) / decay_steps)


def num_tokens_by_episode(samples: Sequence[Sample]) -> Counter[int]:
    """Episode id -> sampled tokens of all its rows."""
    tokens: Counter[int] = Counter()
    for sample in samples:
        tokens[sample.episode_id] += sample.num_tokens
    return tokens


def split_by_group(samples: Sequence[Sample], *, parts: int, randomness: random.Random) -> list[list[Sample]]:
    """Minibatches of whole groups, in random order; siblings stay together, and no part is empty.

    However many rows an episode gives, a step has as many minibatches, and an episode's rows are in one of them.
    """
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    shuffled = [groups[group_id] for group_id in sorted(groups)]
    randomness.shuffle(shuffled)
    split = [[sample for group in shuffled[start::parts] for sample in group] for start in range(parts)]
    return [part for part in split if part]


def _scatter(values_N: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[B, L] with the values of the sampled tokens at their places, 0 elsewhere."""
    return torch.zeros(batch.mask_BL.shape).masked_scatter(batch.mask_BL, values_N)


def _of_sampled(log_softmax_NV: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[N] the entries of the tokens that were sampled."""
    return log_softmax_NV.gather(1, batch.ids_BL[batch.mask_BL][:, None])[:, 0]
