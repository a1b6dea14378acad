"""Where an episode's commands run: a folder made by INIT, one confined process per command in RUN."""

from __future__ import annotations
