"""Speaks vLLM's HTTP routes, for the engine pool (generate) and the weight keeper (everything else).

Every call has a time limit, and every answer is checked: a call that returns has done what its name says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from common.episode import Sampled
from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.engine_errors import ContextOverflow, EngineUnavailable, LoadRefused
from workers.engine_reply import parse_sampled

PROBE_TIMEOUT_S = 5.0
"""Of questions, which a healthy engine answers in milliseconds."""
ADMIN_TIMEOUT_S = 15.0
"""Of pause, resume and the like, which wait for a decoding step."""
LOAD_TIMEOUT_S = 300.0
"""Of reading a version's files into the engine."""
_KEEPALIVE_S = 4.0
"""Shorter than vLLM's own 5 s, so that no request is sent on a connection which the server is closing."""
_CONTEXT_OVERFLOW = re.compile(r"maximum (context|model) length", re.IGNORECASE)
_DETAIL_CHARS = 300

Json = Mapping[str, object]


class EngineClient:
    """One per process, and used from one event loop: it keeps connections to all engines open."""

    def __init__(self, *, timeout_s: float) -> None:
        """`timeout_s` is the time limit of one generate request."""
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        """None until the first call, since it belongs to the loop that runs then."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. The client may be used again after it."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self,
        url: str,
        *,
        request_id: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        stop_ids: Sequence[int],
        model: str | None,
        run: str,
    ) -> Sampled:
        """Sample up to `max_tokens` ids after `prompt_ids`, ending early at one of `stop_ids`.

        `model` is the name that the engine serves, None = whichever. `request_id` must be unique on the engine.
        Raises EngineUnavailable, ContextOverflow, or EpisodeError: what the engine sampled can't be trained on, or
        the request itself is wrong. Cancelling closes the connection, which makes the engine stop.
        """
        request = {
            "request_id": request_id,
            "token_ids": list(prompt_ids),
            "sampling_params": {
                "max_tokens": max_tokens,
                "temperature": temperature,
                "top_p": top_p,
                "logprobs": 0,
                "stop_token_ids": list(stop_ids),
            },
        }
        if model is not None:
            request["model"] = model
        path = "/inference/v1/generate"
        status, body = await self._send("POST", url, path, timeout_s=self._timeout_s, body=request)
        if status in (400, 422):
            detail = _detail(body)
            if _CONTEXT_OVERFLOW.search(detail):
                raise ContextOverflow(f"engine {url}: {detail}")
            raise EpisodeError(Outcome.HANDLER_FAILED, f"engine {url} refuses the request ({status}): {detail}")
        if status != 200:
            raise EngineUnavailable(f"engine {url} {path} answers {status}: {_detail(body)}")
        return parse_sampled(body, run=run, max_tokens=max_tokens, engine=url)

    async def check_health(self, url: str) -> None:
        """Return if the engine says that it can decode."""
        status, body = await self._send("GET", url, "/health", timeout_s=PROBE_TIMEOUT_S)
        if status != 200:
            raise EngineUnavailable(f"engine {url} /health answers {status}: {_detail(body)}")

    async def metrics(self, url: str) -> str:
        """Its figures in Prometheus' text format; "" if it has no such page."""
        status, body = await self._send("GET", url, "/metrics", timeout_s=PROBE_TIMEOUT_S)
        if status not in (200, 404):
            raise EngineUnavailable(f"engine {url} /metrics answers {status}: {_detail(body)}")
        return body.decode(errors="replace") if status == 200 else ""

    async def weight_version(self, url: str) -> str:
        """The name of the weights that it samples from."""
        reply = await self._ask("GET", url, "/weight_info", timeout_s=PROBE_TIMEOUT_S)
        return str(_field(reply, "weight_version", str, url, "/weight_info"))

    async def is_paused(self, url: str) -> bool:
        """Whether it holds requests back."""
        reply = await self._ask("GET", url, "/is_paused", timeout_s=PROBE_TIMEOUT_S)
        return bool(_field(reply, "is_paused", bool, url, "/is_paused"))

    async def pause(self, url: str) -> None:
        """Freeze all requests; they go on after `resume` with keys and values computed anew. Twice is no error."""
        path = "/pause?mode=keep&clear_cache=true"
        reply = await self._ask("POST", url, path, timeout_s=ADMIN_TIMEOUT_S)
        _expect(reply, "status", "paused", url, path)

    async def resume(self, url: str) -> None:
        """Let requests go on. Without a pause it is no error."""
        reply = await self._ask("POST", url, "/resume", timeout_s=ADMIN_TIMEOUT_S)
        _expect(reply, "status", "resumed", url, "/resume")

    async def load_version(self, url: str, path: Path, name: str) -> None:
        """Read a version's folder into the engine. Raises LoadRefused when it says that the old weights serve on.

        After EngineUnavailable, nobody knows which weights it has.
        """
        body = {"method": "load_version", "args": [str(path), name]}
        reply = await self._ask("POST", url, "/collective_rpc", timeout_s=LOAD_TIMEOUT_S, body=body)
        results = _field(reply, "results", list, url, "/collective_rpc")
        if not results or not all(isinstance(result, dict) and "ok" in result for result in results):
            raise EngineUnavailable(f"engine {url} /collective_rpc load_version answers {results!r:.{_DETAIL_CHARS}}")
        errors = [str(result.get("error", "no reason given")) for result in results if result["ok"] is not True]
        if errors and len(errors) < len(results):
            raise EngineUnavailable(f"engine {url}: {len(errors)} of {len(results)} ranks refuse {name}: {errors[0]}")
        if errors:
            raise LoadRefused(f"engine {url} refuses {name}: {errors[0]}")

    async def update_weight_version(self, url: str, name: str) -> None:
        """Make it report this name for tokens that it samples from now on."""
        path = "/update_weight_version"
        reply = await self._ask("POST", url, path, timeout_s=ADMIN_TIMEOUT_S, body={"new_version": name})
        _expect(reply, "success", True, url, path)

    async def abort(self, url: str, request_ids: Sequence[str]) -> int:
        """End these requests, with what they have sampled; returns how many the engine says it ended."""
        assert request_ids, "an empty list would end the requests of everybody"
        path = "/abort_requests"
        # The route under which they came prefixes the ids; without the prefix vLLM finds none, and says nothing.
        body = {"request_ids": [f"generate-tokens-{request_id}" for request_id in request_ids]}
        reply = await self._ask("POST", url, path, timeout_s=ADMIN_TIMEOUT_S, body=body)
        return int(_field(reply, "aborted", int, url, path))

    async def _ask(self, method: str, url: str, path: str, *, timeout_s: float, body: Json | None = None) -> Any:
        """The answer's JSON object. Raises EngineUnavailable for anything else."""
        status, raw = await self._send(method, url, path, timeout_s=timeout_s, body=body)
        if status != 200:
            raise EngineUnavailable(f"engine {url} {path} answers {status}: {_detail(raw)}")
        try:
            reply = json.loads(raw)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise EngineUnavailable(f"engine {url} {path} answers no JSON object: {_detail(raw)}")
        return reply

    async def _send(
        self, method: str, url: str, path: str, *, timeout_s: float, body: Json | None = None
    ) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            )
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, url + path, json=body, timeout=limit) as response:
                return response.status, await response.read()
        except TimeoutError as error:
            raise EngineUnavailable(f"engine {url} {path} did not answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"engine {url} {path}: {type(error).__name__}: {error}") from error


def _detail(body: bytes) -> str:
    """What an error's body says, shortened: engines wrap the message in different ways."""
    text = body.decode(errors="replace")
    try:
        parsed = json.loads(text)
    except ValueError:
        return text[:_DETAIL_CHARS]
    inner = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    message = inner.get("message", inner) if isinstance(inner, dict) else inner
    return str(message)[:_DETAIL_CHARS]


def _field(reply: dict[str, Any], name: str, kind: type, url: str, path: str) -> Any:
    value = reply.get(name)
    if not isinstance(value, kind):
        raise EngineUnavailable(f"engine {url} {path} answers {name}={value!r}, expected a {kind.__name__}")
    return value


def _expect(reply: dict[str, Any], name: str, wanted: object, url: str, path: str) -> None:
    if reply.get(name) != wanted:
        raise EngineUnavailable(f"engine {url} {path} answers {name}={reply.get(name)!r}, expected {wanted!r}")
