"""Log-probs and entropies of the sampled tokens, with the logits of a bounded number of positions at a time.

Legend: B rows of a batch, L positions of a row, N sampled tokens of a batch, C those of a chunk, H hidden size,
V vocabulary.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from common.config_train import TrainConfig
from common.errors import SetupError
from trainer.modelling import as_single_rows, autocast, base_of, packed_arguments, vocabulary_size
from trainer.samples import Batch
from trainer.start_check import check_rows_apart, head_is_last
from trainer.token_scores import token_scores


class TokenScorer(torch.nn.Module):
    """The model with its last step, from hidden states to log-probs, in pieces that fit `train.max_logits`.

    A module of its own, so that sharding it gathers the head's weights for that step too.
    """

    def __init__(self, model: PreTrainedModel, *, train: TrainConfig, temperature: float, top_p: float) -> None:
        """`model` is whole and on its device. It may carry an adapter, also on its head; tied or not, both do.

        Raises SetupError where it cannot be scored as `train` says.
        """
        super().__init__()
        self.model = model
        self._train = train
        self._temperature = temperature
        self._top_p = top_p
        self._device = next(model.parameters()).device
        check_rows_apart(model, train=train)
        with as_single_rows(model, train=train):
            self._head_is_last = head_is_last(model)
        self.check_fits(train.max_positions)

    def forward(self, batch: Batch, *, with_entropies: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[N] log-probs in nats of the sampled tokens at the run's temperature and top-p; [N] entropies before each.

        On the model's device. More than max_logits are never there at once: then they are computed in chunks, and again
        for the backward pass, so that not even their gradients exist together.
        """
        batch = batch.to(self._device)
        before_sampled_BL = batch.mask_BL.roll(-1, dims=1)
        ids_N = batch.ids_BL[batch.mask_BL]
        with autocast(self._train, device=self._device):
            if self._positions(batch) * vocabulary_size(self.model) <= self._train.max_logits:
                logprobs_N, entropies_N = self._score(self._logits(batch, before_sampled_BL), ids_N, with_entropies)
            else:
                logprobs_N, entropies_N = self._in_chunks(batch, before_sampled_BL, ids_N, with_entropies)
        return logprobs_N, entropies_N if with_entropies else None

    def check_fits(self, positions: int) -> None:
        """Raise SetupError when a pass of so many positions needs chunks and the model cannot be computed in chunks."""
        needed = positions * vocabulary_size(self.model)
        if needed > self._train.max_logits and not self._head_is_last:
            raise SetupError(
                f"train.max_logits = {self._train.max_logits} is less than a pass of {positions} positions needs, and "
                f"{type(base_of(self.model)).__name__} cannot be computed in chunks, as its logits are not simply its "
                f"head over its hidden states: raise max_logits to {needed}, or let passes be smaller by "
                "train.max_positions and rollout.max_row_tokens"
            )

    def _positions(self, batch: Batch) -> int:
        return int(batch.lengths_B.sum()) if self._train.packing else batch.ids_BL.numel()

    def _logits(self, batch: Batch, at_BL: torch.Tensor) -> torch.Tensor:
        """[N, V] at some positions, from all logits."""
        if self._train.packing:
            packed = packed_arguments(batch, train=self._train)
            logits_PV: torch.Tensor = self.model(**packed, use_cache=False).logits[0]
            return logits_PV[at_BL[batch.real_BL]]
        # No attention mask: padding stands right, attention looks left.
        logits_BLV: torch.Tensor = self.model(input_ids=batch.ids_BL, use_cache=False).logits
        return logits_BLV[at_BL]

    def _in_chunks(
        self, batch: Batch, at_BL: torch.Tensor, ids_N: torch.Tensor, with_entropies: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.check_fits(self._positions(batch))
        base = base_of(self.model)
        decoder, head = base.get_decoder(), base.get_output_embeddings()
        if self._train.packing:
            packed = packed_arguments(batch, train=self._train)
            hidden_NH = decoder(**packed, use_cache=False).last_hidden_state[0][at_BL[batch.real_BL]]
        else:
            hidden_NH = decoder(input_ids=batch.ids_BL, use_cache=False).last_hidden_state[at_BL]

        def score(hidden_CH: torch.Tensor, ids_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self._score(head(hidden_CH), ids_C, with_entropies)

        size = max(self._train.max_logits // vocabulary_size(self.model), 1)
        parts = [
            checkpoint(score, hidden_CH, ids_C, use_reentrant=False, preserve_rng_state=False)
            for hidden_CH, ids_C in zip(torch.split(hidden_NH, size), torch.split(ids_N, size), strict=True)
        ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score(
        self, logits_CV: torch.Tensor, ids_C: torch.Tensor, with_entropies: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[C] log-probs, and [C] entropies, which are empty where nobody asks for them."""
        return token_scores(
            logits_CV, ids_C, temperature=self._temperature, top_p=self._top_p, with_entropies=with_entropies
        )


def score_batch(
    scorer: TokenScorer, batch: Batch, *, with_entropies: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, L] log-probs of the sampled tokens, and entropies before each, in nats; 0 elsewhere, or if not asked for.

    They are where the batch is, however large the model and wherever it is: they are few.
    """
    logprobs_N, entropies_N = scorer(batch, with_entropies=with_entropies)
    zeros_BL = torch.zeros(batch.mask_BL.shape)
    logprobs_BL = zeros_BL.masked_scatter(batch.mask_BL, logprobs_N.cpu())
    return logprobs_BL, zeros_BL if entropies_N is None else zeros_BL.masked_scatter(batch.mask_BL, entropies_N.cpu())
