"""Groups of settings: the headings of help pages, docs and the config file. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final

from cloister.types.config import EngineConfig, ServerConfig, setting_names
from cloister.types.errors import ConfigError
from cloister.types.refusals import Refusals

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "model": (
        "model", "served_model_name", "backend", "device", "dtype", "quant", "quant_method", "numerics", "num_threads",
        "strict_config", "weights_cache", "weights_cache_mb", "lora", "max_loras", "max_lora_rank", "runtime_adapters",
        "pooling", "tool_parser", "reasoning_parser",
    ),
    "memory": (
        "max_model_len", "max_prefill_only_len", "memory_share", "kv_memory_mb", "kv_dtype", "kv_layout", "block_size",
        "prefix_cache", "kv_tier", "kv_tier_codec", "kv_tier_admission",
    ),
    "scheduling": (
        "replicas", "max_replicas", "min_replicas", "upscale_delay_s", "downscale_delay_s", "router", "prefill", "decode",
        "rebalance", "standby", "replicate_hot_prefixes", "max_ttft_s",
        "kv_transfer", "slow_replicas", "verify_replay", "on", "ray_address", "scheduler", "max_num_seqs", "max_n",
        "max_batched_tokens", "target_step_ms", "max_stall", "stall_floor_ms", "max_waiting", "stall_timeout_s",
        "request_timeout_s", "default_max_tokens", "fork_server", "idle_timeout_s", "idle_keeps",
    ),
    "speculation": ("speculate", "draft_model", "draft_tokens", "datastore"),
    "privacy": (
        "profile", "api_keys", "oidc", "cache_scopes", "release_prefixes", "keep_responses", "files", "files_key", "files_mb",
    ),
    "network": (
        "host", "port", "certfile", "keyfile", "allowed_origins", "page", "max_connections", "max_unread_mb", "max_request_kb",
        "max_images", "remote_images", "drain_timeout_s", "strict_fields",
    ),
    "observability": ("log_format", "log_requests", "log_clients", "otlp_endpoint"),
    "sealed": (
        "sealed", "attester", "attest_gpus", "amd_certificates", "intel_collateral", "nvidia_collateral", "release",
        "log_checkpoint", "gateway_secret", "member_key", "node_capacity", "unit_members", "unit_port",
        "unit_policy",
    ),
}  # fmt: skip
"""Group -> names of its settings, in display order."""

COMMON: Final = frozenset(
    {"quant", "num_threads", "max_model_len", "kv_memory_mb", "profile", "api_keys", "host", "port"}
)  # fmt: skip
"""Settings that `--help` shows; `--help-all` shows every one."""

_GROUP_OF: Final = {name: group for group, names in GROUPS.items() for name in names}


def group_of(name: str) -> str:
    """Returns the group of a setting."""
    return _GROUP_OF[name]


def list_groups() -> dict[str, list[str]]:
    """Returns group -> every setting in it, in display order."""
    return {group: list(names) for group, names in GROUPS.items()}


def flatten_groups(given: Mapping[str, Any], source: str, refusals: Refusals) -> dict[str, Any]:
    """Returns settings by name from a config file, which may have them in group tables, at top level, or both.

    Refused are an unknown setting in a table, one of another group, and one that occurs twice.
    """
    flat = {name: value for name, value in given.items() if not _is_group(name, value)}
    for group, table in given.items():
        for name, value in table.items() if _is_group(group, table) else ():
            if not _is_in_place(name, group, source, refusals):
                continue
            if name in flat:
                twice = f"{name} stands twice in {source}: in [{group}] and before any table; leave one"
                refusals.add_unreadable(ConfigError(twice, param=name), name)
            flat[name] = value
    return flat


def _is_group(name: str, value: object) -> bool:
    """Distinguishes the table `[model]` from the setting `model`."""
    return name in GROUPS and isinstance(value, dict)


def _is_in_place(name: str, group: str, source: str, refusals: Refusals) -> bool:
    known = setting_names(EngineConfig, ServerConfig)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(list_groups()[group])}"
        unknown = ConfigError(f"unknown setting {name!r} in [{group}] of {source}; {hint}", param=name)
        refusals.add_unreadable(unknown, name, *near)
    elif group_of(name) != group:
        elsewhere = f"{name} belongs into [{group_of(name)}] of {source}, not into [{group}]"
        refusals.add_unreadable(ConfigError(elsewhere, param=name), name)
    else:
        return True
    return False
