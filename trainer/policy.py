"""The policy in training: float32 weights, log-probs of given tokens, one training step. publish.py saves it.

Legend: B rows of a batch, L positions of a row, N sampled tokens of a batch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from transformers import PreTrainedModel

from common.config import RunConfig
from common.config_train import TrainConfig
from common.errors import SetupError
from trainer.checkpoint import write_whole
from trainer.kl import kl_estimate
from trainer.logprobs import TokenScorer, score_batch
from trainer.lora import adapter_parameters, with_adapter, without_adapter
from trainer.losses import StepTotals, TokenStats, needs_all_rows
from trainer.modelling import load_model, recompute_layers, set_up
from trainer.probe import probe
from trainer.ranks import AgreedSetupError, Ranks, on_all_ranks
from trainer.samples import (
    Batch,
    RowKey,
    Sample,
    deal,
    microbatches,
    num_tokens_by_episode,
    pad,
    split_by_group,
    without_sampled,
)
from trainer.schedule import learning_rate
from trainer.sharding import shard, spread_like, whole
from trainer.shards import Sharded, read_shards, write_shards
from trainer.state import check_state, places_for, put_moments, state_of
from trainer.update import prepare, refuse_infinite, update


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
        teacher: PreTrainedModel | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`reference` has the start weights; None where train.kl = "none", or where they are under an adapter.

        `teacher` is that of train.distill; None where there is none, or where it is a server.
        """
        # Without dropout: the ratio to the behaviour log-probs must be 1 where the weights are the same.
        self.model: PreTrainedModel = set_up(model, train=train).eval()
        recompute_layers(self.model)
        self.train = train
        self.seed = seed
        self.ranks = ranks or Ranks.alone()
        self._scorer = self._make_scorer(self.model, temperature=temperature, top_p=top_p)
        self.reference = self._make_frozen(reference, temperature=temperature, top_p=top_p)
        # A token outside the teacher's nucleus has a log-prob all the same, and a bad one.
        self.teacher = self._make_frozen(teacher, temperature=temperature, top_p=1.0)
        # A sharded model names its gathered copies while a pass has them; these are the ones that are trained and kept.
        self._parameters = dict(self.model.named_parameters())
        # An optimizer that knew the frozen weights would save no state for them, and miss it when it is restored.
        self.optimizer = torch.optim.AdamW(
            self.trained().values(),
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            weight_decay=train.weight_decay,
        )

    @classmethod
    def load(cls, config: RunConfig, *, ranks: Ranks | None = None) -> Self:
        """The start weights of a run, in float32, and its new adapter if it trains one; this rank's share of them.

        Raises SetupError when the folder holds no model, or none that fits the adapter.
        """
        model, train = load_model(config.model), config.train
        adapted = train.lora_rank is not None
        # Switching a sharded adapter off would also switch off its gradients: the ranks keep the start weights apart.
        under_adapter = adapted and (ranks is None or ranks.size == 1)
        distill = train.distill
        policy = cls(
            with_adapter(model, train=train, seed=config.seed) if adapted else model,
            train=train,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            seed=config.seed,
            reference=None if train.kl == "none" or under_adapter else load_model(config.model),
            teacher=None
            if distill is None or distill.is_server
            else load_model(Path(distill.teacher), field="train.distill.teacher"),
            ranks=ranks,
        )
        policy._check_fits(config.rollout.max_row_tokens or 0)
        return policy

    def _make_scorer(self, model: PreTrainedModel, *, temperature: float, top_p: float) -> TokenScorer:
        model.to(self.ranks.device)  # type: ignore[arg-type]
        scorer = TokenScorer(model, train=self.train, temperature=temperature, top_p=top_p)
        if self.ranks.size > 1:
            shard(scorer, train=self.train, ranks=self.ranks)
        return scorer

    def _make_frozen(self, model: PreTrainedModel | None, *, temperature: float, top_p: float) -> TokenScorer | None:
        if model is None:
            return None
        set_up(model, train=self.train).eval()
        return self._make_scorer(model, temperature=temperature, top_p=top_p)

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """By name: all parameters, or the adapter's where there is one."""
        return {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """[B, L] log-probs in nats of the sampled tokens at the run's temperature and top-p; 0 elsewhere."""
        return self.score(batch)[0]

    def score(self, batch: Batch, *, with_entropies: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Those, and the [B, L] entropies in nats before each of them, which are 0 where nobody asks."""
        return score_batch(self._scorer, batch, with_entropies=with_entropies)

    @on_all_ranks
    @torch.no_grad()
    def reference_kl(self, samples: Sequence[Sample]) -> dict[int, float]:
        """Episode id -> estimate of KL(behaviour || start weights) in nats, summed over the episode's tokens.

        What train.kl = "reward" takes off the reward, as in Ahmadian et al. 2024, "Back to basics", the section on
        preliminaries. An episode without tokens is not in it.
        """
        by_episode: dict[int, float] = {}
        for rows in self.microbatches([row for row in samples if row.num_tokens]):
            batch = pad(rows)
            estimate_BL = kl_estimate(
                batch.behaviour_logprobs_BL, self.reference_logprobs(batch), estimator=self.train.kl_estimator
            )
            # Both arguments are 0 outside the mask, and so is each estimate.
            for row, kl in zip(rows, estimate_BL.sum(dim=1).tolist(), strict=True):
                by_episode[row.episode_id] = by_episode.get(row.episode_id, 0.0) + kl
        total: Counter[int] = Counter()
        for part in self.ranks.gather(by_episode):
            total.update(part)
        return dict(total)

    @on_all_ranks
    @torch.no_grad()
    def teacher_logprobs(self, samples: Sequence[Sample]) -> dict[RowKey, np.ndarray]:
        """[L] float32 log-probs in nats of the teacher in the trainer, by row; 0 where nothing was sampled."""
        assert self.teacher is not None, "there is no teacher, or it is a server"
        scored: dict[RowKey, np.ndarray] = {}
        for rows in self.microbatches(samples):
            logprobs_BL = score_batch(self.teacher, pad(rows))[0].numpy()
            for row, logprobs_L in zip(rows, logprobs_BL, strict=True):
                # What an idle rank passes has no sampled tokens, and another row's key.
                if row.num_tokens:
                    scored[row.key] = logprobs_L[: len(row.ids_L)]
        return {key: logprobs_L for part in self.ranks.gather(scored) for key, logprobs_L in part.items()}

    @on_all_ranks
    def train_step(
        self, samples: Sequence[Sample], advantages: Mapping[int, float], *, version: int
    ) -> dict[str, float]:
        """Turn policy `version` into version + 1; `advantages` are by episode id. Returns the step's metrics.

        Rows with advantage 0 count in the loss's divisor. Where they have no gradient (losses.needs_all_rows) they are
        not computed.
        Raises TrainingError when a number is not finite. Advantages, anchors and the start weights' log-probs are
        looked at before the weights change; a loss and a gradient before the optimizer step of their minibatch. From
        the second minibatch on the weights are then those of no version: the process must end, and its successor
        replays the step from the checkpoint. To see all losses first would take another pass over all rows.
        """
        randomness = random.Random(f"{self.seed}:{version}")
        found = probe(self, samples, version=version, randomness=randomness)
        with_tokens = [sample for sample in samples if sample.num_tokens]
        all_rows = needs_all_rows(self.train)
        kept = [sample for sample in with_tokens if all_rows or advantages[sample.episode_id] != 0]
        minibatches = [
            prepare(self, part, advantages)
            for part in split_by_group(kept, parts=self.train.minibatches, randomness=randomness)
        ]
        refuse_infinite(self, minibatches, version=version)
        rate = learning_rate(self.train, version)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        tokens = num_tokens_by_episode(with_tokens)
        totals = StepTotals(num_tokens=tokens.total(), num_episodes=len(tokens))
        loss, stats, grad_norms = 0.0, TokenStats(), [0.0]
        for minibatch in minibatches:
            minibatch_loss, minibatch_stats, grad_norm = update(self, minibatch, version=version, totals=totals)
            loss += minibatch_loss
            stats += minibatch_stats
            grad_norms.append(grad_norm)
        return {
            **found,
            "loss": loss,
            "grad_norm": max(grad_norms),
            "learning_rate": rate,
            "num_updates": float(len(minibatches)),
            **stats.metrics(),
        }

    def state(self) -> dict[str, torch.Tensor]:
        """Trained weights and optimizer state by name; with the start weights, the whole of what a checkpoint needs.

        Where there are several ranks, this one's part of each.
        """
        return state_of(self.trained(), self.optimizer)

    @on_all_ranks
    def write_state(self, folder: Path, owner: Mapping[str, str] | None = None) -> None:
        """Fill the folder of a checkpoint: with one file, or with a part from each rank.

        Raises SetupError on all ranks if one of them cannot write.
        """
        if self.ranks.size == 1:
            write_whole(self.state(), folder, owner=owner)
        else:
            write_shards(self.state(), folder, owner=owner, ranks=self.ranks)

    @on_all_ranks
    def weights(self) -> dict[str, torch.Tensor] | None:
        """Trained weights by the model's names, on rank 0; None = the model itself has them whole."""
        if self.ranks.size == 1:
            return None
        buffers = {name: value for name, value in self.model.named_buffers() if name in self.model.state_dict()}
        return self._collected(self.trained() | buffers)

    def _collected(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        collected = {}
        for name, tensor in tensors.items():
            value = whole(tensor.detach())
            if self.ranks.rank == 0:
                collected[name] = value.cpu()
        return collected

    def published_state(self, folder: Path) -> dict[str, torch.Tensor]:
        """The weights of a published version as `state` names them, without optimizer state."""
        if self.train.lora_rank is not None:
            return {f"model.{name}": tensor for name, tensor in adapter_parameters(folder).items()}
        return {f"model.{name}": parameter.detach() for name, parameter in load_model(folder).named_parameters()}

    def restore(
        self, state: Mapping[str, torch.Tensor] | Sharded, *, weights: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Put back what `write_state` wrote, on any number of ranks; `weights` are taken instead of its own.

        Raises SetupError when it belongs to another model, before the ranks meet, or cannot be read.
        """
        found = state.tensors if isinstance(state, Sharded) else state
        taken = {name: tensor for name, tensor in found.items() if weights is None or not name.startswith("model.")}
        stored, whole_ones = None, dict(weights or {})
        if isinstance(state, Sharded):
            stored = Sharded(folder=state.folder, tensors=taken)
        else:
            whole_ones |= taken
        check_state({**whole_ones, **taken}, self.trained())
        shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in whole_ones.items()}
        with self.ranks.naming_lost():
            self.ranks.call("take_state", shapes, stored)
            self.take_state(whole_ones, stored)

    def take_state(self, tensors: Mapping[str, torch.Tensor], stored: Sharded | None) -> None:
        """This rank's part of `restore`; only rank 0 need have the values of `tensors`. `stored` is read by all."""
        parameters = self.trained()
        places = places_for({**tensors, **(stored.tensors if stored else {})}, parameters)
        for name, tensor in tensors.items():
            places[name].copy_(spread_like(places[name], self.ranks.spread(tensor)))
        if stored is not None:
            read_shards({name: places[name] for name in stored.tensors}, stored.folder, ranks=self.ranks)
        put_moments(places, parameters, self.optimizer)

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """[B, L] log-probs in nats by the start weights, at the same temperature and top-p; 0 elsewhere."""
        if self.reference is None:
            with without_adapter(self.model):
                return self.score(batch)[0]
        return score_batch(self.reference, batch)[0]

    def microbatches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """This rank's rows in batches that fit the memory, as many on each rank, which meet in every pass.

        A rank that has fewer passes a row without sampled tokens, which has no loss and a gradient of zero.
        Raises AgreedSetupError when a row of any of them is too long for train.max_logits.
        """
        try:
            self._check_fits(max((len(row.ids_L) for row in samples), default=0))
        except SetupError as error:
            raise AgreedSetupError(str(error)) from None
        by_rank = [
            microbatches(rows, max_positions=self.train.max_positions, packing=self.train.packing)
            for rows in deal(samples, parts=self.ranks.size)
        ]
        num_idle = max(map(len, by_rank)) - len(by_rank[self.ranks.rank])
        return by_rank[self.ranks.rank] + [[without_sampled(samples[0])] for _ in range(num_idle)]

    def _check_fits(self, positions: int) -> None:
        for scorer in (self._scorer, self.reference, self.teacher):
            if scorer is not None:
                scorer.check_fits(positions)
