"""A teacher that is a vLLM server: asked for the log-probs of whole rows, given as prompts."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from common.config_distill import DistillConfig
from common.errors import RollmillError, SetupError
from trainer.failures import TeacherUnavailable
from trainer.samples import RowKey, Sample

COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
MAX_PROBED = 512
"""Ids whose texts are compared at the start, spread over the whole vocabulary."""
PROBED_AT_ONCE = 64
AWAY = (408, 429)
"""Statuses, beside those from 500 on, after which the same request may succeed."""
UNDECODABLE = "\ufffd"
"""Where an id is a part of a character; servers complete it from what stands before."""
_DETAIL_CHARS = 300


class ServedTeacher:
    """A server at an address. Every request has a time limit; several go out at once."""

    def __init__(self, distill: DistillConfig, *, tokenizer: Tokenizer) -> None:
        self._url = distill.teacher
        self._timeout_s = distill.request_timeout_s
        self._max_requests = distill.max_requests
        self._tokenizer = tokenizer
        self._said: dict[RowKey, np.ndarray] = {}
        """Rows of this step that it has answered: after an outage only the others are asked for."""

    def check(self) -> None:
        """Raise SetupError unless the server has the run's tokenizer, id by id; TeacherUnavailable if it is away."""
        ids, model = _spread(self._tokenizer), self._model()
        for start in range(0, len(ids), PROBED_AT_ONCE):
            part = ids[start : start + PROBED_AT_ONCE]
            # The first id of a prompt has no log-prob, and so no text.
            try:
                entries = self._entries([part[0], *part], model=model)[1:]
                texts = [entry[str(token_id)]["decoded_token"] for token_id, entry in zip(part, entries, strict=True)]
            except (RollmillError, KeyError, TypeError) as error:
                if isinstance(error, TeacherUnavailable):
                    raise
                raise SetupError(
                    f"train.distill.teacher = {self._url} does not say log-probs and texts of the ids {part[0]} .. "
                    f"{part[-1]}: {error}. It must be a vLLM server of the run's vocabulary"
                ) from None
            self._compare(part, texts)

    def logprobs(self, samples: Sequence[Sample]) -> Mapping[RowKey, np.ndarray]:
        """[L] log-probs in nats of each row's ids, NaN where it was not asked. Raises TeacherUnavailable if it is away,
        then with what it has said kept for the next call, and RollmillError that names a row that it refuses."""
        keys = {sample.key for sample in samples}
        self._said = {key: logprobs_L for key, logprobs_L in self._said.items() if key in keys}
        missing = [sample for sample in samples if sample.key not in self._said]
        model = self._model()
        pool = ThreadPoolExecutor(self._max_requests, thread_name_prefix="teacher")
        try:
            asked = [pool.submit(self._score, sample, model=model) for sample in missing]
            for answer in asked:
                answer.result()
        finally:
            pool.shutdown(cancel_futures=True)
        said, self._said = self._said, {}
        return said

    def _score(self, sample: Sample, *, model: str) -> None:
        end = int(np.flatnonzero(sample.mask_L)[-1]) + 1
        ids = sample.ids_L[:end].tolist()
        where = f"teacher {self._url}: episode {sample.episode_id} row {sample.index}"
        try:
            entries = self._entries(ids, model=model)
        except TeacherUnavailable:
            raise
        except RollmillError as error:
            raise RollmillError(f"{where}: {error}") from None
        logprobs_L = np.full(len(sample.ids_L), np.nan, dtype=np.float32)
        for position in np.flatnonzero(sample.mask_L).tolist():
            try:
                # By the id: the likeliest one may stand in the same entry, before it.
                logprobs_L[position] = float(entries[position][str(ids[position])]["logprob"])
            except (KeyError, TypeError, ValueError):
                raise RollmillError(
                    f"{where}: no log-prob of id {ids[position]} at position {position}, but "
                    f"{entries[position]!r:.{_DETAIL_CHARS}}"
                ) from None
        self._said[sample.key] = logprobs_L

    def _entries(self, ids: list[int], *, model: str) -> list[Any]:
        """What it says of each id of a prompt: id, as text -> log-prob and text."""
        body = {
            "model": model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        reply = self._send(COMPLETIONS, body)
        try:
            entries = reply["choices"][0]["prompt_logprobs"]
        except (KeyError, TypeError, IndexError):
            entries = None
        if not isinstance(entries, list) or len(entries) != len(ids):
            raise RollmillError(f"{COMPLETIONS} answers {reply!r:.{_DETAIL_CHARS}} without prompt_logprobs of each id")
        return entries

    def _model(self) -> str:
        reply = self._send(MODELS)
        try:
            return str(reply["data"][0]["id"])
        except (KeyError, TypeError, IndexError):
            raise RollmillError(f"{MODELS} answers {reply!r:.{_DETAIL_CHARS}}, expected a model") from None

    def _send(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        deadline = time.monotonic() + self._timeout_s
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                return json.loads(_read(response, deadline=deadline))
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(_DETAIL_CHARS).decode(errors="replace")
            kind = TeacherUnavailable if error.code in AWAY or error.code >= 500 else RollmillError
            raise kind(f"teacher {self._url}{path} answers {error.code}: {said}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise TeacherUnavailable(f"teacher {self._url}{path}: {type(error).__name__}: {error}") from error

    def _compare(self, ids: list[int], texts: list[object]) -> None:
        for token_id, theirs in zip(ids, texts, strict=True):
            ours = self._tokenizer.decode([token_id], skip_special_tokens=False)
            if UNDECODABLE in ours or (isinstance(theirs, str) and UNDECODABLE in theirs):
                continue
            if theirs != ours:
                raise SetupError(
                    f"train.distill.teacher = {self._url} has another tokenizer than the run's model: id {token_id} is "
                    f"{theirs!r} there, {ours!r} here. A teacher of another vocabulary has no log-probs of these ids"
                )


def _spread(tokenizer: Tokenizer) -> list[int]:
    """Ids from the first to the last, and all that were added, which is where related vocabularies differ."""
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    added = sorted(tokenizer.get_added_tokens_decoder())[: MAX_PROBED // 2]
    step = -(-len(ids) // (MAX_PROBED // 2))
    return sorted({*ids[::step], ids[-1], *added})


def _read(response: http.client.HTTPResponse, *, deadline: float) -> bytes:
    """The body. A server that sends a little now and then would never meet the socket's own limit."""
    parts = []
    while part := response.read1(1 << 20):
        parts.append(part)
        if time.monotonic() > deadline:
            raise TimeoutError("the answer has not ended in time")
    return b"".join(parts)
