"""Where an episode's commands run. `open_backend` chooses the strongest kind that works on this machine."""

from __future__ import annotations

from workers.sandbox.backend import open_backend

__all__ = ["open_backend"]
