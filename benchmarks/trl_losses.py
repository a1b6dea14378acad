"""The same rows through TRL's loss, for trainer_check.py: an implementation by other people.

TRL's trainer computes the loss in one method; here it is called with what it reads of its trainer, and no model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from benchmarks.objectives import Computed, Row, gradients

MAX_TOKENS = 32
"""The constant of Dr. GRPO."""
KL = {"kl": "loss", "kl_coefficient": 0.1, "kl_estimator": "k3"}

CASES: dict[str, tuple[dict[str, object], dict[str, Any]]] = {
    "grpo": ({"clip_high": 0.2, "dual_clip": 1e9, "average": "episode"}, {"loss_type": "grpo", "epsilon_high": 0.2}),
    "grpo with kl": ({"average": "episode", "dual_clip": 1e9} | KL, {"loss_type": "grpo", "beta": 0.1}),
    "dr_grpo": (
        {"average": "constant", "divisor_tokens": MAX_TOKENS, "dual_clip": 1e9},
        {"loss_type": "dr_grpo"},
    ),
    "dapo": ({"dual_clip": 1e9}, {"loss_type": "dapo"}),
    "dapo with dual clip": ({"dual_clip": 1.4}, {"loss_type": "dapo", "delta": 1.4}),
    "dapo with kl": ({"dual_clip": 1e9} | KL, {"loss_type": "dapo", "beta": 0.1}),
    "dapo with entropy": ({"dual_clip": 1e9, "entropy_coefficient": 0.05}, {"loss_type": "dapo", "entropy_coef": 0.05}),
    "gspo": (
        {"loss": "gspo", "average": "episode", "clip_low": 0.02, "clip_high": 0.03, "dual_clip": 1e9},
        {"loss_type": "grpo", "level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03},
    ),
    "cispo": ({"loss": "cispo", "clip_low": 1.0, "clip_high": 0.28}, {"loss_type": "cispo", "epsilon_high": 1.28}),
}
"""Name -> (our fields, TRL's)."""


def trl_loss(
    rows: Sequence[Row],
    *,
    loss_type: str,
    level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.28,
    delta: float | None = None,
    beta: float = 0.0,
    entropy_coef: float = 0.0,
) -> Computed:
    """Loss and gradients by TRL, with the log-probs of the anchor as the old ones. Rows must have sampled tokens."""
    for row in rows:
        row.logprobs_L.grad = row.entropies_L.grad = None
    length = max(len(row) for row in rows)

    def padded(name: str) -> torch.Tensor:
        # TRL multiplies with the mask: what is outside must be finite.
        parts = [torch.where(row.mask_L, getattr(row, name), 0.0) for row in rows]
        return torch.stack([torch.nn.functional.pad(part, (0, length - len(part))) for part in parts])

    mask_BL = torch.stack([torch.nn.functional.pad(row.mask_L, (0, length - len(row))) for row in rows]).float()
    trainer = _trainer(
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
        beta=beta,
        entropy_coef=entropy_coef,
        epsilon_high=epsilon_high,
        epsilon_low=epsilon_low,
        importance_sampling_level=level,
        loss_type=loss_type,
        _entropy_bonus_enabled=entropy_coef > 0,
        _get_per_token_logps_and_entropies=lambda *_, **__: (padded("logprobs_L"), padded("entropies_L"), None),
    )
    ids_BL = torch.zeros(mask_BL.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids_BL[:, :1],
        "prompt_mask": ids_BL[:, :1] + 1,
        "completion_ids": ids_BL,
        "completion_mask": mask_BL,
        "advantages": torch.tensor([row.advantage for row in rows]),
        "old_per_token_logps": padded("anchor_L"),
        "ref_per_token_logps": padded("reference_L"),
        "num_items_in_batch": mask_BL.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return Computed(loss=loss.detach(), gradients=gradients(rows))


def _trainer(**fields: object) -> SimpleNamespace:
    """What the loss reads of TRL's trainer: the given fields, one process, one batch a step, no model."""
    return SimpleNamespace(
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda values: values,
            reduce=lambda values, reduction: values,
            sync_gradients=True,
        ),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
        use_vllm=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        **fields,
    )
