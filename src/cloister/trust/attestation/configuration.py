"""A node's whole effective configuration: every file that shapes answers and every setting, by name.

A statement contains it and a release lists it, so a client sees which entry differs. An entry is the SHA-256 digest (hex) of
files, or a setting's value as JSON. `measuring` creates one. Pure: no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

import msgspec

LEFT_OUT: Final[Mapping[str, str]] = {
    "model": "its files are measured",
    "lora": "names and files are measured",
    "draft_model": "its files are measured",
    "datastore": "its files are measured",
    "release_prefixes": "its name and its file are measured",
    "num_threads": "an answer has the same bits for any number",
    "weights_cache": "a sealed node has none",
    "weights_cache_mb": "a sealed node has none",
    "sealed": "nothing else makes a statement",
    "host": "where the node listens",
    "port": "where the node listens",
    "certfile": "the transport's; content is sealed beneath it",
    "keyfile": "the transport's; content is sealed beneath it",
    "api_keys": "a sealed node asks for none",
    "oidc": "a sealed node accepts no users' tokens",
    "gateway_secret": "a secret",
    "release": "is what this is compared with",
    "log_checkpoint": "stated by itself",
    "node_capacity": "stated by itself",
    "member_key": "its signature is in the evidence",
    "unit_members": "stated by themselves: their keys, not their addresses",
    "unit_policy": "clients verify each machine by policies of their own",
    "unit_port": "where the node listens for the leader of its unit",
    "attester": "the kind of the evidence",
    "attest_gpus": "seen in the evidence",
    "amd_certificates": "seen in the evidence",
    "intel_collateral": "seen in the evidence",
    "nvidia_collateral": "seen in the evidence",
}
"""Settings that are excluded from a configuration, with reasons."""


def describe_settings(*configs: Any) -> dict[str, str]:
    """Returns every setting of configuration dataclasses by name, as JSON, without those of `LEFT_OUT`."""
    return {
        f"setting {field.name}": msgspec.json.encode(getattr(config, field.name)).decode()
        for config in configs
        for field in fields(config)
        if field.name not in LEFT_OUT
    }


def configuration_digest(configuration: Mapping[str, str]) -> str:
    """Returns the SHA-256 digest (hex) of a configuration's canonical JSON."""
    return hashlib.sha256(msgspec.json.encode(dict(configuration), order="sorted")).hexdigest()


def find_differences(stated: Mapping[str, str], published: Mapping[str, str]) -> list[str]:
    """Returns a phrase for each entry that differs from the published one, by name; values are shortened."""
    names = sorted(name for name in stated.keys() | published.keys() if stated.get(name) != published.get(name))
    return [f"{name} is {_show(stated.get(name))} and was published as {_show(published.get(name))}" for name in names]


def _show(value: str | None) -> str:
    if value is None:
        return "absent"
    return value if len(value) <= 32 else f"{value[:16]}..."
