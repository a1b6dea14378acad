"""Handlers whose EVAL never comes to an end; the fleets under test import them by path."""

from __future__ import annotations

import os
import signal
import threading

from pydantic import JsonValue

from common.episode import Message
from workers.handlers.base import Score
from workers.handlers.noop import Noop


class Endless(Noop):
    """`tests.integration.deadly:Endless`: holds its message until its process is killed."""

    name = "endless"

    def eval(self, payload: dict[str, JsonValue], transcript: tuple[Message, ...]) -> Score:
        threading.Event().wait(600)
        return Score(reward=0.0)


class Poison(Noop):
    """`tests.integration.deadly:Poison`: kills its process."""

    name = "poison"

    def eval(self, payload: dict[str, JsonValue], transcript: tuple[Message, ...]) -> Score:
        os.kill(os.getpid(), signal.SIGKILL)
        return Score(reward=0.0)
