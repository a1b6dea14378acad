"""Run by vLLM's interpreter: a load that fails half-way, after every check was passed. Prints JSON of what followed.

vLLM itself is made to fail: no version that passes the checks makes it do so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from vllm import LLM, SamplingParams


def outputs(llm: LLM) -> list[object]:
    """Greedy ids and log-probs."""
    llm.reset_prefix_cache()
    params = SamplingParams(max_tokens=16, temperature=0, logprobs=0, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": list(range(5, 45))}], params, use_tqdm=False)
    ids = list(answer.outputs[0].token_ids)
    return [*ids, *(entry[token].logprob for entry, token in zip(answer.outputs[0].logprobs, ids, strict=True))]


def main(start: str, version: str) -> None:
    llm = LLM(
        model=start,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
        worker_extension_cls="rollmill_vllm.WorkerExtension",
    )
    before = outputs(llm)
    found: dict[str, Any] = {}

    def break_loading(model: Any) -> None:
        whole = model.load_weights

        def fail_once(weights: Iterable[Any]) -> Any:
            model.load_weights = whole
            whole(weight for number, weight in enumerate(weights) if number < 12)
            raise OSError("the disk is gone")

        model.load_weights = fail_once

    llm.apply_model(break_loading)
    (found["failed"],) = llm.collective_rpc("load_version", args=(version, "v1"))
    found["same_after_failure"] = outputs(llm) == before
    (found["loaded"],) = llm.collective_rpc("load_version", args=(version, "v1"))
    found["same_after_load"] = outputs(llm) == before
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
