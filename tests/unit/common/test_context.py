"""What a run needs of an engine's context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.config import TINY_MODELS
from common.context import needed_context


def test_it_is_the_longest_row_where_that_is_set_and_the_models_context_else(tmp_path: Path) -> None:
    for max_row_tokens, num_ids in ((None, 512), (60, 60)):
        needed = needed_context(TINY_MODELS / "tiny-calculator", max_row_tokens)
        assert needed is not None
        assert needed.num_ids == num_ids
        assert needed.lack(num_ids) is needed.lack(None) is None
        assert f"a context of {num_ids - 1} ids and the run needs {num_ids}" in str(needed.lack(num_ids - 1))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 77}}))
    needed = needed_context(tmp_path, None)
    assert needed is not None
    assert needed.num_ids == 77


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"max_position_embeddings": "long"}'])
def test_a_folder_that_does_not_say_asks_for_nothing(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert needed_context(tmp_path, None) is None
