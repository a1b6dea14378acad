"""`python -m workers.first_prompts CONFIG_JSON`: how many ids the first prompts of a run's first tasks have, as JSON.

Asked by `rollmill up --dry-run`. Needs neither a sandbox nor an engine.
"""

from __future__ import annotations

import json
import sys

from common.config import RunConfig
from workers.feeder import read_tasks
from workers.handlers.base import Prepared, returned
from workers.handlers.registry import load_handler
from workers.render.of_run import renderer_of

NUM_TASKS = 4


def first_prompt_lengths(config: RunConfig, *, num_tasks: int = NUM_TASKS) -> list[int]:
    """Ids of the prompt that RUN would send first, for each of the first tasks. Raises what the handler raises."""
    handler, renderer = load_handler(config.handler), renderer_of(config)
    lengths = []
    for _, payload in read_tasks(config)[:num_tasks]:
        prepared = returned(handler.init(payload), Prepared, f"init of handler {config.handler}")
        lengths.append(len(renderer.first_prompt(prepared.messages, prepared.tools)))
    return lengths


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(first_prompt_lengths(RunConfig.model_validate_json(sys.argv[1])))}\n")
