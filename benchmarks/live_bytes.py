"""Counts the memory of tensors on the CPU, where torch keeps no figures of it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within the block: `live` bytes of all tensors made there that still live, and their `peak`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's base has no types
        self.live = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for tensor in tree_leaves(outputs):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in known:
                storage = tensor.untyped_storage()
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return outputs

    def _add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)
