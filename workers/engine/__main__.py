"""`python -m workers.engine`: serves one Qwen3 checkpoint folder over HTTP until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from aiohttp import web

from common.context import SMALL_ENGINE_CONTEXT
from common.errors import RollmillError, SetupError
from common.log import setup_logging
from workers.engine.batch import Batch
from workers.engine.checkpoint import expected_shapes, num_kv_heads, read_config, read_eos_ids, read_tensors
from workers.engine.decoding import DecodingThread
from workers.engine.model import Model, fuse
from workers.engine.server import Routes

logger = logging.getLogger("workers.engine")

_MAX_CACHE_BYTES = 4 << 30
_STOP_WITHIN_S = 1.0
_DEAD_FOR_S = 2.0
"""How long /health says 503 after the decoding thread died, before the process ends for its supervisor to see."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The parts of a running engine."""

    decoding: DecodingThread
    routes: Routes
    description: str
    """For the log: size of the model and the batch."""


def build(folder: Path, *, model_name: str, max_batch: int, max_model_len: int | None) -> Engine:
    """Load a checkpoint folder and put the parts together; nothing runs yet.

    `max_model_len` None: the model's own, at most 4096. Raises SetupError or WeightsDamaged.
    """
    config = read_config(folder)
    length = max_model_len or min(config.max_position_embeddings, SMALL_ENGINE_CONTEXT)
    if length > config.max_position_embeddings:
        raise SetupError(f"--max-model-len {length} exceeds the model's {config.max_position_embeddings} positions")
    cached = config.num_hidden_layers * num_kv_heads(config) * config.head_dim * 2 * 4
    if cached * length * max_batch > _MAX_CACHE_BYTES:
        raise SetupError(
            f"the KV cache would take {cached * length * max_batch >> 20} MiB, the limit is "
            f"{_MAX_CACHE_BYTES >> 20}; lower --max-batch {max_batch} or --max-model-len {length}"
        )
    shapes = expected_shapes(config)
    tensors = read_tensors(folder, shapes)
    model = Model(config, fuse(config, tensors), num_slots=max_batch, max_model_len=length)
    decoding = DecodingThread(Batch(model))
    routes = Routes(
        decoding,
        model,
        config=config,
        shapes=shapes,
        eos_ids=read_eos_ids(folder, config),
        model_name=model_name,
        folder=folder,
    )
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    description = f"parameters={num_parameters} max_model_len={length} max_batch={max_batch}"
    return Engine(decoding=decoding, routes=routes, description=description)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until told to stop; returns the exit code. What a person can mend is one line on stderr and code 1."""
    args = _parse(argv)
    setup_logging(args.log_level)
    # It grumbles about a wrong configuration before we say what is wrong.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    try:
        with _bind(args.host, args.port) as listener:
            engine = build(
                args.model,
                model_name=args.served_model_name,
                max_batch=args.max_batch,
                max_model_len=args.max_model_len,
            )
            return asyncio.run(serve(engine, listener))
    except RollmillError as error:
        sys.stderr.write(f"engine: {error}\n")
        return 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.engine", description="The small CPU engine.")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder of a Qwen3ForCausalLM")
    parser.add_argument("--served-model-name", required=True, help="the name that requests may give")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_between(0, 65535), required=True, help="0 takes a free one and logs it")
    parser.add_argument("--max-batch", type=_between(1, 4096), default=64, help="requests decoded at once")
    parser.add_argument("--max-model-len", type=_between(2, 1 << 20), help="tokens of prompt and answer")
    parser.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    return parser.parse_args(argv)


def _between(low: int, high: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not in {low}..{high}")
        return int(text)

    return whole_number


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _address_error(host, port, error) from error
    return listener


def _address_error(host: str, port: int, error: OSError) -> SetupError:
    cause = "is in use" if error.errno == errno.EADDRINUSE else f"can't be used: {error.strerror}"
    return SetupError(f"{host}:{port} {cause}; choose another --port")


async def serve(engine: Engine, listener: socket.socket) -> int:
    """Serve on a bound socket until SIGTERM or SIGINT (returns 0), or the decoding thread's death (1)."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    runner = web.AppRunner(
        engine.routes.app(), access_log=None, handler_cancellation=True, shutdown_timeout=_STOP_WITHIN_S
    )
    await runner.setup()
    engine.decoding.start()
    host, port = listener.getsockname()[:2]
    try:
        await web.SockSite(runner, listener, backlog=1024).start()
    except OSError as error:  # two engines may bind the same port, only one of them can listen
        raise _address_error(host, port, error) from error
    logger.info(
        "engine ready url=http://%s:%d %s pid=%d: the small CPU engine, a stand-in for vLLM on machines without a GPU",
        host,
        port,
        engine.description,
        os.getpid(),
    )
    code = await _until_stopped(engine.decoding, stopped)
    await asyncio.to_thread(engine.decoding.stop, timeout_s=_STOP_WITHIN_S)
    await runner.cleanup()
    logger.info("engine stopped url=http://%s:%d", host, port)
    return code


async def _until_stopped(decoding: DecodingThread, stopped: asyncio.Event) -> int:
    """Waits for a signal, and looks once a second whether the decoding thread lives."""
    while decoding.alive:
        try:
            await asyncio.wait_for(stopped.wait(), timeout=1.0)
        except TimeoutError:
            continue
        return 0
    logger.error("engine dead: ending in %.0f s", _DEAD_FOR_S)
    await asyncio.wait({asyncio.ensure_future(stopped.wait())}, timeout=_DEAD_FOR_S)
    return 1


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    # Taking torch and transformers down in order costs a second or more of CPU, and there is nothing left to save.
    os._exit(exit_code)
