"""A server has one address in the database."""

from __future__ import annotations

import pytest

from common.errors import SetupError
from deploy.engine_address import check_no_alias, listed_as, normal_url

HERE = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://h:1", "http://", "http://h:1/v1", "http://h:port", "http://u@h"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(SetupError, match="is no engine's address: give http://HOST:PORT"):
        normal_url(url)


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://10.0.0.1:8000/", "http://10.0.0.1:8000"),
        ("HTTP://Node-1.Example:8000", "http://node-1.example:8000"),
        ("http://node-1:80/", "http://node-1"),
        ("https://node-1:443", "https://node-1"),
        ("https://node-1:80", "https://node-1:80"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
    ],
)
def test_an_address_has_one_spelling(url: str, normal: str) -> None:
    assert normal_url(url) == normal


def test_another_name_of_a_listed_server_is_refused() -> None:
    assert listed_as("http://localhost:8000", ["http://10.0.0.1:8000", HERE]) == HERE
    assert listed_as(HERE, ["http://LOCALHOST:8000"]) == "http://LOCALHOST:8000"
    with pytest.raises(SetupError, match=f"engine http://localhost:8000 is already here as {HERE}: give that address"):
        check_no_alias("http://localhost:8000", [HERE])


@pytest.mark.parametrize("address", ["http://localhost:8001", "http://127.0.0.2:8000", "http://no-such.invalid:8000"])
def test_another_server_is_not(address: str) -> None:
    """No name ends in .invalid, so it cannot be looked up."""
    listed = [HERE, "http://neither.invalid:8000"]
    assert listed_as(address, listed) is None
    check_no_alias(address, listed)
    check_no_alias(HERE, [*listed, address])
