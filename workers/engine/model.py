"""Qwen3's forward pass over a KV cache with one slot a request, in float32; its logits go to `sampling`.

Written out instead of calling transformers, whose bookkeeping would cost far more than the products of so small
a model. tests/unit/workers/engine/test_parity.py holds it to transformers' log-probs.

Shapes: N requests, T positions, D hidden size, A query heads, K key-value heads, H head size, V vocabulary,
L layers, S slots, C positions a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from workers.engine.checkpoint import num_kv_heads


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer's weights, with the products over one input fused into one matrix."""

    attention_norm_D: Tensor
    qkv: Tensor
    """((A + 2K) * H, D)"""
    qkv_bias: Tensor | None
    """((A + 2K) * H,); None in models without attention biases, as all Qwen3 releases."""
    qk_norm: Tensor
    """(A + K, H): the query norm for A heads, then the key norm for K heads."""
    out: Tensor
    """(D, A * H)"""
    out_bias: Tensor | None
    mlp_norm_D: Tensor
    gate_up: Tensor
    """(2 * intermediate, D)"""
    down: Tensor
    """(D, intermediate)"""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """All weights of one policy version, ready for the forward pass; replaced as a whole, never written to."""

    embedding_VD: Tensor
    layers: tuple[Layer, ...]
    norm_D: Tensor
    head_VD: Tensor
    """The embedding itself where they are tied."""


def fuse(config: Qwen3Config, tensors: dict[str, Tensor]) -> Weights:
    """Build the weights from a checkpoint's tensors (see `checkpoint.read_tensors`)."""
    embedding_VD = tensors["model.embed_tokens.weight"]
    return Weights(
        embedding_VD=embedding_VD,
        layers=tuple(
            _fuse_layer(config, tensors, f"model.layers.{index}.") for index in range(config.num_hidden_layers)
        ),
        norm_D=tensors["model.norm.weight"],
        head_VD=embedding_VD if config.tie_word_embeddings else tensors["lm_head.weight"],
    )


def _fuse_layer(config: Qwen3Config, tensors: dict[str, Tensor], prefix: str) -> Layer:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    biased = config.attention_bias
    norms = [tensors[f"{attention}q_norm.weight"]] * config.num_attention_heads
    norms += [tensors[f"{attention}k_norm.weight"]] * num_kv_heads(config)
    return Layer(
        attention_norm_D=tensors[f"{prefix}input_layernorm.weight"],
        qkv=torch.cat([tensors[f"{attention}{name}_proj.weight"] for name in "qkv"]),
        qkv_bias=torch.cat([tensors[f"{attention}{name}_proj.bias"] for name in "qkv"]) if biased else None,
        qk_norm=torch.stack(norms),
        out=tensors[f"{attention}o_proj.weight"],
        out_bias=tensors[f"{attention}o_proj.bias"] if biased else None,
        mlp_norm_D=tensors[f"{prefix}post_attention_layernorm.weight"],
        gate_up=torch.cat([tensors[f"{mlp}{name}_proj.weight"] for name in ("gate", "up")]),
        down=tensors[f"{mlp}down_proj.weight"],
    )


class Model:
    """Weights and KV cache. Slots 0..N-1 belong to the N requests of the batch, in the batch's order."""

    def __init__(self, config: Qwen3Config, weights: Weights, *, num_slots: int, max_model_len: int) -> None:
        self.weights = weights
        self.vocab_size: int = config.vocab_size
        self.max_model_len = max_model_len
        self.num_slots = num_slots
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads = num_kv_heads(config)
        self._head_size: int = config.head_dim
        self._eps: float = config.rms_norm_eps
        shape = (config.num_hidden_layers, num_slots, self._num_kv_heads, max_model_len, self._head_size)
        # Zeros, not empty: masked positions are multiplied by 0, and 0 times a stray NaN would be NaN.
        self._keys = torch.zeros(shape)
        """(L, S, K, C, H)"""
        self._values = torch.zeros(shape)
        positions_1C = torch.arange(max_model_len)[None]
        cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions_1C)
        self._cos_CH: Tensor = cos[0]
        self._sin_CH: Tensor = sin[0]

    def prefill(self, slots: list[int], ids: list[list[int]], *, weights: Weights) -> None:
        """Write the keys and values of whole sequences from position 0; `ids[i]` goes to `slots[i]`.

        Shorter sequences are padded on the right, where causal attention never looks back at the padding and
        decoding overwrites it.
        """
        length = max(map(len, ids))
        slots_N = torch.tensor(slots)
        ids_NT = torch.tensor([sequence + [0] * (length - len(sequence)) for sequence in ids])
        cos, sin = self._cos_CH[:length, None], self._sin_CH[:length, None]
        x_NTD = F.embedding(ids_NT, weights.embedding_VD)
        for index, layer in enumerate(weights.layers):
            q, k, v = self._project(layer, x_NTD, cos, sin)
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            self._keys[index][slots_N, :, :length] = k
            self._values[index][slots_N, :, :length] = v
            # Nothing reads the last layer's output: the first new token comes out of `decode`.
            if index < len(weights.layers) - 1:
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                x_NTD = self._finish(layer, x_NTD, mixed.transpose(1, 2).flatten(2))

    def decode(self, slots: list[int], ids: list[int], positions: list[int], *, weights: Weights) -> Tensor:
        """Logits (N, V) after one more token in these slots: `ids[i]` stands at `positions[i]` of `slots[i]`.

        All earlier positions of these slots must have been written. It is faster where they are 0..N-1.
        """
        num_rows, length = len(ids), max(positions) + 1
        rows_N, positions_N = torch.tensor(slots), torch.tensor(positions)
        # Seen in place where it can be: picked rows are a copy of the cache.
        seen = slice(num_rows) if slots == list(range(num_rows)) else rows_N
        hidden = torch.arange(length) > positions_N[:, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None]
        cos, sin = self._cos_CH[positions_N, None], self._sin_CH[positions_N, None]
        x_ND = F.embedding(torch.tensor(ids), weights.embedding_VD)
        for index, layer in enumerate(weights.layers):
            q, k, v = self._project(layer, x_ND, cos, sin)
            keys, values = self._keys[index], self._values[index]
            keys[rows_N, :, positions_N] = k
            values[rows_N, :, positions_N] = v
            # Query heads that share a key head become its query positions: no copy of the cache is made for it.
            mixed = F.scaled_dot_product_attention(
                q.view(num_rows, self._num_kv_heads, -1, self._head_size),
                keys[seen, :, :length],
                values[seen, :, :length],
                attn_mask=mask,
            )
            x_ND = self._finish(layer, x_ND, mixed.flatten(1))
        return F.linear(self._norm(x_ND, weights.norm_D), weights.head_VD)

    def move(self, source: int, target: int, *, length: int) -> None:
        """Copy the first `length` positions of a slot to another, so that the batch stays without holes."""
        for cache in (self._keys, self._values):
            cache[:, target, :, :length] = cache[:, source, :, :length]

    def _project(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (..., A, H), keys and values (..., K, H) of x (..., D); queries and keys normed and rotated."""
        num_normed = self._num_heads + self._num_kv_heads
        qkv = F.linear(self._norm(x, layer.attention_norm_D), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(*x.shape[:-1], -1, self._head_size)
        qk = F.rms_norm(qkv[..., :num_normed, :], (self._head_size,), None, self._eps) * layer.qk_norm
        first, second = qk.chunk(2, dim=-1)
        qk = qk * cos + torch.cat((-second, first), dim=-1) * sin
        return qk[..., : self._num_heads, :], qk[..., self._num_heads :, :], qkv[..., num_normed:, :]

    def _finish(self, layer: Layer, x: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output for its input x (..., D) and its attention's output (..., A * H)."""
        x = x + F.linear(mixed, layer.out, layer.out_bias)
        gate, up = F.linear(self._norm(x, layer.mlp_norm_D), layer.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, layer.down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)
