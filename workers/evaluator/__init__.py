"""Honest scores for files that an agent wrote: RUN hands them over, EVAL tests them in a sandbox of its own."""

from __future__ import annotations
