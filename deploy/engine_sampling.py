"""Asks a vLLM server whether it samples from its model's own distribution, before a run trains on its log-probs."""

from __future__ import annotations

from typing import Any

from common.errors import SetupError
from common.sampling import VLLM_PLAIN
from deploy.engine_ask import EngineKind, ask, asked

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
NUM_PROMPT = 8
NUM_SAMPLED = 24
"""Together shorter than any context."""
MAX_MEAN_GAP = 0.2
"""Nats. Well above what rounding in half precision comes to, so milder changes of the distribution are not seen."""


def generate(url: str, kind: EngineKind, ids: list[int], **params: object) -> tuple[int, Any]:
    """Status and answer of a request, sampled at temperature 1 but for what the params say."""
    wanted: dict[str, object] = {**VLLM_PLAIN, "temperature": 1.0, "top_p": 1.0, "logprobs": 0, **params}
    if kind is EngineKind.VLLM:
        return ask(url, GENERATE, {"token_ids": ids, "sampling_params": wanted})
    return ask(url, COMPLETIONS, {"prompt": ids, "return_token_ids": True, **wanted})


def sampled_of(reply: Any, kind: EngineKind) -> tuple[list[int], list[Any]]:
    """Ids of an answer's one choice, and what it says of their log-probs."""
    choice = asked(reply, "choices", 0)
    if kind is EngineKind.VLLM:
        logprobs = [asked(entry, "logprob") for entry in asked(choice, "logprobs", "content") or []]
    else:
        logprobs = asked(choice, "logprobs", "token_logprobs") or []
    return asked(choice, "token_ids") or [], logprobs


def check_sampling(url: str, kind: EngineKind, *, vocab_size: int) -> None:
    """Raise SetupError where the log-probs of sampled ids are not those that the same ids have as a prompt.

    The latter are always the model's own. They differ where the server changes the distribution by something that a
    request cannot turn off, such as a logits processor. Nothing is seen on a server that gives log-probs from before
    such changes, or none of prompts.
    """
    # Ids that do not belong together: after them a model is unsure, and whatever cuts its distribution shows.
    prompt = [place * (vocab_size - 1) // (NUM_PROMPT - 1) for place in range(NUM_PROMPT)]
    gap = _gap(url, kind, prompt)
    if gap > MAX_MEAN_GAP:
        # A version may have been loaded between the two questions, but hardly twice.
        gap = _gap(url, kind, prompt)
    if gap > MAX_MEAN_GAP:
        raise SetupError(
            f"engine {url} changes what it samples from: log-probs of {NUM_SAMPLED} ids at temperature 1 are off its "
            f"model's own by {gap:.2g} nats on average. Start it without logits processors, and without flags "
            "that change sampling"
        )


def _gap(url: str, kind: EngineKind, prompt: list[int]) -> float:
    """Mean distance, in nats, of the log-probs of sampled ids from those as a prompt; 0 where it does not say."""
    status, reply = generate(url, kind, prompt, max_tokens=NUM_SAMPLED)
    ids, logprobs = sampled_of(reply, kind)
    if status != 200 or len(ids) != len(logprobs) or not ids:
        raise SetupError(f"engine {url} answers {status} without ids and log-probs: {reply!r:.200}")
    if len(ids) < NUM_SAMPLED:
        raise SetupError(
            f"engine {url} ends after {len(ids)} ids where {NUM_SAMPLED} are asked for: start it without a "
            "max_new_tokens in --override-generation-config or --generation-config"
        )
    status, reply = generate(url, kind, [*prompt, *ids], max_tokens=1, prompt_logprobs=0)
    own = reply if kind is EngineKind.VLLM else asked(reply, "choices", 0)
    entries = (asked(own, "prompt_logprobs") or [])[len(prompt) :]
    expected = [asked(entry, str(token_id), "logprob") for token_id, entry in zip(ids, entries, strict=False)]
    if status != 200 or len(expected) != len(ids) or not all(isinstance(one, int | float) for one in expected):
        return 0.0
    return float(sum(abs(a - b) for a, b in zip(logprobs, expected, strict=True))) / len(ids)
