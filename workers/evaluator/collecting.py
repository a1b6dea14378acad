"""Takes what an agent hands in out of its sandbox, when nothing of the agent runs any more."""

from __future__ import annotations

from typing import Any

from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.evaluator.submission import MAX_NAME_BYTES, FileRules, Submission, checked, read_frames
from workers.sandbox.protocol import SandboxSession, ServerCall

COLLECT_TIMEOUT_S = 60.0
MAX_LEFT_OUT_REASONS = 16


async def collect(session: SandboxSession, rules: FileRules) -> Submission:
    """End all that runs in the sandbox and copy out the files that the rules want. Raises EpisodeError."""
    header, data = await session.call(
        ServerCall(
            name="collect",
            given={
                "wanted": rules.wanted_pattern,
                "refused": rules.refused_pattern,
                "file_bytes": rules.file_bytes,
                "total_bytes": rules.total_bytes,
                "num_files": rules.num_files,
            },
            timeout_s=COLLECT_TIMEOUT_S,
            most_bytes=rules.total_bytes + rules.num_files * (8 + MAX_NAME_BYTES),
        )
    )
    try:
        return Submission(files=checked(rules, read_frames(data)), left_out=_left_out(header.get("left_out")))
    except ValueError as error:
        raise EpisodeError(Outcome.SANDBOX_FAILED, f"what the sandbox hands over makes no sense: {error}") from None


def _left_out(given: Any) -> dict[str, int]:
    is_plain = isinstance(given, dict) and len(given) <= MAX_LEFT_OUT_REASONS
    if not is_plain or not all(isinstance(num, int) and name.isidentifier() for name, num in given.items()):
        raise ValueError(f"left out are {given!r:.100}")
    return dict(given)
