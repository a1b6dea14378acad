"""What a request says beside temperature and top-p, so that no default of a server changes what it samples from.

Servers take defaults from flags and from the model folder's generation_config.json. The trainer knows neither: a
log-prob under any of them is not the one that it recomputes. All that a server may have a default for is said.
"""

from __future__ import annotations

from collections.abc import Mapping

VLLM_PLAIN: Mapping[str, object] = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    # Else it also stops at what the folder calls ends, which another engine of the run need not do. Those that the
    # run's own model has are among the stop ids of each request.
    "ignore_eos": True,
    "watermarking": False,
}
"""For vLLM's generate route, in `sampling_params`, and for /v1/completions."""
SGLANG_PLAIN: Mapping[str, object] = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "min_new_tokens": 0,
    # With true it would not stop at the request's own stop ids either.
    "ignore_eos": False,
    "stop": None,
    "stop_regex": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "custom_params": None,
    "n": 1,
}
"""For SGLang's /generate, in `sampling_params`: --preferred-sampling-params stands in for each that is missing."""
