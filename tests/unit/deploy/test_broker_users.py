from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest

from deploy.broker_users import PATTERNS, BrokerUser, definitions, vhost_of

PASSWORDS = {f"mill_{user}": f"secret-{user}" for user in BrokerUser}


def test_definitions_hold_each_users_salted_password_and_patterns() -> None:
    document = json.loads(definitions(PASSWORDS, prefix="mill", vhost="/"))
    assert "secret" not in json.dumps(document)
    for user in document["users"]:
        stored = base64.b64decode(user["password_hash"])
        assert stored[4:] == hashlib.sha256(stored[:4] + PASSWORDS[user["name"]].encode()).digest()
    assert [permission["user"] for permission in document["permissions"]] == list(PASSWORDS)
    feeder = document["permissions"][list(BrokerUser).index(BrokerUser.FEEDER)]
    assert (feeder["configure"], feeder["write"], feeder["read"]) == ("^$", r"^(rollmill\.init)$", "^$")


def test_every_pattern_is_one_that_the_server_can_read() -> None:
    for patterns in PATTERNS.values():
        for part in (*patterns.configure, *patterns.write, *patterns.read):
            re.compile(part)


@pytest.mark.parametrize(
    ("url", "vhost"),
    [
        ("amqp://a:b@host:1//", "/"),
        ("amqp://a:b@host:1", "/"),
        ("amqp://a:b@host/mill", "mill"),
        ("amqp://a:b@host/%2Fmill", "/mill"),
    ],
)
def test_the_virtual_host_is_what_follows_the_slash(url: str, vhost: str) -> None:
    assert vhost_of(url) == vhost
