"""Settings that would do nothing are refused by name, and every setting says what it does."""

from __future__ import annotations

import ast
import inspect
import textwrap
import tomllib
from collections.abc import Iterator
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from common.config import RunConfig
from common.config_section import STORED, Section

MINIMAL = 'name = "a"\nmodel = "m"\n'
ALONE = '[train.distill]\nteacher = "t"\nwith_rewards = false'
PROXIMAL = 'anchor = "proximal"'


def config_of(text: str) -> RunConfig:
    return RunConfig.model_validate(tomllib.loads(MINIMAL + text))


WITHOUT_EFFECT = [
    ('[train]\nkl_estimator = "k1"', 'kl_estimator = "k1" has no effect without kl'),
    (
        '[train]\nloss = "cispo"\nclip_low = 1.0\nclip_high = 4.0\ndual_clip = 5.0',
        'dual_clip = 5.0 has no effect with loss = "cispo"',
    ),
    (f"[train]\n{PROXIMAL}\nminibatches = 1\nclip_low = 0.1", "clip_low = 0.1 has no effect with anchor = "),
    (f"[train]\n{PROXIMAL}\nminibatches = 1\nclip_high = 0.4", "clip_high = 0.4 has no effect with anchor = "),
    (f"[train]\n{PROXIMAL}\nminibatches = 1\ndual_clip = 2.0", "dual_clip = 2.0 has no effect with anchor = "),
    ("[train]\nmax_refills_per_step = 5", 'max_refills_per_step = 5 has no effect without zero_variance = "refill"'),
    ("[train]\nallow_uncorrected = true", 'allow_uncorrected = true has no effect without correction = "none"'),
    (
        f'[train]\n{PROXIMAL}\ncorrection = "none"\nmax_staleness = 0\nallow_uncorrected = true',
        "allow_uncorrected = true has no effect with max_staleness = 0",
    ),
    ('[train]\nmax_staleness = 0\nlate_groups = "drop"', 'late_groups = "drop" has no effect with max_staleness = 0'),
    (
        "[train]\noverlong_tokens = 500\noverlong_buffer = 100",
        "overlong_tokens = 500 with overlong_buffer = 100 has no effect: an episode samples at most 160 tokens",
    ),
    ("[train]\nimportance_cap = 5.0", 'importance_cap = 5.0 has no effect with anchor = "behaviour"'),
    (
        f'[train]\n{PROXIMAL}\nmax_staleness = 0\ncorrection = "none"\nimportance_cap = 5.0',
        'importance_cap = 5.0 has no effect with correction = "none"',
    ),
    (
        f'[train]\n{PROXIMAL}\nmax_staleness = 0\ncorrection = "none"\ncorrection_level = "sequence"',
        'correction_level = "sequence" has no effect with correction = "none"',
    ),
    ('[train]\nlr_schedule = "constant"\nlr_end = 0.1', 'lr_end = 0.1 has no effect with lr_schedule = "constant"'),
    (f'[train]\nadvantage = "rloo"\n{ALONE}', 'advantage = "rloo" has no effect with distill.with_rewards = false'),
    (f'[train]\nkl = "reward"\nkl_coefficient = 0.1\n{ALONE}', 'kl = "reward" has no effect with distill.with_rewards'),
    (
        f"[train]\noverlong_tokens = 100\noverlong_buffer = 10\n{ALONE}",
        "overlong_tokens = 100 has no effect with distill.with_rewards",
    ),
    (
        '[train.distill]\nteacher = "t"\nrequest_timeout_s = 5',
        "distill.request_timeout_s = 5.0 has no effect with a teacher that is a folder",
    ),
    (
        '[train.distill]\nteacher = "t"\nmax_requests = 5',
        "distill.max_requests = 5 has no effect with a teacher that is a folder",
    ),
    ('dataset = "d"\nnum_tasks = 5', "num_tasks = 5 has no effect with dataset = d: all its tasks are played"),
    ('[eval]\ndataset = "d"\nseed = 5', "seed = 5 has no effect with dataset = d"),
    ("[eval]\ntemperature = 0.0\ntop_p = 0.5", "top_p = 0.5 has no effect with temperature = 0"),
]


@pytest.mark.parametrize(("text", "expected"), WITHOUT_EFFECT)
def test_a_setting_without_effect_is_refused_by_its_name_and_value(text: str, expected: str) -> None:
    with pytest.raises(ValidationError) as refused:
        config_of(text)
    assert expected in str(refused.value)


@pytest.mark.parametrize(("text", "expected"), WITHOUT_EFFECT)
def test_what_is_stored_goes_on_whatever_has_become_of_the_rules(text: str, expected: str) -> None:
    RunConfig.model_validate(tomllib.loads(MINIMAL + text), context=STORED)


@pytest.mark.parametrize(("kl", "estimator"), [("none", "k3"), ("loss", "k3"), ("reward", "k1")])
def test_estimator_is_by_default_the_one_that_has_a_gradient_where_it_stands(kl: str, estimator: str) -> None:
    coefficient = "" if kl == "none" else "kl_coefficient = 0.1\n"
    assert config_of(f'[train]\nkl = "{kl}"\n{coefficient}').train.kl_estimator == estimator


def test_run_that_is_stored_with_the_clip_of_ppo_for_cispo_computes_what_it_did() -> None:
    train = RunConfig.model_validate({"name": "a", "model": "m", "train": {"loss": "cispo"}}, context=STORED).train
    assert (train.clip_low, train.clip_high) == (0.2, 0.28)


def test_run_that_is_stored_with_another_estimator_in_the_reward_computes_what_it_did() -> None:
    stored = {"kl": "reward", "kl_coefficient": 0.1, "kl_estimator": "k3"}
    train = RunConfig.model_validate({"name": "a", "model": "m", "train": stored}, context=STORED).train
    assert train.kl_estimator == "k3"


@pytest.mark.parametrize(
    "text",
    [
        "",
        '[train]\nkl = "reward"\nkl_coefficient = 0.1',
        '[train]\nkl = "reward"\nkl_coefficient = 0.1\nkl_estimator = "k1"',
        '[train]\nloss = "cispo"\nclip_low = 1.0\nclip_high = 4.0',
        f'[train]\n{PROXIMAL}\nminibatches = 1\nloss = "cispo"',
        f'[train]\n{PROXIMAL}\nminibatches = 1\nloss = "gspo"',
        f"[train]\n{PROXIMAL}\nimportance_cap = 5.0\nclip_low = 0.1",
        f'[train]\n{PROXIMAL}\ncorrection = "none"\nallow_uncorrected = true',
        '[train]\nzero_variance = "refill"\nmax_refills_per_step = 5',
        '[train]\nlr_schedule = "constant"\nlr_end = 0.5',
        ALONE,
        '[train.distill]\nteacher = "http://t:1"\nmax_requests = 5',
        'dataset = "d"\nnum_tasks = 2000\n[eval]\ndataset = "d"',
    ],
)
def test_a_run_file_with_all_that_was_left_out_in_it_says_the_same(text: str) -> None:
    config = config_of(text)
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
def test_a_cap_below_the_weight_of_fresh_tokens_is_refused(anchor: str) -> None:
    with pytest.raises(ValidationError, match=r"importance_cap = 0.5 is less than 1, the weight of a token that "):
        config_of(f'[train]\nanchor = "{anchor}"\nimportance_cap = 0.5')


def test_a_floor_above_the_weight_of_fresh_tokens_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"importance_floor = 1.5 is more than 1, the weight of a token that "):
        config_of(f'[train]\n{PROXIMAL}\ncorrection = "mask"\nimportance_floor = 1.5')


def sections(document: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The section and those in it."""
    yield document
    for field in document.model_fields.values():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from sections(kind)


def documented(section: type[BaseModel]) -> set[str]:
    """Its fields that have a string below them."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(node, ast.ClassDef)
    return {
        field.target.id
        for field, below in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def test_every_field_of_a_run_file_is_documented() -> None:
    found = {section: set(section.model_fields) - documented(section) for section in sections(RunConfig)}
    assert len(found) == 10
    assert {section.__name__: fields for section, fields in found.items() if fields} == {}
