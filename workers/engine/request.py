"""One request on its way through the batch, and what is handed back when it leaves."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum

from workers.engine.adapters import Adapter
from workers.engine.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a request left the batch."""

    STOP = "stop"
    """It sampled an end-of-sequence id or one of its stop ids; that id is the last one."""
    LENGTH = "length"
    """It has max_tokens new ids, or the context is full."""
    ABORT = "abort"
    """Someone ended it early; what it had sampled is kept."""


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Output tokens start..end (end excluded) were sampled under one weight version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a request sampled. `token_ids`, `logprobs` and `ranks` have one entry a new token."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural logarithms, of the sampling distribution."""
    ranks: list[int]
    """1 = the likeliest."""
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    stop_id: int | None
    """The one of stop_token_ids that ended it; None for any other end, that by an end-of-sequence id included."""
    num_prompt_tokens: int


class Request:
    """A request's state. Belongs to the decoding thread from its submission to its end."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        eos_ids: frozenset[int],
        max_model_len: int,
        adapter: Adapter | None = None,
    ) -> None:
        self.adapter = adapter
        """What it is decoded with to its end; None = the engine's own weights, whichever these are."""
        self.request_id = request_id
        self.params = params
        self.future: Future[Completion] = Future()
        self.ids = list(prompt_ids)
        """Prompt and sampled ids."""
        self.num_cached = 0
        """Positions whose keys and values lie in the slot and are to be used."""
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
        self._num_prompt = len(prompt_ids)
        self._max_length = min(max_model_len, self._num_prompt + (params.max_tokens or max_model_len))
        self._logprobs: list[float] = []
        self._ranks: list[int] = []
        self._version_starts: list[tuple[str, int]] = []
        self._random = random.Random(params.seed)

    @property
    def num_sampled(self) -> int:
        return len(self._logprobs)

    @property
    def must_go_on(self) -> bool:
        """True while stop ids are not to be sampled yet."""
        return self.num_sampled < self.params.min_tokens

    def draw(self) -> float:
        """The uniform that decides the next token."""
        return self._random.random()

    def append(self, token_id: int, logprob: float, rank: int, version: str) -> FinishReason | None:
        """Take one sampled token; returns why the request ends with it, None when it goes on."""
        if not self._version_starts or self._version_starts[-1][0] != version:
            self._version_starts.append((version, self.num_sampled))
        self.ids.append(token_id)
        self._logprobs.append(logprob)
        self._ranks.append(rank)
        if token_id in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.ids) >= self._max_length else None

    def finish(self, reason: FinishReason) -> None:
        """Hand the result to whoever waits for it."""
        starts = self._version_starts
        ends = [*(start for _, start in starts[1:]), self.num_sampled] if starts else []
        stopped_by = self.ids[-1] if reason is FinishReason.STOP else None
        self.future.set_result(
            Completion(
                token_ids=self.ids[self._num_prompt :],
                logprobs=self._logprobs,
                ranks=self._ranks,
                spans=tuple(
                    VersionSpan(version=version, start=start, end=end)
                    for (version, start), end in zip(starts, ends, strict=True)
                ),
                finish_reason=reason,
                stop_id=stopped_by if stopped_by in self.params.stop_token_ids else None,
                num_prompt_tokens=self._num_prompt,
            )
        )
