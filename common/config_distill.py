"""Section [train.distill] of a run's configuration: a teacher, whose opinion of each sampled token is in the loss."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from common.config_section import Section


class DistillConfig(Section):
    """On-policy distillation: the policy is drawn to a teacher on the tokens that it samples itself.

    The teacher must have the run's tokenizer, id by id, which is checked at the start.
    """

    teacher: str = Field(min_length=1)
    """Folder of a model, which the trainer loads beside its own, frozen; or http://HOST:PORT of a vLLM server, which is
    asked for the log-probs of each row. A server says those of temperature 1, so rollout.temperature must be 1 then."""
    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Added to the advantage of each token is weight x (teacher's log-prob - the policy's), in nats."""
    with_rewards: bool = True
    """False = the teacher alone is learned from, rewards are only reported."""
    request_timeout_s: float = Field(default=120.0, gt=0)
    """Of one request to a server, the queue there included. One that fails is sent again, for ten minutes at most."""
    max_requests: int = Field(default=16, ge=1, le=1024)
    """Requests that a server is sent at once."""

    @property
    def is_server(self) -> bool:
        return self.teacher.startswith(("http://", "https://"))

    @field_validator("teacher")
    @classmethod
    def _has_an_address(cls, teacher: str) -> str:
        if "://" not in teacher:
            return teacher
        parts = urlsplit(teacher)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("a teacher is a folder or http://HOST:PORT")
        return teacher.rstrip("/")
