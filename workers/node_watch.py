"""Which nodes are gone for good: those that a reaper has itself found silent for long enough, without a break."""

from __future__ import annotations

from collections.abc import Mapping


class NodeWatch:
    """One reaper's memory of silent nodes.

    Its own and not a time in Postgres, so that what was down together, this process too, may come back together.
    """

    def __init__(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._silent_since: dict[str, float] = {}

    def lost(self, silent: Mapping[str, int], now_s: float) -> dict[str, int]:
        """Those of the nodes that are silent now which have been so for `lost_after_s`; `now_s` is monotonic."""
        self._silent_since = {node: self._silent_since.get(node, now_s) for node in silent}
        return {node: silent[node] for node, since in self._silent_since.items() if now_s - since >= self._lost_after_s}
