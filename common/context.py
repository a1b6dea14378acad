"""How long a context a run needs of its engines: `rollmill engine add`, `serve` and the keepers refuse shorter ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.errors import SetupError
from common.model_folder import read_context

SMALL_ENGINE_CONTEXT = 4096
"""Ids of the small engine's context where it is not told, if the model has as many positions."""


@dataclass(frozen=True, kw_only=True)
class NeededContext:
    """An engine with less would cut rows that the run lets go on, and the rewards of what it cut would be trained."""

    num_ids: int
    why: str
    """Where the number comes from."""

    def lack(self, held: int | None) -> str | None:
        """What is wrong with a context of `held` ids, and what to do; None = nothing, or it is not known (None)."""
        if held is None or held >= self.num_ids:
            return None
        return (
            f"has a context of {held} ids and the run needs {self.num_ids}, {self.why}: it would cut episodes. Start "
            f"it with --max-model-len {self.num_ids}, or set rollout.max_row_tokens to {held} or less in a new run"
        )


def needed_context(model: Path, max_row_tokens: int | None) -> NeededContext | None:
    """What a run of this model and this `rollout.max_row_tokens` needs; None = its model folder does not say."""
    if max_row_tokens is not None:
        return NeededContext(num_ids=max_row_tokens, why="its rollout.max_row_tokens")
    try:
        context = read_context(model)
    except SetupError:
        # On this machine it may not lie, or not yet.
        return None
    return None if context is None else NeededContext(num_ids=context, why=f"the context of model {model}")
