"""What a run may write into [sandbox.network]."""

from __future__ import annotations

import pytest

from common.config_network import NetworkConfig, parse_destination


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("packages.example.org:443", "packages.example.org", 443),
        ("Files.Example.org.:80", "files.example.org", 80),
        ("*.example.org:443", "*.example.org", 443),
        ("127.0.0.1:5432", "127.0.0.1", 5432),
        ("[::FFFF:127.0.0.1]:1", "::ffff:7f00:1", 1),
    ],
)
def test_destinations(text: str, host: str, port: int) -> None:
    found = parse_destination(text)
    assert (found.host, found.port) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "packages.example.org",
            "packages.example.org:0",
            "packages.example.org:65536",
            "packages.example.org:+1",
            ":443",
            "a b:1",
            "https://packages.example.org:443",
            "é.org:1",
        ),
        *("2130706433:1", "0x7f000001:1", "127.1:1", "017700000001:1", "::1:80", "[127.0.0.1]:80", "a..b:1", "*:443"),
        *("user@packages.example.org:443", "*.*.org:1", "packages.example.org:443\n"),
    ],
)
def test_what_is_no_destination(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be host:port|neither the name|in brackets"):
        parse_destination(text)


def test_a_list_goes_with_the_proxy_alone() -> None:
    with pytest.raises(ValueError, match="needs allow"):
        NetworkConfig(mode="proxy")
    with pytest.raises(ValueError, match='has no effect with mode = "loopback"'):
        NetworkConfig(mode="loopback", allow=("packages.example.org:443",))


def test_tasks_may_not_open_private_addresses() -> None:
    task = NetworkConfig(mode="proxy", allow=("10.0.0.1:80", "packages.example.org:443", "1.1.1.1:53", "127.0.0.1:99"))
    run = NetworkConfig(mode="proxy", allow=("127.0.0.1:99",))
    assert task.private_beyond(run) == ["10.0.0.1:80"]


@pytest.mark.parametrize(
    "host",
    [
        *("168.63.129.16", "192.0.0.192", "224.0.0.1", "[64:ff9b::a9fe:a9fe]", "[2002:7f00:1::]", "[::7f00:1]"),
        *("[fec0::1]", "[::ffff:0:127.0.0.1]", "[::ffff:127.0.0.1]", "[64:ff9b:1::a9fe:a9fe]"),
    ],
)
def test_what_the_proxy_takes_for_private_is_private_in_a_task_too(host: str) -> None:
    task = NetworkConfig(mode="proxy", allow=(f"{host}:80", "[2606:4700::1111]:443"))
    assert task.private_beyond(NetworkConfig(mode="none")) == [f"{host}:80"]
    assert task.private_beyond(task) == []
