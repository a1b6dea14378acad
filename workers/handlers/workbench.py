"""Mend a program and say what it prints then: an example of a handler whose agents have all the sandbox's tools."""

from __future__ import annotations

import random
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, JsonValue

from common.episode import Message, ToolCall
from workers.handlers.answers import score_answer
from workers.handlers.base import Prepared, Score
from workers.handlers.sandbox_tools import TOOLS, call_sandbox_tool
from workers.sandbox.protocol import SandboxSession

NUM_AMOUNTS = 12
QUESTION = "total.py must print the sum of all amounts in amounts.csv, but it fails. Mend it. What does it print?"
PROGRAM = """import csv

with open("amounts.csv") as file:
    rows = list(csv.reader(file))
print(sum(row[1] for row in rows))
"""
"""It adds up texts, and its first row is the names of the columns."""


class Payload(BaseModel):
    """One task of this kind; a data set may carry more keys."""

    model_config = ConfigDict(frozen=True)

    question: str
    answer: int
    files: dict[str, str]
    """Relative path -> text."""


class Workbench:
    """The handler `workers.handlers.workbench:Workbench`."""

    name = "workbench"

    def tasks(self, *, seed: int, num_tasks: int) -> Iterator[dict[str, JsonValue]]:
        """Payloads with random amounts."""
        rng = random.Random(f"workbench/{seed}")
        for _ in range(num_tasks):
            amounts = [rng.randint(10, 99) for _ in range(NUM_AMOUNTS)]
            table = "name,amount\n" + "".join(f"item{number},{each}\n" for number, each in enumerate(amounts))
            files: dict[str, JsonValue] = {"amounts.csv": table, "total.py": PROGRAM}
            yield {"question": QUESTION, "answer": sum(amounts), "files": files}

    def init(self, payload: dict[str, JsonValue]) -> Prepared:
        """The question, all tools, and a sandbox with the files."""
        task = Payload.model_validate(payload)
        return Prepared(
            messages=(Message(role="user", content=task.question),), tools=TOOLS, files=task.files, needs_sandbox=True
        )

    async def call_tool(self, call: ToolCall, payload: dict[str, JsonValue], sandbox: SandboxSession | None) -> str:
        """What the tool says."""
        assert sandbox is not None, "workbench episodes have a sandbox"
        return await call_sandbox_tool(call, sandbox)

    def eval(self, payload: dict[str, JsonValue], transcript: tuple[Message, ...]) -> Score:
        """1 for the right sum after a tool was used, else 0."""
        return score_answer(transcript, Payload.model_validate(payload).answer)
