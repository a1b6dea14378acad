"""Messages to token ids and sampled ids to messages; the only package that knows chat templates."""

from __future__ import annotations

from workers.render.history import Call, Segment, first_difference, split_samples
from workers.render.renderer import Renderer

__all__ = ["Call", "Renderer", "Segment", "first_difference", "split_samples"]
