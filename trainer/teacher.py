"""The teacher of on-policy distillation: gives each row of a step its log-probs before the step is trained.

A teacher that is away is asked again (failures.py). Nothing stands in for what it has not said: the step waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from common.config import RunConfig
from common.episode import MAX_LOGPROB
from common.errors import RollmillError, SetupError
from common.model_folder import read_model_shape
from trainer.check_input import check_rows
from trainer.failures import TeacherUnavailable
from trainer.policy import Policy
from trainer.samples import RowKey, Sample
from trainer.teacher_server import ServedTeacher

CHECK_TIMEOUT_S = 5.0
"""Of one request, where a person waits for the answer."""


class Teacher(Protocol):
    """What the loop asks."""

    def check(self) -> None:
        """Raise SetupError unless it has the run's tokenizer, id by id; TeacherUnavailable when it is away."""

    def logprobs(self, samples: Sequence[Sample]) -> Mapping[RowKey, np.ndarray]:
        """[L] log-probs in nats of each row, all of which have sampled tokens; what it says elsewhere is ignored."""


class LoadedTeacher:
    """A model that the policy's processes hold beside the policy."""

    def __init__(self, folder: Path, *, start: Path, policy: Policy) -> None:
        self._folder = folder
        self._start = start
        self._policy = policy
        self._shape = read_model_shape(folder, field="train.distill.teacher")

    def check(self) -> None:
        check_same_tokenizer(self._folder, start=self._start)

    def logprobs(self, samples: Sequence[Sample]) -> Mapping[RowKey, np.ndarray]:
        try:
            check_rows(samples, context=self._shape.context, vocab_size=self._shape.vocab_size)
        except ValueError as error:
            raise RollmillError(f"teacher {self._folder}: {error}") from None
        return self._policy.teacher_logprobs(samples)


def make_teacher(config: RunConfig, policy: Policy) -> Teacher | None:
    """The teacher of the run; None = it has none. Raises SetupError for a folder without a model."""
    distill = config.train.distill
    if distill is None:
        return None
    if distill.is_server:
        return ServedTeacher(distill, tokenizer=read_tokenizer(config.model))
    return LoadedTeacher(Path(distill.teacher), start=config.model, policy=policy)


def check_teacher(config: RunConfig) -> None:
    """What the start checks of the run's teacher, without its weights and without waiting for one that is away.

    Raises SetupError.
    """
    distill = config.train.distill
    assert distill is not None, f"run {config.name} has no teacher"
    if not distill.is_server:
        read_model_shape(Path(distill.teacher), field="train.distill.teacher")
        check_same_tokenizer(Path(distill.teacher), start=config.model)
        return
    quick = distill.model_copy(update={"request_timeout_s": min(distill.request_timeout_s, CHECK_TIMEOUT_S)})
    try:
        ServedTeacher(quick, tokenizer=read_tokenizer(config.model)).check()
    except TeacherUnavailable as error:
        raise SetupError(
            f"train.distill.teacher = {distill.teacher} is away: {error}. Start it before the run"
        ) from None


def check_same_tokenizer(teacher: Path, *, start: Path) -> None:
    """Raise SetupError with the first id that is another one in the teacher's folder than in that of the start
    weights."""
    theirs, ours = read_tokenizer(teacher).get_vocab(), read_tokenizer(start).get_vocab()
    if theirs == ours:
        return
    token, token_id = min((ours.items() ^ theirs.items()), key=lambda item: (item[1], item[0]))
    raise SetupError(
        f"train.distill.teacher = {teacher} has another tokenizer than model = {start}: id {token_id} "
        f"is {token!r} in only one of them. A teacher of another vocabulary has no log-probs of these ids"
    )


def read_tokenizer(folder: Path) -> Tokenizer:
    """Of a model folder. Raises SetupError that names the file."""
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise SetupError(f"{path} cannot be read, so its ids can't be compared with the teacher's: {error}") from None


def with_teacher_logprobs(samples: Sequence[Sample], teacher: Teacher) -> tuple[list[Sample], dict[str, float]]:
    """The rows with what the teacher thinks of their sampled tokens, and the metric `teacher_kl`.

    That is the mean over the tokens of log behaviour - log teacher in nats: an estimate of KL(behaviour || teacher).
    Raises RollmillError that names the row when a number is none.
    """
    given = teacher.logprobs([sample for sample in samples if sample.num_tokens])
    scored = []
    for sample in samples:
        logprobs_L = np.zeros(len(sample.ids_L), dtype=np.float32)
        if sample.num_tokens:
            logprobs_L[sample.mask_L] = _checked(sample, given[sample.key][sample.mask_L])
        scored.append(replace(sample, teacher_logprobs_L=logprobs_L))
    gaps = np.concatenate(
        [np.zeros(0), *((row.behaviour_logprobs_L - row.teacher_logprobs_L)[row.mask_L] for row in scored)]
    )
    return scored, {"teacher_kl": float(gaps.mean()) if len(gaps) else 0.0}


def _checked(sample: Sample, logprobs_T: np.ndarray) -> np.ndarray:
    wrong_T = ~np.isfinite(logprobs_T) | (logprobs_T > MAX_LOGPROB)
    if wrong_T.any():
        first = int(wrong_T.argmax())
        position = int(np.flatnonzero(sample.mask_L)[first])
        raise RollmillError(
            f"episode {sample.episode_id} row {sample.index}: the teacher's log-prob of id "
            f"{int(sample.ids_L[position])} at position {position} is {logprobs_T[first]}"
        )
    checked_T: np.ndarray = np.minimum(logprobs_T, 0.0)
    return checked_T
