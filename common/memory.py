"""How much memory a training step takes, told from the configuration and the model's sizes before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.config import RunConfig
from common.config_distill import DistillConfig
from common.model_folder import ModelShape, read_model_shape

FLOAT32_BYTES = 4
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers that get an adapter where the run names none: of attention and MLP in the families that renderers know."""
LOGIT_COPIES = 3
"""Alive at the peak, with entropies and top_p or without: the logits, those at the run's temperature and their
log-softmax; on the way back the log-softmax, the probabilities and the gradient."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of the trainer's tensors at the peak of a step, on one rank. Python and torch take half a GB more."""

    parameters: int
    """Those of an adapter included."""
    gradients: int
    optimizer: int
    """AdamW's two moments."""
    reference: int
    """The copy of the start weights that a KL term needs, and a teacher that is no server; 0 without."""
    activations: int
    """Of one micro-batch, kept for the backward pass."""
    logits: int
    """Of one micro-batch."""
    positions: int
    """Ids of one micro-batch, padding included."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.reference + self.activations + self.logits


def estimate_memory(config: RunConfig, shape: ModelShape) -> MemoryEstimate | None:
    """Within a third of what a decoder of the Llama kind takes; None = the folder does not say how large the model is.

    A row longer than a micro-batch is one by itself, so the longest row that the run may make counts.
    """
    if shape.num_parameters is None:
        return None
    train = config.train
    weights = trained = FLOAT32_BYTES * shape.num_parameters
    if train.lora_rank is not None:
        modules = train.lora_modules or LORA_MODULES
        trained = FLOAT32_BYTES * shape.num_adapter_parameters(train.lora_rank, modules)
        weights += trained
    longest = config.rollout.max_row_tokens or shape.context or 0
    positions = max(train.max_positions, min(longest, shape.context or longest))
    # Measured on Qwen3: inputs of the norms and projections, q, k and v before and after rotation; four of the MLP.
    of_layer = 14 * shape.hidden_size + 4 * shape.intermediate_size
    # With checkpointing each layer's input stays, and one layer is computed again at a time.
    kept = (
        shape.num_layers * shape.hidden_size + of_layer if train.gradient_checkpointing else shape.num_layers * of_layer
    )
    activation_bytes = FLOAT32_BYTES // 2 if train.dtype == "bfloat16" else FLOAT32_BYTES
    return MemoryEstimate(
        parameters=weights,
        gradients=trained,
        optimizer=2 * trained,
        # Under an adapter lie the start weights.
        reference=(0 if train.kl == "none" or train.lora_rank is not None else weights) + _teacher(train.distill),
        activations=activation_bytes * positions * kept,
        # A chunk has one position at least.
        logits=FLOAT32_BYTES
        * LOGIT_COPIES
        * min(positions * shape.vocab_size, max(train.max_logits, shape.vocab_size)),
        positions=positions,
    )


def _teacher(distill: DistillConfig | None) -> int:
    if distill is None or distill.is_server:
        return 0
    return FLOAT32_BYTES * (read_model_shape(Path(distill.teacher), field="train.distill.teacher").num_parameters or 0)
