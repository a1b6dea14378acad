"""Questions to a server of which nothing is known yet: every answer is bounded in time and size."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from enum import StrEnum
from typing import Any

from common.errors import SetupError

TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 4 << 20
"""No engine's answer to a question is longer; a server that never stops sending is none."""
_CHUNK_BYTES = 64 << 10
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Engines stand nearby: no proxy of the environment is asked."""


class EngineKind(StrEnum):
    """What a server speaks, as far as a run can use it."""

    VLLM = "vllm-generate"
    """vLLM with the generate route, or the small CPU engine: says for each id which version sampled it."""
    VLLM_COMPLETIONS = "vllm-completions"
    """vLLM without that route: ids through /v1/completions, one version per request."""
    SGLANG = "sglang"
    """SGLang 0.5.23 or newer."""


def ask(url: str, path: str, body: dict[str, object] | None = None, *, as_text: bool = False) -> tuple[int, Any]:
    """Status and body, parsed where it is JSON, unless `as_text`; of other text the beginning.

    Raises SetupError where nobody answers in time.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"Content-Type": "application/json"})
    deadline = time.monotonic() + TIMEOUT_S
    try:
        try:
            with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
                status, raw = answer.status, _read(answer, url + path, deadline)
        except urllib.error.HTTPError as error:
            with error:
                status, raw = error.code, _read(error, url + path, deadline)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise SetupError(f"no engine answers at {url}{path}: {reason}") from None
    except http.client.HTTPException as error:
        raise SetupError(f"{url} does not speak HTTP: {type(error).__name__}") from None
    if as_text:
        return status, raw.decode(errors="replace")
    try:
        return status, json.loads(raw)
    except ValueError:
        return status, " ".join(raw[:800].decode(errors="replace").split())[:200]


def _read(answer: Any, where: str, deadline: float) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    while part := answer.read1(_CHUNK_BYTES):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > MAX_ANSWER_BYTES or time.monotonic() > deadline:
            raise SetupError(f"{where} does not end its answer ({num_bytes} bytes in {TIMEOUT_S:g} s): it is no engine")
    return b"".join(parts)


def asked(reply: Any, *names: str | int) -> Any:
    """The value at this place of a parsed answer; None where there is no such place."""
    for name in names:
        try:
            reply = reply[name]
        except (KeyError, TypeError, IndexError):
            return None
    return reply
