"""KV memory as bookkeeping: blocks, block tables, prefix keys and the prefix cache. Pure: no I/O, no clock, no arrays."""

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
