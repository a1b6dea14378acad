"""What INIT and EVAL make of a handler that returns something else than it must."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import EpisodeError
from common.outcomes import Outcome
from common.settings import Settings
from tests.integration.world import World
from workers.eval import Eval
from workers.init import Init
from workers.sandbox import open_backend


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
def test_wrong_result_fails_the_attempt_and_names_both_types(
    world: World, tmp_path: Path, value: object, kind: str
) -> None:
    handler: Any = Returning(value)
    (wakeup, other) = world.feed(1)
    backend = open_backend(Settings(data_dir=tmp_path))
    init = Init(world.database, handler=lambda name: handler, backend=backend, node="here")
    with pytest.raises(EpisodeError) as refused:
        init(world.must_claim(wakeup))
    assert refused.value.outcome is Outcome.HANDLER_FAILED
    assert refused.value.detail == f"init of handler calculator must return Prepared, got {kind}"

    evaluate = Eval(handler=lambda name: handler)
    with pytest.raises(EpisodeError) as refused:
        evaluate(world.must_claim(world.sample(world.prepare(other))))
    assert refused.value.outcome is Outcome.HANDLER_FAILED
    assert refused.value.detail == f"eval of handler calculator must return Score, got {kind}"
