"""The engine that comes with the one-machine stack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.config import TINY_MODELS, RolloutConfig, RunConfig
from common.errors import SetupError
from deploy.engine import EngineKind, check_small_context, engine_spec


def test_the_small_engine_is_not_taken_where_it_would_cut_episodes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4097}))
    config = RunConfig(name="run-a", model=tmp_path)
    words = "run run-a needs a context of 4097 ids, .* small engine has one of 4096: set rollout.max_row_tokens"
    with pytest.raises(SetupError, match=words):
        check_small_context(EngineKind.SMALL, config)
    check_small_context(EngineKind.VLLM, config)
    check_small_context(EngineKind.SMALL, RunConfig(name="run-a", model=TINY_MODELS / "tiny-calculator"))
    check_small_context(EngineKind.SMALL, config.model_copy(update={"rollout": RolloutConfig(max_row_tokens=4097)}))


@pytest.mark.parametrize(
    ("max_row_tokens", "told"), [(None, []), (60, []), (4096, []), (4097, ["--max-model-len", "4097"])]
)
def test_the_small_engine_is_told_of_rows_beyond_its_usual_context(max_row_tokens: int | None, told: list[str]) -> None:
    spec = engine_spec(EngineKind.SMALL, model=Path("/m"), port=8000, env={}, max_row_tokens=max_row_tokens)
    assert list(spec.argv[spec.argv.index("policy") + 1 :]) == told
