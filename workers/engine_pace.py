"""How long an engine takes for its answers, learned from them; the pool weighs load by it when it chooses an engine.

After the peak-EWMA balancer of Twitter's Finagle (cost = average latency times load, with an average that time wears
off), with latency per sampled token, which the vLLM paper calls normalized latency (Kwon et al. 2023, section 6.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

TRUST_S = 4.0
"""Of requests under way, after which their answers count half: those of one moment all met the same weather."""
DECAY_S = 20.0
"""Time in which answers come to weigh 1/e, and what is known of an engine with nothing to do, too."""
REQUEST_TOKENS = 16
"""What a request costs beside its tokens, in tokens: short answers do not make an engine slow."""
FORGOTTEN = 1e-6
"""Answers, so far worn off, that count no more."""
QUICK_S = 0.2
"""Quicker answers count as this: what is below is a matter of this process, which has thousands under way."""
OVERDUE = 4
"""How many times as long as it may take at most a request is without answer when the engine counts as slow for it."""
ALIKE = 1.5
"""Engines that take less than this times as long as the fastest are as good: noise must not decide for good."""


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A request without an answer."""

    at: float
    """Of the pool's clock."""
    max_tokens: int


class Pace:
    """Of one engine, as this process sees it: the engine's speed, its load by others and the way there in one."""

    def __init__(self) -> None:
        # Answers, their seconds and their tokens, each worn off by time. Long answers weigh more than short ones.
        self._num = 0.0
        self._seconds = 0.0
        self._tokens = 0.0
        self._watched_s = 0.0
        """Time with requests under way, worn off as well."""
        self._worn_at = 0.0
        self._open: dict[str, _Asked] = {}
        """By the request's id, the oldest first."""

    def asked(self, request_id: str, *, max_tokens: int, now: float) -> None:
        """A request is on its way."""
        if not self._open:
            self._wear(now)
        self._open[request_id] = _Asked(at=now, max_tokens=max_tokens)

    def ended(self, request_id: str, *, num_sampled: int, now: float) -> None:
        """It has its answer; `num_sampled` 0 = it failed or was aborted, which says nothing of the pace."""
        asked = self._open.pop(request_id, None)
        if asked is None or not num_sampled:
            self._worn_at = now  # A slow engine that hung for minutes is not forgotten for that.
            return
        watched_s = now - self._worn_at
        self._wear(now)
        self._watched_s += watched_s
        self._num += 1
        self._seconds += max(now - asked.at, QUICK_S)
        self._tokens += num_sampled + REQUEST_TOKENS

    @property
    def doubted(self) -> float:
        """Seconds per token, the longer the fewer answers there were: one lucky answer is no measure for all others."""
        return self._seconds / self._tokens * (1 + 1 / self._num) if self._num else math.inf

    def slowness(self, fastest: float, now: float) -> float:
        """How many times as long as the fastest it takes, at least 1; `fastest` = seconds per token.

        Without answers, and again when it had nothing to do for a while, it counts as the fastest until it proves
        otherwise: so a new engine gets work, and one that was slow is tried again.
        """
        if fastest == math.inf:
            return 1.0
        watched_s = self._watched_s if self._open else self._watched_s * self._kept(now)
        learned = self._seconds / self._tokens if self._num else fastest
        pace = fastest + (learned - fastest) * watched_s / (watched_s + TRUST_S)
        if self._open:
            oldest = next(iter(self._open.values()))
            pace = max(pace, (now - oldest.at) / (oldest.max_tokens + REQUEST_TOKENS) / OVERDUE)
        ratio = pace / fastest
        return ratio if ratio >= ALIKE else 1.0

    def _kept(self, now: float) -> float:
        return math.exp((self._worn_at - now) / DECAY_S)

    def _wear(self, now: float) -> None:
        kept = self._kept(now) if self._num > FORGOTTEN else 0.0
        self._worn_at = now
        self._num *= kept
        self._seconds *= kept
        self._tokens *= kept
        self._watched_s *= kept


def slownesses(paces: Mapping[str, Pace], now: float) -> dict[str, float]:
    """How many times as long as the fastest of them each engine takes. Costs their number."""
    fastest = min((pace.doubted for pace in paces.values()), default=math.inf)
    return {url: pace.slowness(fastest, now) for url, pace in paces.items()}
