"""What a start says where others could read along: on the network, or the owner of the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cloister.launch.serving import is_readable_on_the_way, is_unproved
from cloister.types.config import ServerConfig

OPEN_TO_ALL = replace(ServerConfig(), host="0.0.0.0")


@pytest.mark.parametrize(
    ("fields", "is_readable"),
    [({}, True), ({"host": "127.0.0.1"}, False), ({"certfile": "chain.pem"}, False), ({"sealed": True}, False)],
    ids=["plain", "loopback", "TLS", "sealed"],
)
def test_a_start_warns_where_keys_and_prompts_cross_the_network_readable(fields: dict[str, Any], is_readable: bool) -> None:
    assert is_readable_on_the_way(replace(OPEN_TO_ALL, **fields)) == is_readable


@pytest.mark.parametrize(
    ("fields", "is_warned"),
    [({}, False), ({"sealed": True}, True), ({"sealed": True, "attester": "sev-snp"}, False)],
    ids=["not sealed", "software", "hardware"],
)
def test_a_start_warns_that_a_sealed_node_without_hardware_proves_nothing(fields: dict[str, Any], is_warned: bool) -> None:
    assert is_unproved(replace(ServerConfig(), **fields)) == is_warned
