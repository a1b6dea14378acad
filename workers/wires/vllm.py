"""vLLM's token-in, token-out route and its development routes: the wire that says for each id who sampled it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.config import InFlight
from common.episode import Sampled
from common.sampling import VLLM_PLAIN
from workers.engine_errors import EngineUnavailable, LoadRefused, Superseded
from workers.engine_http import EngineHttp, detail
from workers.engine_reply import parse_sampled
from workers.wires.base import (
    ADMIN_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    MODELS,
    PROBE_TIMEOUT_S,
    GenerateRequest,
    Route,
)

GENERATE = "/inference/v1/generate"
LOAD_ADAPTER = "/v1/load_lora_adapter"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"
_SHOWN_CHARS = 300


class VllmWire:
    """vLLM started with --enable-scale-out and VLLM_SERVER_DEV_MODE=1; the small CPU engine speaks the same."""

    name = "vllm-generate"

    def __init__(self, http: EngineHttp, url: str) -> None:
        self.route = Route(http, url)

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> Sampled:
        body: dict[str, object] = {
            "request_id": request.request_id,
            "token_ids": list(request.prompt_ids),
            "sampling_params": {
                **VLLM_PLAIN,
                "max_tokens": request.max_tokens,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "logprobs": 0,
                "stop_token_ids": list(request.stop_ids),
            },
        }
        if request.served_name is not None:
            body["model"] = request.served_name
        raw = await self.route.sample(GENERATE, body, timeout_s=timeout_s)
        return parse_sampled(
            raw,
            run=request.run,
            max_tokens=request.max_tokens,
            stop_ids=request.stop_ids,
            engine=self.route.url,
            adapter=request.adapter,
        )

    async def check_health(self) -> None:
        status, raw = await self.route.http.send("GET", self.route.url, "/health", timeout_s=PROBE_TIMEOUT_S)
        if status != 200:
            raise self.route.unavailable("/health", status, raw)

    async def weight_version(self) -> str:
        reply = await self.route.ask("GET", "/weight_info", timeout_s=PROBE_TIMEOUT_S)
        return str(self.route.field(reply, "weight_version", str, "/weight_info"))

    async def is_paused(self) -> bool:
        reply = await self.route.ask("GET", "/is_paused", timeout_s=PROBE_TIMEOUT_S)
        return bool(self.route.field(reply, "is_paused", bool, "/is_paused"))

    async def pause(self, in_flight: InFlight, *, wait_s: float, claim: int | None) -> None:
        path = _claimed(f"/pause?mode={in_flight}&clear_cache=true", claim)
        timeout_s = ADMIN_TIMEOUT_S + (wait_s if in_flight == "wait" else 0)
        self.route.expect(await self.route.ask("POST", path, timeout_s=timeout_s), "status", "paused", path)

    async def resume(self, *, claim: int | None) -> None:
        reply = await self.route.ask("POST", _claimed("/resume", claim), timeout_s=ADMIN_TIMEOUT_S)
        self.route.expect(reply, "status", "resumed", "/resume")

    async def load_version(self, path: Path, name: str, *, claim: int | None) -> None:
        # In the arguments too: our extension judges it where no fence does.
        arguments = [str(path), name, *([] if claim is None else [str(claim)])]
        body = {"method": "load_version", "args": arguments}
        route = _claimed("/collective_rpc", claim)
        reply = await self.route.ask("POST", route, timeout_s=LOAD_TIMEOUT_S, body=body)
        results = self.route.field(reply, "results", list, "/collective_rpc")
        url = self.route.url
        if not results or not all(isinstance(result, dict) and "ok" in result for result in results):
            raise EngineUnavailable(f"engine {url} /collective_rpc load_version answers {results!r:.{_SHOWN_CHARS}}")
        if late := [result for result in results if result.get("superseded")]:
            raise Superseded(f"engine {url} loads no {name}: {late[0].get('error')}")
        errors = [str(result.get("error", "no reason given")) for result in results if result["ok"] is not True]
        if errors and len(errors) < len(results):
            raise EngineUnavailable(f"engine {url}: {len(errors)} of {len(results)} ranks refuse {name}: {errors[0]}")
        if errors:
            raise LoadRefused(f"engine {url} refuses {name}: {errors[0]}")

    async def update_weight_version(self, name: str, *, claim: int | None) -> None:
        path = _claimed("/update_weight_version", claim)
        reply = await self.route.ask("POST", path, timeout_s=ADMIN_TIMEOUT_S, body={"new_version": name})
        self.route.expect(reply, "success", True, path)

    async def load_adapter(self, path: Path, name: str) -> None:
        body = {"lora_name": name, "lora_path": str(path)}
        url = self.route.url
        status, raw = await self.route.http.send("POST", url, LOAD_ADAPTER, timeout_s=LOAD_TIMEOUT_S, body=body)
        if status != 200:
            raise LoadRefused(f"engine {url} refuses adapter {name} ({status}): {detail(raw)}")

    async def unload_adapter(self, name: str) -> None:
        body = {"lora_name": name}
        url = self.route.url
        status, raw = await self.route.http.send("POST", url, UNLOAD_ADAPTER, timeout_s=ADMIN_TIMEOUT_S, body=body)
        if status not in (200, 404):
            raise EngineUnavailable(f"engine {url} does not unload adapter {name} ({status}): {detail(raw)}")

    async def adapters(self) -> dict[str, str]:
        reply = await self.route.ask("GET", MODELS, timeout_s=PROBE_TIMEOUT_S)
        cards = self.route.field(reply, "data", list, MODELS)
        try:
            return {str(card["id"]): str(card["root"]) for card in cards if card["parent"] is not None}
        except (KeyError, TypeError):
            raise EngineUnavailable(f"engine {self.route.url} {MODELS} answers {cards!r:.{_SHOWN_CHARS}}") from None

    async def abort(self, request_ids: Sequence[str]) -> int | None:
        path = "/abort_requests"
        body = {"request_ids": [self.engine_id(request_id) for request_id in request_ids]}
        reply = await self.route.ask("POST", path, timeout_s=ADMIN_TIMEOUT_S, body=body)
        return int(self.route.field(reply, "aborted", int, path))

    def engine_id(self, request_id: str) -> str:
        """The engine's name of a request. It goes by the route, and for another name vLLM aborts none and is silent."""
        return f"generate-tokens-{request_id}"


def _claimed(path: str, claim: int | None) -> str:
    """The path with the claim that a fenced server judges the request by; others do not look at it."""
    return path if claim is None else f"{path}{'&' if '?' in path else '?'}claim={claim}"
