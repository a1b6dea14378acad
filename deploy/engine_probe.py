"""Asks a server that somebody started whether episodes of a run can be sampled on it, before it is given any."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from common.errors import SetupError

TIMEOUT_S = 10.0
GENERATE = "/inference/v1/generate"
PROBE_TEXT = 'Sum up 3 + 14: naïve <b>x_1</b>\n\t{"α": [15, 92]} ½'
"""Words, digits, spaces, markup and bytes beyond ASCII: tokenizers that differ at all differ here."""
NO_FOLDER = "/rollmill/no-such-version"
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Engines stand nearby: no proxy of the environment is asked."""


def normal_url(url: str) -> str:
    """`http://host:port` as the database knows it. Raises SetupError for anything else."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise SetupError(f"{url} is no engine's address: give http://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}"


def check_engine(url: str, *, model: Path, served_name: str, lora: bool = False) -> None:
    """Return if the engine is up, serves `served_name`, and fits the model folder and what the keeper will ask of it.

    That is to load adapters with `lora`, else whole models. That the weights under the adapters are the run's start
    weights is nothing that a server tells.

    Raises SetupError that names the first thing that is missing, and what to do.
    """
    _check_up(url)
    _check_name(url, served_name)
    vocab_size = read_vocab_size(model)
    _check_generate(url, token_id=vocab_size - 1)
    _check_vocabulary(url, vocab_size=vocab_size, model=model)
    _check_tokenizer(url, model=model, served_name=served_name)
    if lora:
        _check_lora(url)
    else:
        _check_hot_load(url)


def num_requests(url: str) -> int | None:
    """Requests that run or wait on the engine; None = it does not answer."""
    try:
        with _OPENER.open(url + "/metrics", timeout=TIMEOUT_S) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return None
    counted = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return round(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(counted)))


def read_vocab_size(model: Path) -> int:
    """Of a checkpoint folder. Raises SetupError."""
    try:
        size = json.loads((model / "config.json").read_text())["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError):
        raise SetupError(f"model folder {model} has no config.json with a vocab_size") from None
    return int(size)


def _check_up(url: str) -> None:
    status, detail = _ask(url, "/health")
    if status != 200:
        raise SetupError(f"engine {url} is not healthy: /health answers {status}: {detail}")
    status, reply = _ask(url, "/weight_info")
    if status != 200 or not isinstance(reply, dict) or "weight_version" not in reply:
        raise SetupError(
            f"{url} answers, but has no /weight_info (status {status}): it is no vLLM 0.32 or newer with "
            "VLLM_SERVER_DEV_MODE=1"
        )
    status, reply = _ask(url, "/is_paused")
    if status == 200 and isinstance(reply, dict) and reply.get("is_paused"):
        raise SetupError(f"engine {url} is paused: resume it first (POST {url}/resume)")


def _check_name(url: str, served_name: str) -> None:
    status, reply = _ask(url, "/v1/models")
    try:
        names = [card["id"] for card in reply["data"]]
    except (KeyError, TypeError):
        raise SetupError(f"engine {url} /v1/models answers {status}: {reply!r:.200}") from None
    if served_name not in names:
        raise SetupError(
            f"engine {url} serves {', '.join(names)}, not {served_name}: "
            f"if that is the run's model, say so with --model-name {names[0] if names else 'NAME'}"
        )


def _check_generate(url: str, *, token_id: int) -> None:
    status, reply = _generate(url, token_id)
    if status == 400 and "vocabulary" in str(reply):
        raise SetupError(f"engine {url} does not know token id {token_id}, the run's model does: {reply}")
    if status in (403, 404):
        raise SetupError(f"engine {url} {GENERATE} answers {status}: start vLLM with --enable-scale-out")
    try:
        choice = reply["choices"][0]
        whole = len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 1 and choice["weight_versions"]
    except (KeyError, TypeError, IndexError):
        whole = False
    if status != 200 or not whole:
        raise SetupError(
            f"engine {url} {GENERATE} answers {status} without id, log-prob and weight version: {reply!r:.200}"
        )


def _check_vocabulary(url: str, *, vocab_size: int, model: Path) -> None:
    status, _ = _generate(url, vocab_size)
    if status == 200:
        raise SetupError(
            f"engine {url} serves another model: it knows token id {vocab_size}, "
            f"and the ids of {model} end at {vocab_size - 1}"
        )


def _check_tokenizer(url: str, *, model: Path, served_name: str) -> None:
    """Where the engine can tell: a server of ids alone has no tokenizer."""
    body = {"model": served_name, "prompt": PROBE_TEXT, "add_special_tokens": False}
    status, reply = _ask(url, "/tokenize", body)
    if status != 200 or not isinstance(reply, dict) or "tokens" not in reply:
        return
    try:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise SetupError(f"{model / 'tokenizer.json'} cannot be read: {error}") from None
    if reply["tokens"] != tokenizer.encode(PROBE_TEXT, add_special_tokens=False).ids:
        raise SetupError(
            f"engine {url} splits a text into other ids than {model / 'tokenizer.json'}: another tokenizer"
        )


def _check_hot_load(url: str) -> None:
    """A folder that does not exist: whoever can load versions says so, and touches nothing."""
    status, reply = _ask(url, "/collective_rpc", {"method": "load_version", "args": [NO_FOLDER, "probe"]})
    results = reply.get("results") if isinstance(reply, dict) else None
    if status != 200 or not results or not all(isinstance(one, dict) and one.get("ok") is False for one in results):
        raise SetupError(
            f"engine {url} cannot load versions (status {status}): start vLLM with VLLM_SERVER_DEV_MODE=1, "
            "--worker-extension-cls rollmill_vllm.WorkerExtension, and workers/engine/vllm_plugin on PYTHONPATH"
        )


def _check_lora(url: str) -> None:
    """A folder that does not exist: whoever can load adapters says that there is none in it."""
    status, reply = _ask(url, "/v1/load_lora_adapter", {"lora_name": "rollmill-probe", "lora_path": NO_FOLDER})
    if status == 200 or NO_FOLDER not in str(reply):
        raise SetupError(
            f"engine {url} cannot load LoRA adapters (status {status}: {reply!r:.200}), and the run trains one: start "
            "vLLM with --enable-lora, --max-loras, --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        )


def _generate(url: str, token_id: int) -> tuple[int, Any]:
    params = {"max_tokens": 1, "logprobs": 0}
    return _ask(url, GENERATE, {"token_ids": [token_id], "sampling_params": params})


def _ask(url: str, path: str, body: dict[str, object] | None = None) -> tuple[int, Any]:
    """Status and body, parsed where it is JSON. Raises SetupError where nobody answers in time."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"Content-Type": "application/json"})
    try:
        with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
            status, raw = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, raw = error.code, error.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise SetupError(f"no engine answers at {url}{path}: {reason}") from None
    except http.client.HTTPException as error:
        raise SetupError(f"{url} does not speak HTTP: {type(error).__name__}") from None
    try:
        return status, json.loads(raw)
    except ValueError:
        return status, raw.decode(errors="replace")[:200]
