"""Asks a server that somebody started whether episodes of a run can be sampled on it, before it is given any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.context import NeededContext, needed_context
from common.errors import SetupError
from common.sampling import SGLANG_PLAIN
from deploy.engine_ask import EngineKind, ask, asked
from deploy.engine_sampling import COMPLETIONS, GENERATE, check_sampling, generate, sampled_of

SGLANG_GENERATE = "/generate"
PROBE_TEXT = 'Sum up 3 + 14: naïve <b>x_1</b>\n\t{"α": [15, 92]} ½'
"""Words, digits, spaces, markup and bytes beyond ASCII: tokenizers that differ at all differ here."""
NO_FOLDER = "/rollmill/no-such-version"
REMARKS = {
    EngineKind.VLLM_COMPLETIONS: "it has no generate route, so it is asked through /v1/completions, and a turn during "
    "which a version was loaded counts as the older one's; --enable-scale-out opens the route",
    EngineKind.SGLANG: "it is SGLang: this has been tested against the shapes of its answers, not on a GPU yet",
}
"""What to know of an engine that is not vLLM with everything open."""
ONE_TOKEN = 1e-6
"""As top-p only the likeliest token is left. Its log-prob is 0 where log-probs are of what was sampled from."""
MAX_CERTAIN = 1e-3
"""How far from 0 that log-prob may be."""


def check_engine(
    url: str,
    *,
    model: Path,
    served_name: str,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_row_tokens: int | None = None,
    lora: bool = False,
) -> EngineKind:
    """Return what it is if it is up, serves `served_name`, and fits the model folder, the run's way of sampling
    (`temperature`, `top_p`, `max_row_tokens`) and what the keeper will ask of it: to load adapters with `lora`, else
    whole models.

    That the weights under the adapters are the run's start weights is nothing that a server tells.
    Raises SetupError that names the first thing that is missing, and what to do.
    """
    vocab_size = read_vocab_size(model)
    _check_rows(model, vocab_size)
    kind = _find_kind(url)
    _check_up(url, kind)
    _check_name(url, served_name)
    _check_context(url, needed_context(model, max_row_tokens))
    if kind is EngineKind.SGLANG:
        # What lies beyond its vocabulary would end it, so only ids that every model has are asked for.
        _check_sglang(url, top_p=top_p, lora=lora)
    else:
        kind = _check_generate(url, token_id=vocab_size - 1, exact=temperature != 1.0 or top_p != 1.0)
        _check_vocabulary(url, kind, vocab_size=vocab_size, model=model)
        check_sampling(url, kind, vocab_size=vocab_size)
    _check_tokenizer(url, model=model, served_name=served_name)
    if lora:
        _check_lora(url)
    elif kind is not EngineKind.SGLANG:
        _check_hot_load(url)
    return kind


def num_requests(url: str) -> int | None:
    """Requests that run or wait on the engine; None = it does not answer."""
    try:
        status, text = ask(url, "/metrics", as_text=True)
    except SetupError:
        return None
    names = (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
    )
    counted = tuple(f"{name}{{" for name in names)
    lines = str(text).splitlines() if status == 200 else []
    return round(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(counted)))


def read_vocab_size(model: Path) -> int:
    """Rows of a checkpoint folder's embeddings. Raises SetupError."""
    try:
        size = json.loads((model / "config.json").read_text())["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError):
        raise SetupError(f"model folder {model} has no config.json with a vocab_size") from None
    return int(size)


def _read_tokenizer(model: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise SetupError(f"{model / 'tokenizer.json'} cannot be read: {error}") from None


def _check_rows(model: Path, vocab_size: int) -> None:
    largest = max(_read_tokenizer(model).get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= vocab_size:
        raise SetupError(
            f"model {model} cannot be used: its tokenizer has ids up to {largest}, its embeddings {vocab_size} rows"
        )


def _find_kind(url: str) -> EngineKind:
    status, reply = ask(url, "/weight_info")
    if status == 200 and asked(reply, "weight_version") is not None:
        return EngineKind.VLLM
    other, reply = ask(url, "/model_info")
    if other == 200 and asked(reply, "weight_version") is not None:
        return EngineKind.SGLANG
    if ask(url, "/health")[0] != 200 and ask(url, "/v1/models")[0] != 200:
        raise SetupError(f"{url} answers, but is no engine: /health and /v1/models are none of its pages")
    raise SetupError(
        f"{url} answers, but has no /weight_info (status {status}): it is no vLLM 0.32 or newer with "
        "VLLM_SERVER_DEV_MODE=1, and no SGLang 0.5.23 or newer"
    )


def _check_up(url: str, kind: EngineKind) -> None:
    if kind is EngineKind.SGLANG:
        status, detail = ask(url, "/ready")
        if status != 200:
            raise SetupError(f"engine {url} is starting up or paused: /ready answers {status}: {detail}")
        return
    status, detail = ask(url, "/health")
    if status != 200:
        raise SetupError(f"engine {url} is not healthy: /health answers {status}: {detail}")
    status, reply = ask(url, "/is_paused")
    if status == 200 and asked(reply, "is_paused"):
        raise SetupError(f"engine {url} is paused: resume it first (POST {url}/resume)")


def _check_name(url: str, served_name: str) -> None:
    status, reply = ask(url, "/v1/models")
    try:
        names = [card["id"] for card in reply["data"]]
    except (KeyError, TypeError):
        raise SetupError(f"engine {url} /v1/models answers {status}: {reply!r:.200}") from None
    if served_name not in names:
        raise SetupError(
            f"engine {url} serves {', '.join(names)}, not {served_name}: "
            f"if that is the run's model, say so with --model-name {names[0] if names else 'NAME'}"
        )


def _check_context(url: str, needed: NeededContext | None) -> None:
    cards = asked(ask(url, "/v1/models")[1], "data") or []
    held = [limit for card in cards if isinstance(limit := asked(card, "max_model_len"), int)]
    if needed is not None and held and (lack := needed.lack(held[0])):
        raise SetupError(f"engine {url} {lack}")


def _check_generate(url: str, *, token_id: int, exact: bool) -> EngineKind:
    """Which route gives an id and its log-prob. `exact`: the run samples from another distribution than the model's."""
    kind = EngineKind.VLLM
    status, reply = generate(url, kind, [token_id], max_tokens=1, top_p=ONE_TOKEN)
    if status in (403, 404):
        kind = EngineKind.VLLM_COMPLETIONS
        status, reply = generate(url, kind, [token_id], max_tokens=1, top_p=ONE_TOKEN)
        if status in (403, 404):
            raise SetupError(f"engine {url} {GENERATE} answers {status}: start vLLM with --enable-scale-out")
    if status == 400 and "vocabulary" in str(reply):
        raise SetupError(f"engine {url} does not know token id {token_id}, the run's model does: {reply}")
    logprob = _logprob(reply, kind)
    if status != 200 or logprob is None:
        path = GENERATE if kind is EngineKind.VLLM else COMPLETIONS
        wanted = "id, log-prob and weight version" if kind is EngineKind.VLLM else "id and log-prob"
        raise SetupError(f"engine {url} {path} answers {status} without {wanted}: {reply!r:.200}")
    if exact and abs(logprob) > MAX_CERTAIN:
        raise SetupError(
            f"engine {url} gives log-probs from before temperature and top-p, which the run sets: "
            "start vLLM with --logprobs-mode processed_logprobs"
        )
    return kind


def _logprob(reply: Any, kind: EngineKind) -> float | None:
    """Of the one id that was asked for; None where the answer lacks what a capture needs."""
    if kind is EngineKind.VLLM and not asked(reply, "choices", 0, "weight_versions"):
        return None
    ids, logprobs = sampled_of(reply, kind)
    whole = len(ids) == len(logprobs) == 1 and isinstance(logprobs[0], int | float)
    return float(logprobs[0]) if whole else None


def _check_sglang(url: str, *, top_p: float, lora: bool) -> None:
    if lora:
        raise SetupError(f"engine {url} is SGLang: the run trains an adapter (train.lora_rank), give it vLLM")
    if top_p < 1.0:
        raise SetupError(
            f"engine {url} is SGLang, whose log-probs leave top-p out: set rollout.top_p = 1, it is {top_p:g}"
        )
    params = {**SGLANG_PLAIN, "max_new_tokens": 1}
    body: dict[str, object] = {"input_ids": [0], "sampling_params": params, "return_logprob": True}
    status, reply = ask(url, SGLANG_GENERATE, body)
    ids, info = asked(reply, "output_ids") or [], asked(reply, "meta_info")
    logprobs = asked(info, "output_token_logprobs") or []
    if status != 200 or not len(ids) == len(logprobs) == 1 or not asked(info, "weight_versions"):
        raise SetupError(
            f"engine {url} {SGLANG_GENERATE} answers {status} without id, log-prob and weight_versions "
            f"(SGLang 0.5.23 or newer): {reply!r:.200}"
        )


def _check_vocabulary(url: str, kind: EngineKind, *, vocab_size: int, model: Path) -> None:
    status, _ = generate(url, kind, [vocab_size], max_tokens=1, top_p=ONE_TOKEN)
    if status == 200:
        raise SetupError(
            f"engine {url} serves another model: it knows token id {vocab_size}, "
            f"and the ids of {model} end at {vocab_size - 1}"
        )


def _check_tokenizer(url: str, *, model: Path, served_name: str) -> None:
    """Where the engine can tell: a server of ids alone has no tokenizer."""
    body: dict[str, object] = {"model": served_name, "prompt": PROBE_TEXT, "add_special_tokens": False}
    status, reply = ask(url, "/tokenize", body)
    tokens = asked(reply, "tokens")
    if status == 200 and tokens and tokens != _read_tokenizer(model).encode(PROBE_TEXT, add_special_tokens=False).ids:
        raise SetupError(
            f"engine {url} splits a text into other ids than {model / 'tokenizer.json'}: another tokenizer"
        )


def _check_hot_load(url: str) -> None:
    """A folder that does not exist: whoever can load versions says so, and touches nothing."""
    status, reply = ask(url, "/collective_rpc", {"method": "load_version", "args": [NO_FOLDER, "probe"]})
    results = asked(reply, "results")
    if status != 200 or not results or not all(asked(one, "ok") is False for one in results):
        raise SetupError(
            f"engine {url} cannot load versions (status {status}): start vLLM with VLLM_SERVER_DEV_MODE=1, "
            "--worker-extension-cls rollmill_vllm.WorkerExtension, and workers/engine/vllm_plugin on PYTHONPATH"
        )


def _check_lora(url: str) -> None:
    """A folder that does not exist: whoever can load adapters says that there is none in it."""
    status, reply = ask(url, "/v1/load_lora_adapter", {"lora_name": "rollmill-probe", "lora_path": NO_FOLDER})
    if status == 200 or NO_FOLDER not in str(reply):
        raise SetupError(
            f"engine {url} cannot load LoRA adapters (status {status}: {reply!r:.200}), and the run trains one: start "
            "vLLM with --enable-lora, --max-loras, --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        )
