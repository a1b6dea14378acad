from __future__ import annotations

import pytest

from workers.handlers.calculator import Calculator
from workers.handlers.registry import load_handler
from workers.handlers.shell import Shell


def test_registered_names_load() -> None:
    assert isinstance(load_handler("calculator"), Calculator)
    assert isinstance(load_handler("shell"), Shell)


def test_an_import_path_loads() -> None:
    assert isinstance(load_handler("workers.handlers.shell:Shell"), Shell)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("calculater", r"unknown handler 'calculater': known are calculator, shell"),
        ("nowhere:Handler", r"handler 'nowhere:Handler': no module 'nowhere'"),
        ("workers.handlers.shell:Shel", r"has no class 'Shel'"),
        ("workers.handlers.shell:draw_search", r"has no class 'draw_search'"),
        ("workers.handlers.shell:Payload", r"lacks tasks, init, call_tool, eval"),
    ],
)
def test_a_wrong_name_says_what_would_be_right(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_handler(name)
