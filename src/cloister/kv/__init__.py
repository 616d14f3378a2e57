"""KV memory as bookkeeping: blocks, block tables, prefix keys and the prefix tree. Pure: no I/O, no clock, no arrays."""

from cloister.kv.cache_quotas import CacheQuotas
from cloister.kv.keys import PrefixKeys
from cloister.kv.pool import BlockPool, OutOfBlocksError
from cloister.kv.prefix_cache import PREFIX_CACHE_THREAT, PrefixCache
from cloister.kv.table import BlockTable

__all__ = [
    "PREFIX_CACHE_THREAT",
    "BlockPool",
    "BlockTable",
    "CacheQuotas",
    "OutOfBlocksError",
    "PrefixCache",
    "PrefixKeys",
]
