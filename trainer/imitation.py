"""A policy that learns to say given rows: supervised training on the rows, passes and ranks of the policy in training.

Legend: B rows of a batch, L positions of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel

from common.config import RunConfig
from common.errors import SetupError
from trainer.lora import with_adapter
from trainer.modelling import load_model
from trainer.policy import Policy
from trainer.ranks import on_all_ranks
from trainer.samples import RowKey, Sample, pad
from trainer.sft_rows import WeightedRow
from trainer.sharding import whole
from trainer.update import TrainingError

MUON_LEARNING_RATE = 0.02
"""Of the matrices; train.learning_rate is that of the rest."""


class Imitator(Policy):
    """A policy whose loss is the negative log-likelihood of rows, each token by its weight."""

    muon: torch.optim.Optimizer | None = None
    """Has the matrices where it is there; `optimizer` has what remains."""

    def add_muon(self) -> None:
        """Train the matrices with Muon, and only embedding, head and norms with AdamW.

        Muon orthogonalises each update (Jordan et al. 2024, "Muon: an optimizer for hidden layers"); Adam alone leaves
        a two-layer policy without the copying circuit for far longer than a minute. Raises SetupError for an adapter
        and for several ranks: it needs whole matrices, of which an adapter has only thin factors.
        """
        if self.train.lora_rank is not None or self.ranks.size > 1:
            raise SetupError("--optimizer muon trains whole matrices: not with --lora-rank, nor on several ranks")
        head = self.model.get_output_embeddings()
        ends = {id(self.model.get_input_embeddings().weight), id(head.weight)}
        trained = self.trained().values()
        matrices = [parameter for parameter in trained if parameter.ndim == 2 and id(parameter) not in ends]
        rest = [parameter for parameter in trained if parameter.ndim != 2 or id(parameter) in ends]
        self.muon = torch.optim.Muon(
            matrices, lr=MUON_LEARNING_RATE, momentum=0.95, weight_decay=0.0, adjust_lr_fn="original"
        )
        betas = (self.train.beta1, self.train.beta2)
        self.optimizer = torch.optim.AdamW(rest, lr=self.train.learning_rate, betas=betas, weight_decay=0.0)

    @on_all_ranks
    def imitate(self, rows: Sequence[WeightedRow], *, step: int, rate_share: float = 1.0) -> tuple[float, float]:
        """One optimizer step on all the rows; their loss in nats, and the gradient norm before clipping.

        `rate_share` multiplies the learning rates. Raises TrainingError before the weights change when a loss or a
        gradient is not finite.
        """
        optimizers: list[torch.optim.Optimizer] = [self.optimizer]
        self.optimizer.param_groups[0]["lr"] = self.train.learning_rate * rate_share
        if self.muon is not None:
            self.muon.param_groups[0]["lr"] = MUON_LEARNING_RATE * rate_share
            optimizers.append(self.muon)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss, wrong = 0.0, set[RowKey]()
        for samples, loss_B in self._losses(rows):
            wrong |= {row.key for row, good in zip(samples, loss_B.isfinite(), strict=True) if not good}
            total = loss_B.sum()
            total.backward()
            loss += total.item()
        # Each rank must come to the same end: one that raised alone would leave the others in a collective.
        losses, wrong_of_ranks = zip(*self.ranks.gather((loss, wrong)), strict=True)
        if keys := set[RowKey]().union(*wrong_of_ranks):
            named = sorted({row.where for row in rows if row.sample.key in keys})
            raise TrainingError(f"step {step}: the loss is not finite in {', '.join(named)}")
        clipped = torch.nn.utils.clip_grad_norm_(self.trained().values(), self.train.grad_clip)
        grad_norm = whole(clipped).item()
        if not math.isfinite(grad_norm):
            raise TrainingError(f"step {step}: the gradient is {grad_norm} over {rows[0].where} and others")
        for optimizer in optimizers:
            optimizer.step()
        return sum(losses), grad_norm

    @on_all_ranks
    @torch.no_grad()
    def imitation_loss(self, rows: Sequence[WeightedRow]) -> float:
        """The loss of rows in nats per unit of weight, without learning them."""
        loss = math.fsum(loss_B.sum().item() for _, loss_B in self._losses(rows))
        return math.fsum(self.ranks.gather(loss))

    def _losses(self, rows: Sequence[WeightedRow]) -> Iterator[tuple[list[Sample], torch.Tensor]]:
        """This rank's passes: their rows, and [B] losses that are divided by the weights of all `rows`.

        So their sum is the same however the rows are split.
        """
        total = math.fsum(row.weights_L.sum(dtype=np.float64) for row in rows)
        weights = {row.sample.key: row.weights_L for row in rows}
        for samples in self.microbatches([row.sample for row in rows]):
            batch = pad(samples)
            shares_BL = np.zeros(batch.mask_BL.shape, dtype=np.float32)
            for row, sample in enumerate(samples):
                # What an idle rank passes is a row's first position.
                end = len(sample.ids_L)
                shares_BL[row, :end] = weights[sample.key][:end] / total
            yield samples, -(self.score(batch)[0] * torch.from_numpy(shares_BL)).sum(dim=1)

    def finished(self, config: RunConfig, *, dtype: torch.dtype) -> PreTrainedModel:
        """As rank 0: the trained model, whole, its adapter merged, in `dtype`. It takes the policy's memory with it.

        `config` is what the policy was loaded from. Raises SetupError when a weight is too large for `dtype`.
        """
        weights = self.weights()
        model = self.model
        if weights is not None:
            model = load_model(config.model)
            if self.train.lora_rank is not None:
                model = with_adapter(model, train=self.train, seed=config.seed)
            unexpected = model.load_state_dict(weights, strict=False).unexpected_keys
            assert not unexpected, f"the model has no {unexpected}"
        if self.train.lora_rank is not None:
            model = cast(PreTrainedModel, model.merge_and_unload())  # type: ignore[operator]
        model.to(dtype)  # type: ignore[arg-type]
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                raise SetupError(f"{name} has weights that {dtype} cannot hold: take --dtype float32 or bfloat16")
        return model
