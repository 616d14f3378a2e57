"""What a start says where others on the network could read along."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cloister.launch.serving import is_readable_on_the_way
from cloister.types.config import ServerConfig

OPEN_TO_ALL = replace(ServerConfig(), host="0.0.0.0")


@pytest.mark.parametrize(
    ("fields", "is_readable"),
    [({}, True), ({"host": "127.0.0.1"}, False), ({"certfile": "chain.pem"}, False), ({"sealed": True}, False)],
    ids=["plain", "loopback", "TLS", "sealed"],
)
def test_a_start_warns_where_keys_and_prompts_cross_the_network_readable(fields: dict[str, Any], is_readable: bool) -> None:
    assert is_readable_on_the_way(replace(OPEN_TO_ALL, **fields)) == is_readable
