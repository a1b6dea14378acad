"""The conversations with which a renderer proves itself: what differs between templates is in them."""

from __future__ import annotations

from common.episode import Message, ToolCall, ToolSpec

PROBE_TOOL = ToolSpec(
    name="probe",
    description="Probe.",
    parameters={"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
)
PROBE_PROMPT = (Message(role="user", content="Go."),)
UNICODE = "e\u0301 \u00e9 \u6f22\u5b57 \U0001f469\u200d\U0001f4bb"
"""A letter in two pieces and in one, wide letters, a sign of three code points."""


def probe_call(num_calls: int) -> tuple[ToolCall, ...]:
    """That many parallel calls."""
    return tuple(ToolCall(name=PROBE_TOOL.name, arguments={"x": UNICODE}) for _ in range(num_calls))


def tool_probe(*, parallel_calls: bool) -> tuple[Message, ...]:
    """Two turns with tools: parallel results, text beside calls, empty content, an empty result, a trailing newline."""
    return (
        *PROBE_PROMPT,
        Message(role="assistant", content="Two calls.", tool_calls=probe_call(2 if parallel_calls else 1)),
        Message(role="tool", content=UNICODE),
        Message(role="tool", content="second result\n"),
        Message(role="assistant", content="", tool_calls=probe_call(1)),
        Message(role="tool", content=""),
    )


def user_probe() -> tuple[Message, ...]:
    """A final answer to which a user has more to say, twice."""
    said = Message(role="assistant", content="Done.")
    return (*PROBE_PROMPT, said, Message(role="user", content=UNICODE), said, Message(role="user", content="More?"))
