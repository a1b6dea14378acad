"""A teacher behind HTTP: its numbers by id, its outages without a wrong number, its vocabulary checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from common.config import TINY_MODELS
from common.config_distill import DistillConfig
from common.errors import RollmillError, SetupError
from tests.served import served
from trainer.failures import TeacherUnavailable
from trainer.samples import Sample
from trainer.teacher import read_tokenizer, with_teacher_logprobs
from trainer.teacher_server import COMPLETIONS, ServedTeacher
from workers.scripted_engine import Fault, ScriptedEngine

MakeSample = Callable[..., Sample]

FOLDER = TINY_MODELS / "tiny-calculator"


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    """Scores id i at position p with -(i + p) / 1000."""
    engine = ScriptedEngine(lambda prompt: [1])
    tokenizer = read_tokenizer(FOLDER)
    engine.score = lambda ids: [-(token_id + position) / 1000 for position, token_id in enumerate(ids)]
    engine.decode = lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)
    with served(engine):
        yield engine


def teacher_at(engine: ScriptedEngine, *, timeout_s: float = 60.0, folder: Path = FOLDER) -> ServedTeacher:
    distill = DistillConfig(teacher=engine.url, request_timeout_s=timeout_s, max_requests=1)
    return ServedTeacher(distill, tokenizer=read_tokenizer(folder))


def test_sampled_ids_have_their_own_logprobs(engine: ScriptedEngine, make_random_sample: MakeSample) -> None:
    rows = [make_random_sample(number, length=12 + 4 * number) for number in range(3)]
    scored, metrics = with_teacher_logprobs(rows, teacher_at(engine))
    for row in scored:
        expected_L = np.where(row.mask_L, -(row.ids_L + np.arange(len(row.ids_L))) / 1000, 0)
        assert row.teacher_logprobs_L == pytest.approx(expected_L, abs=1e-6)
    assert metrics["teacher_kl"] < -1
    assert engine.num_tokens == 3


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.CUT, Fault.CLOSED, Fault.HANG])
def test_what_it_said_before_an_outage_is_kept_and_only_the_rest_is_asked_again(
    engine: ScriptedEngine, make_random_sample: MakeSample, fault: Fault
) -> None:
    rows = [make_random_sample(number) for number in range(3)]
    teacher = teacher_at(engine, timeout_s=2.0 if fault is Fault.HANG else 60.0)
    engine.fail_next(COMPLETIONS, fault)
    with pytest.raises(TeacherUnavailable, match=f"teacher {engine.url}{COMPLETIONS}"):
        teacher.logprobs(rows)
    before = engine.calls.count(COMPLETIONS)
    assert set(teacher.logprobs(rows)) == {row.key for row in rows}
    assert engine.calls.count(COMPLETIONS) - before == len(rows) - (before - 1)


def test_row_that_it_has_no_room_for_is_named(engine: ScriptedEngine, make_random_sample: MakeSample) -> None:
    engine.max_model_len = 20
    with pytest.raises(RollmillError, match=r"episode 7 row 0: .* answers 400: .*maximum context length is 20"):
        teacher_at(engine).logprobs([make_random_sample(7)])


def test_server_without_logprobs_of_prompts_is_refused_at_the_start(engine: ScriptedEngine) -> None:
    engine.decode = lambda _: "\n"
    with pytest.raises(SetupError, match="has another tokenizer than the run's model: id 0 is '\\\\n' there"):
        teacher_at(engine).check()
    engine.score = lambda ids: []
    with pytest.raises(TeacherUnavailable):
        teacher_at(engine).check()


def test_server_of_the_same_vocabulary_passes_and_one_that_differs_in_one_added_token_does_not(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    teacher_at(engine).check()
    text = (FOLDER / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("<tool_response>", "<answer>"))
    with pytest.raises(SetupError, match=r"id [0-9]+ is '<tool_response>' there, '<answer>' here"):
        teacher_at(engine, folder=tmp_path).check()
