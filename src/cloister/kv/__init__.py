"""KV memory as bookkeeping: blocks, block tables, prefix keys and the prefix cache. Pure: no I/O, no clock, no arrays.

Imports lazily: a front needs little of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloister.kv.cache_quotas import CacheQuotas
    from cloister.kv.kept_blocks import DEVICE, KeptUsage, StepTime
    from cloister.kv.keys import PrefixKeys
    from cloister.kv.leases import Leases
    from cloister.kv.objects import KVFormat, KVObject, KVQuery, KVSealer
    from cloister.kv.pool import NO_BLOCK, BlockGroup, BlockPool, OutOfBlocksError
    from cloister.kv.prefix_cache import PREFIX_CACHE_THREAT, PrefixCache
    from cloister.kv.table import BlockTable

__all__ = [
    "DEVICE",
    "NO_BLOCK",
    "PREFIX_CACHE_THREAT",
    "BlockGroup",
    "BlockPool",
    "BlockTable",
    "CacheQuotas",
    "KVFormat",
    "KVObject",
    "KVQuery",
    "KVSealer",
    "KeptUsage",
    "Leases",
    "OutOfBlocksError",
    "PrefixCache",
    "PrefixKeys",
    "StepTime",
]

_HOMES = {
    "cache_quotas": ("CacheQuotas",),
    "kept_blocks": (
        "DEVICE",
        "KeptUsage",
        "StepTime",
    ),
    "keys": ("PrefixKeys",),
    "leases": ("Leases",),
    "objects": (
        "KVFormat",
        "KVObject",
        "KVQuery",
        "KVSealer",
    ),
    "pool": (
        "NO_BLOCK",
        "BlockGroup",
        "BlockPool",
        "OutOfBlocksError",
    ),
    "prefix_cache": (
        "PREFIX_CACHE_THREAT",
        "PrefixCache",
    ),
    "table": ("BlockTable",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
