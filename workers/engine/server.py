"""The HTTP routes: vLLM's own, so that the engine client and the weight keeper need not know which one answers."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from transformers import Qwen3Config

from common.errors import RollmillError
from common.weights import WeightsDamaged
from workers.engine.adapters import Adapter, merge_adapter
from workers.engine.batch import Batch, PauseMode
from workers.engine.checkpoint import Shapes, read_tensors
from workers.engine.decoding import DecodingThread, EngineDead
from workers.engine.model import Model, Weights, fuse
from workers.engine.request import Request
from workers.engine.wire import (
    AbortBody,
    BadRequest,
    GenerateBody,
    LoadAdapterBody,
    RpcBody,
    UnloadAdapterBody,
    VersionBody,
    check_ids,
    completion_body,
    engine_request_id,
    parse,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_BODY_BYTES = 64 << 20

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Routes:
    """The routes over one decoding thread and its model."""

    def __init__(
        self,
        decoding: DecodingThread,
        model: Model,
        *,
        config: Qwen3Config,
        shapes: Shapes,
        eos_ids: frozenset[int],
        model_name: str,
        folder: Path,
    ) -> None:
        self._decoding = decoding
        self._config = config
        self._shapes = shapes
        self._eos_ids = eos_ids
        self._model_name = model_name
        self._folder = folder
        self._vocab_size = model.vocab_size
        self._max_model_len = model.max_model_len
        self._created = int(time.time())
        self._loading = asyncio.Lock()
        self._claim = 0
        """The newest under which somebody set out to load it."""
        self._adapters: dict[str, Adapter] = {}
        """By name; those that are unloaded live on in the requests that have them."""

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_errors_as_json], client_max_size=_MAX_BODY_BYTES)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_post("/abort_requests", self.abort_requests)
        app.router.add_post("/pause", self.pause)
        app.router.add_post("/resume", self.resume)
        app.router.add_get("/is_paused", self.is_paused)
        app.router.add_post("/collective_rpc", self.collective_rpc)
        app.router.add_post("/update_weight_version", self.update_weight_version)
        app.router.add_get("/weight_info", self.weight_info)
        app.router.add_post("/reset_prefix_cache", self.reset_prefix_cache)
        app.router.add_post("/v1/load_lora_adapter", self.load_lora_adapter)
        app.router.add_post("/v1/unload_lora_adapter", self.unload_lora_adapter)
        return app

    async def _call(self, action: Callable[[Batch], T]) -> T:
        return await asyncio.wrap_future(self._decoding.call(action))

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._decoding.alive else 503)

    async def models(self, _: web.Request) -> web.Response:
        card = {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "rollmill-small-cpu-engine",
            "root": str(self._folder),
            "parent": None,
            "max_model_len": self._max_model_len,
        }
        adapters = [
            card | {"id": adapter.name, "root": str(adapter.folder), "parent": self._model_name}
            for adapter in self._adapters.values()
        ]
        return web.json_response({"object": "list", "data": [card, *adapters]})

    async def metrics(self, _: web.Request) -> web.Response:
        load = await self._call(lambda batch: batch.load())
        rows = (
            ("num_requests_running", "gauge", load.num_running),
            ("num_requests_waiting", "gauge", load.num_waiting),
            ("kv_cache_usage_perc", "gauge", load.cache_usage),
            ("prompt_tokens_total", "counter", load.num_prompt_tokens),
            ("generation_tokens_total", "counter", load.num_generated_tokens),
        )
        labels = f'{{engine="0",model_name={json.dumps(self._model_name)}}}'
        lines = [f"# TYPE vllm:{name} {kind}\nvllm:{name}{labels} {value}\n" for name, kind, value in rows]
        waiting, running = (",".join(sorted(names)) for names in (load.waiting_adapters, load.running_adapters))
        in_use = f'waiting_lora_adapters="{waiting}",running_lora_adapters="{running}"'
        lines.append(f"# TYPE vllm:lora_requests_info gauge\nvllm:lora_requests_info{{{in_use}}} {time.time()}\n")
        return web.Response(text="".join(lines))

    async def generate(self, http: web.Request) -> web.Response:
        """Answers when the request is finished or aborted; a client that goes away aborts it."""
        body = parse(GenerateBody, await http.read())
        adapter = self._adapters.get(body.model or "")
        if adapter is None and body.model not in (None, self._model_name):
            return _error(404, f"The model `{body.model}` does not exist; this engine serves `{self._model_name}`")
        check_ids(body, vocab_size=self._vocab_size, max_model_len=self._max_model_len)
        request = Request(
            engine_request_id(body.request_id),
            body.token_ids,
            body.sampling_params,
            eos_ids=self._eos_ids,
            max_model_len=self._max_model_len,
            adapter=adapter,
        )
        try:
            completion = await asyncio.wrap_future(self._decoding.submit(request))
        except asyncio.CancelledError:
            self._decoding.call(lambda batch: batch.abort(lambda other: other is request))
            raise
        answer = completion_body(
            completion,
            request_id=request.request_id,
            model=adapter.name if adapter else self._model_name,
            with_logprobs=body.sampling_params.logprobs is not None,
        )
        return web.json_response(answer)

    async def abort_requests(self, http: web.Request) -> web.Response:
        given = parse(AbortBody, await http.read()).request_ids
        ids = {*given, *map(engine_request_id, given)}

        def wanted(request: Request) -> bool:
            return not ids or request.request_id in ids

        aborted = await self._call(lambda batch: batch.abort(wanted))
        return web.json_response({"status": "aborted", "aborted": aborted})

    async def pause(self, http: web.Request) -> web.Response:
        """Answers when the pause is complete: in mode wait, when the last running request has finished."""
        mode = http.query.get("mode", PauseMode.ABORT)
        if mode not in list(PauseMode):
            raise BadRequest(f"mode: expected one of {', '.join(PauseMode)} (got {mode})")
        clear_cache = _flag(http, "clear_cache", default=True)
        await asyncio.wrap_future(self._decoding.pause(PauseMode(mode), clear_cache=clear_cache))
        return web.json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        await self._call(lambda batch: batch.resume())
        return web.json_response({"status": "resumed"})

    async def is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": await self._call(lambda batch: batch.paused)})

    async def collective_rpc(self, http: web.Request) -> web.Response:
        body = parse(RpcBody, await http.read())
        if body.method != "load_version":
            return _error(500, f"unknown method {body.method!r}; this engine knows load_version")
        if len(body.args) not in (2, 3) or not all(claim.isdecimal() for claim in body.args[2:]):
            raise BadRequest(f"args: load_version takes a folder and a version, and perhaps a claim (got {body.args})")
        claim = int(body.args[2]) if body.args[2:] else None
        return web.json_response({"results": [await self._load_version(Path(body.args[0]), body.args[1], claim)]})

    async def _load_version(self, folder: Path, version: str, claim: int | None) -> dict[str, bool | str | float]:
        """Read and check the folder beside the decoding, then swap. After any error the old weights serve on."""
        started = time.perf_counter()
        async with self._loading:
            if claim is not None:
                if claim < self._claim:
                    late = f"claim {claim} is older than {self._claim}"
                    logger.warning("load refused version=%s reason=%s", version, late)
                    return {"ok": False, "superseded": True, "error": late}
                self._claim = claim
            try:
                weights = await asyncio.to_thread(self._read_weights, folder)
            except RollmillError as error:
                logger.warning("weights refused version=%s reason=%s", version, error)
                return {"ok": False, "error": str(error)}
            await self._call(lambda batch: batch.swap_weights(weights))
        seconds = time.perf_counter() - started
        logger.info("weights loaded version=%s seconds=%.4f", version, seconds)
        return {"ok": True, "version": version, "seconds": seconds}

    def _read_weights(self, folder: Path) -> Weights:
        return fuse(self._config, read_tensors(folder, self._shapes))

    async def load_lora_adapter(self, http: web.Request) -> web.Response:
        """Nothing waits for it: the adapter is merged beside the decoding, into the weights of the start folder."""
        body = parse(LoadAdapterBody, await http.read())
        folder = Path(body.lora_path)
        async with self._loading:
            if body.lora_name in (self._model_name, *self._adapters):
                raise BadRequest(f"lora_name: {body.lora_name} has already been loaded")
            try:
                weights = await asyncio.to_thread(self._read_merged, folder)
            except WeightsDamaged as error:
                logger.warning("adapter refused name=%s reason=%s", body.lora_name, error)
                return _error(500, str(error))
            self._adapters[body.lora_name] = Adapter(name=body.lora_name, folder=folder, weights=weights)
        logger.info("adapter loaded name=%s", body.lora_name)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    def _read_merged(self, folder: Path) -> Weights:
        return fuse(self._config, merge_adapter(folder, read_tensors(self._folder, self._shapes)))

    async def unload_lora_adapter(self, http: web.Request) -> web.Response:
        name = parse(UnloadAdapterBody, await http.read()).lora_name
        if self._adapters.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def update_weight_version(self, http: web.Request) -> web.Response:
        body = parse(VersionBody, await http.read())
        await self._call(lambda batch: batch.name_version(body.new_version))
        return web.json_response({"success": True})

    async def weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": await self._call(lambda batch: batch.version)})

    async def reset_prefix_cache(self, http: web.Request) -> web.Response:
        """There is no cache of finished requests; on demand, running ones compute theirs anew."""
        if _flag(http, "reset_running_requests", default=False):
            await self._call(lambda batch: batch.forget_cache())
        return web.json_response({"success": True})


@web.middleware
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequest as error:
        return _error(400, str(error))
    except web.HTTPException as error:
        return _error(error.status, error.reason)
    except EngineDead as error:
        return _error(503, str(error))
    except RollmillError as error:
        return _error(500, str(error))


def _error(status: int, message: str) -> web.Response:
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status
    )


def _flag(http: web.Request, name: str, *, default: bool) -> bool:
    raw = http.query.get(name, str(default)).lower()
    if raw not in ("true", "false"):
        raise BadRequest(f"{name}: expected true or false (got {raw})")
    return raw == "true"
