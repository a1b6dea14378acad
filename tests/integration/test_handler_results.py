"""What INIT and EVAL make of a handler that returns something else than it must."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from common.config import TINY_MODELS
from common.errors import EpisodeError
from common.outcomes import Outcome
from common.settings import Settings
from tests.integration.world import World
from workers.eval import Eval
from workers.evaluator import judging as judges
from workers.init import Init
from workers.render import Renderer
from workers.run import Run
from workers.sandbox import open_backend
from workers.sandbox.protocol import OPEN

MODEL = TINY_MODELS / "tiny-calculator"


class Returning:
    """A handler that returns what it was given, from every call."""

    name = "calculator"

    def __init__(self, value: object) -> None:
        self._value = value

    def init(self, payload: object) -> Any:
        return self._value

    def eval(self, payload: object, transcript: object) -> Any:
        return self._value


@pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), (1.0, "float"), ({"messages": []}, "dict")])
def test_wrong_result_fails_the_episode_and_names_both_types(
    world: World, tmp_path: Path, value: object, kind: str
) -> None:
    handler: Any = Returning(value)
    (wakeup, other) = world.feed(1)
    backend = open_backend(Settings(data_dir=tmp_path))
    init = Init(world.database, handler=lambda name: handler, backend=backend, node="here")
    with pytest.raises(EpisodeError) as refused:
        init(world.must_claim(wakeup))
    assert (refused.value.outcome, refused.value.is_final) == (Outcome.HANDLER_FAILED, True)
    assert refused.value.detail == f"init of handler calculator must return Prepared, got {kind}"

    evaluate = Eval(handler=lambda name: handler)
    with pytest.raises(EpisodeError) as refused:
        evaluate(world.must_claim(world.sample(world.prepare(other))))
    assert (refused.value.outcome, refused.value.is_final) == (Outcome.HANDLER_FAILED, True)
    assert refused.value.detail == f"eval of handler calculator must return Score, got {kind}"


class Judging(Returning):
    """Judges files, and has no sandbox that they could lie in."""

    def submits(self, payload: object) -> Any:
        raise AssertionError("the agent has played")

    def judge(self, payload: object, transcript: object, judge: object) -> Any:
        raise AssertionError("there is nothing to judge")


def test_a_handler_that_judges_files_without_a_sandbox_fails_the_episode_before_it_is_played(
    world: World, tmp_path: Path
) -> None:
    engines: Any = None
    handler: Any = Judging(None)
    play = Run(
        database=world.database,
        engines=engines,
        handler=lambda name: handler,
        renderer=lambda config: Renderer.from_folder(MODEL),
        backend=open_backend(Settings(data_dir=tmp_path)),
        node="here",
    )
    with pytest.raises(EpisodeError, match="calculator judges files, and its init prepares no sandbox") as refused:
        asyncio.run(play(world.must_claim(world.prepare(world.feed()[0]))))
    assert (refused.value.outcome, refused.value.is_final) == (Outcome.HANDLER_FAILED, True)


def test_files_that_run_has_not_handed_over_are_not_asked_for_again(world: World, tmp_path: Path) -> None:
    claim = world.must_claim(world.sample(world.prepare(world.feed()[0])))
    judging = judges.Judging(world.database, lambda: open_backend(Settings(data_dir=tmp_path)))
    with pytest.raises(EpisodeError, match=f"RUN handed over no files of episode {claim.episode_id}") as refused:
        judging.judge(claim, OPEN)
    assert (refused.value.outcome, refused.value.is_final) == (Outcome.HANDLER_FAILED, True)
