from __future__ import annotations

import re
import socket

import pytest

from common.errors import SetupError
from common.settings import load_settings, masked


def test_a_mistyped_variable_is_refused_with_the_near_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLMILL_DATABSE_URL", "x")
    with pytest.raises(SetupError, match="unknown variable ROLLMILL_DATABSE_URL: did you mean ROLLMILL_DATABASE_URL"):
        load_settings()


def test_an_unknown_variable_lists_the_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLMILL_ZZZ", "x")
    with pytest.raises(SetupError, match=r"known are ROLLMILL_BROKER_.*, ROLLMILL_BROKER_URL, "):
        load_settings()


def test_a_value_out_of_bounds_names_variable_and_value(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLMILL_LEASE_S", "-1")
    with pytest.raises(SetupError, match=r"ROLLMILL_LEASE_S='-1': .*greater than 0"):
        load_settings()


@pytest.mark.parametrize(
    ("value", "why"), [("inf", "finite number"), ("nan", ""), ("1e300", r"it is more than 1e\+09 seconds")]
)
@pytest.mark.parametrize("name", ["LEASE_S", "ENGINE_WAIT_S", "RETRY_BACKOFF_S", "BROKER_CONSUMER_TIMEOUT_S"])
def test_a_time_that_no_timer_takes_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str):
    monkeypatch.setenv(f"ROLLMILL_{name}", value)
    with pytest.raises(SetupError, match=f"ROLLMILL_{name}='{value}': .*{why}"):
        load_settings()


def test_a_missing_url_says_what_to_set():
    with pytest.raises(SetupError, match="ROLLMILL_BROKER_URL is not set"):
        load_settings().require_broker_url()


def test_passwords_are_masked():
    assert masked("postgresql://user:secret@host:1/name") == "postgresql://user:***@host:1/name"
    assert masked("redis://:secret@host:1/0") == "redis://:***@host:1/0"


def test_a_node_has_its_hosts_name_or_the_one_that_it_is_given(monkeypatch: pytest.MonkeyPatch):
    assert load_settings().node == re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    monkeypatch.setenv("ROLLMILL_NODE", "gpu-3.example")
    assert load_settings().node == "gpu-3.example"


@pytest.mark.parametrize("name", ["", "a b", "a@b", "run*", "-a", "a" * 64, "n\u00f6de", "a\n"])
def test_a_nodes_name_is_one_that_a_queue_can_have(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv("ROLLMILL_NODE", name)
    with pytest.raises(SetupError, match=r"^ROLLMILL_NODE='.*: must be 1 to 63 letters, digits, '\.', '_' or '-'"):
        load_settings()
