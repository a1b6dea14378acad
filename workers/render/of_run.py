"""The renderer that a run's configuration asks for; RUN plays with it, and the feeder proves it before it feeds."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from common.config import RenderConfig, RunConfig
from workers.render.renderer import Renderer


def renderer_of(config: RunConfig) -> Renderer:
    """Made once in a process. Raises SetupError, naming the model, when its template cannot be extended."""
    return _renderer(config.model, config.render.model_dump_json())


@lru_cache(maxsize=8)
def _renderer(model: Path, render_json: str) -> Renderer:
    render = RenderConfig.model_validate_json(render_json)
    return Renderer.from_folder(
        model, family=render.family, template_kwargs=render.template_kwargs, keep_thinking=render.keep_thinking
    )
