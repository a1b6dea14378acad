"""How much memory a training step takes, told from the configuration and the model's sizes before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import RunConfig
from common.model_folder import ModelShape

MAX_POSITIONS = 4096
"""Padded positions of one forward pass; bounds the memory of its logits."""
FLOAT32_BYTES = 4
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers that get an adapter where the run names none: of attention and MLP in the families that renderers know."""
LOGIT_COPIES = 4
"""Alive at the peak: the logits, those at the run's temperature, their log-softmax, and the gradient of one of them."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of the trainer's tensors at the peak of a step, all in float32. Python and torch take half a GB more."""

    parameters: int
    """Those of an adapter included."""
    gradients: int
    optimizer: int
    """AdamW's two moments."""
    reference: int
    """The copy of the start weights that a KL term needs; 0 without."""
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
    positions = max(MAX_POSITIONS, min(longest, shape.context or longest))
    # Measured on Qwen3: inputs of the norms and projections, q, k and v before and after rotation; four of the MLP.
    floats_per_layer = 14 * shape.hidden_size + 4 * shape.intermediate_size
    return MemoryEstimate(
        parameters=weights,
        gradients=trained,
        optimizer=2 * trained,
        # Under an adapter lie the start weights.
        reference=0 if train.kl == "none" or train.lora_rank is not None else weights,
        activations=FLOAT32_BYTES * positions * shape.num_layers * floats_per_layer,
        logits=FLOAT32_BYTES * positions * shape.vocab_size * LOGIT_COPIES,
        positions=positions,
    )
