"""The small CPU engine: a laptop's stand-in for vLLM that speaks the same HTTP routes, for Qwen3 checkpoints.

It shows the loop without a GPU and is no serving engine: float32, one torch thread, batches that fit in memory.
"""

from __future__ import annotations
