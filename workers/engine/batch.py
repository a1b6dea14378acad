"""Continuous batching: requests join and leave between steps, and each step gives every running one a token.

Plain synchronous code, owned by the one thread in `decoding`, which calls `advance` again and again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from common.errors import RollmillError
from workers.engine.model import Model, Weights
from workers.engine.request import FinishReason, Request
from workers.engine.sampling import SamplingPlan, plan_sampling, sample

_PREFILL_TOKENS = 1024
"""Padded tokens of one prefill pass. Larger passes are slower: what they hold no longer fits the CPU's caches."""


class LogitsNotFinite(RollmillError):
    """The weights gave a NaN or infinite log-prob to a request's next token."""


class PauseMode(StrEnum):
    """What a pause does with requests that are under way. New ones wait in each mode."""

    ABORT = "abort"
    """End them now, with what they have."""
    WAIT = "wait"
    """Let those in the batch finish; the pause is complete when they have."""
    KEEP = "keep"
    """Freeze them; they go on after the pause."""


class Gate(StrEnum):
    """How far requests may go."""

    OPEN = "open"
    """They join the batch and are decoded."""
    DRAINING = "draining"
    """The batch is decoded, nobody joins."""
    FROZEN = "frozen"
    """Nothing is decoded."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the engine is busy with."""

    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    """Since the start."""
    num_generated_tokens: int
    """Since the start."""
    cache_usage: float
    """Share of the KV cache's positions in use, 0..1."""
    running_adapters: frozenset[str]
    """Names of the adapters that the requests of the batch have."""
    waiting_adapters: frozenset[str]


class Batch:
    """All requests that are not finished, and the model that they share."""

    def __init__(self, model: Model) -> None:
        self.version = "default"
        """The weight version that is reported for tokens from the next step on."""
        self._model = model
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        """The request at index i has the model's slot i."""
        self._plan: SamplingPlan | None = None
        """None after the batch's composition changed."""
        self._gate = Gate.OPEN
        self._drained: list[Future[None]] = []
        """Pauses of mode WAIT that are not complete yet."""
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0

    @property
    def paused(self) -> bool:
        return self._gate is not Gate.OPEN

    def add(self, request: Request) -> None:
        """Queue a request. Its future gives a Completion, or fails with LogitsNotFinite."""
        self._waiting.append(request)

    def abort(self, wanted: Callable[[Request], bool]) -> int:
        """End the requests that are wanted with FinishReason.ABORT; returns their number."""
        running = [request for request in self._running if wanted(request)]
        for request in running:
            self._leave(request, FinishReason.ABORT)
        waiting = [request for request in self._waiting if wanted(request)]
        for request in waiting:
            self._waiting.remove(request)
            request.finish(FinishReason.ABORT)
        return len(running) + len(waiting)

    def pause(self, mode: PauseMode, done: Future[None], *, clear_cache: bool) -> None:
        """Hold requests back until `resume`; `done` is set when the mode's promise holds. Twice is no error.

        With `clear_cache`, requests that go on later compute all keys and values anew, under the weights of then.
        """
        self._gate = Gate.DRAINING if mode is PauseMode.WAIT else Gate.FROZEN
        if mode is PauseMode.ABORT:
            self.abort(lambda request: True)
        if clear_cache:
            self.forget_cache()
        if mode is PauseMode.WAIT:
            self._drained.append(done)
        else:
            done.set_result(None)

    def resume(self) -> None:
        self._gate = Gate.OPEN
        self._report_drained()

    def name_version(self, version: str) -> None:
        self.version = version

    def swap_weights(self, weights: Weights) -> None:
        """Decode with other weights from the next step on. Keys and values of running requests stay as they are."""
        self._model.weights = weights

    def forget_cache(self) -> None:
        """Let running requests compute all keys and values anew before their next token."""
        for request in self._running:
            request.num_cached = 0

    def load(self) -> Load:
        used = sum(len(request.ids) for request in self._running)
        return Load(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            cache_usage=used / (self._model.num_slots * self._model.max_model_len),
            running_adapters=frozenset(r.adapter.name for r in self._running if r.adapter),
            waiting_adapters=frozenset(r.adapter.name for r in self._waiting if r.adapter),
        )

    def open_futures(self) -> list[Future[Any]]:
        """Whoever still waits for something, for the end of a thread that can't go on."""
        return [*(request.future for request in (*self._running, *self._waiting)), *self._drained]

    def advance(self) -> bool:
        """Take requests in and decode one token for each, as far as the gate allows; False if there was none."""
        if self._gate is Gate.OPEN:
            self._admit()
        decoding = bool(self._running) and self._gate is not Gate.FROZEN
        if decoding:
            self._step()
        if not self._running:
            self._report_drained()
        return decoding

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._model.num_slots:
            request = self._waiting.popleft()
            self._num_prompt_tokens += len(request.ids)
            self._running.append(request)
            self._plan = None

    def _step(self) -> None:
        self._prefill()
        running = self._running
        logits_NV = self._decode()
        for row, request in enumerate(running):
            if request.must_go_on:
                logits_NV[row, list(request.stop_ids)] = -math.inf
        if self._plan is None:
            self._plan = plan_sampling([r.params for r in running], self._model.vocab_size)
        ids, logprobs, ranks = sample(logits_NV, self._plan, [r.draw() for r in running])
        self._num_generated_tokens += len(running)
        leaving: list[tuple[Request, FinishReason | None]] = []
        for request, token_id, logprob, rank in zip(running, ids, logprobs, ranks, strict=True):
            request.num_cached = len(request.ids)
            if not math.isfinite(logprob):
                leaving.append((request, None))
            elif reason := request.append(token_id, logprob, rank, self.version):
                leaving.append((request, reason))
        for request, why in leaving:
            self._leave(request, why)

    def _decode(self) -> torch.Tensor:
        """[N, V] logits of everybody's next token; those that have the same weights are decoded together."""
        groups = self._rows_by_weights()
        parts = [
            self._model.decode(
                rows,
                [self._running[row].ids[-1] for row in rows],
                [len(self._running[row].ids) - 1 for row in rows],
                weights=weights,
            )
            for weights, rows in groups
        ]
        if len(parts) == 1:
            return parts[0]
        order = torch.tensor([row for _, rows in groups for row in rows])
        return torch.cat(parts)[order.argsort()]

    def _rows_by_weights(self) -> list[tuple[Weights, list[int]]]:
        groups: dict[int, tuple[Weights, list[int]]] = {}
        for row, request in enumerate(self._running):
            weights = self._model.weights if request.adapter is None else request.adapter.weights
            groups.setdefault(id(weights), (weights, []))[1].append(row)
        return list(groups.values())

    def _prefill(self) -> None:
        """Compute the keys and values of all positions before the last, for requests that lack them.

        Sorted by length, so that little of a pass is padding. The last position is decoded with everyone else's.
        """
        for weights, group in self._rows_by_weights():
            lengths = [(len(self._running[row].ids) - 1, row) for row in group]
            lacking = [(length, row) for length, row in lengths if self._running[row].num_cached < length]
            lacking.sort(reverse=True)
            while lacking:
                num_rows = max(1, _PREFILL_TOKENS // lacking[0][0])
                rows = [row for _, row in lacking[:num_rows]]
                self._model.prefill(rows, [self._running[row].ids[:-1] for row in rows], weights=weights)
                del lacking[:num_rows]

    def _leave(self, request: Request, reason: FinishReason | None) -> None:
        """Take a request out, and let the last one of the batch move into its slot."""
        row = self._running.index(request)
        last = self._running.pop()
        if last is not request:
            self._model.move(len(self._running), row, length=last.num_cached)
            self._running[row] = last
        self._plan = None
        if reason is None:
            text = f"weight version {self.version} gave request {request.request_id} a log-prob that is not finite"
            request.future.set_exception(LogitsNotFinite(text))
        else:
            request.finish(reason)

    def _report_drained(self) -> None:
        for future in self._drained:
            future.set_result(None)
        self._drained.clear()
