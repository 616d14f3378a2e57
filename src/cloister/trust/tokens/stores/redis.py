"""Spent tokens in Redis, for gateways on several machines. Needs `cloister[stores]`.

By default Redis is a cache: it may lose the last second, or evict keys under memory pressure, and each lost key is a token that
can be spent again. So the server's settings are checked first, and it is refused unless it writes every command to disk before
it replies and never evicts. No setting fixes failover: a replica that takes over may lack the last records.

One set for each issuer key, without expiry: the server's clock may jump, and expired tokens could be spent again.
"""

from __future__ import annotations

from typing import Any

from cloister.trust.tokens.spend import WAIT_S, SpendStoreError, missing_extra
from cloister.types.errors import ConfigError

_NAMES = ("cloister:spent:ends", "cloister:spent:ended")
"""Expiry of each key's tokens (a sorted set), and the keys whose records were dropped (a set)."""
_SPEND = """
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 0 end
redis.call('ZADD', KEYS[1], 'GT', ARGV[3], ARGV[1])
return redis.call('SADD', KEYS[3], ARGV[2])
"""
_FORGET = """
for _, key in ipairs(redis.call('ZRANGE', KEYS[1], '-inf', ARGV[1], 'BYSCORE')) do
    redis.call('SADD', KEYS[2], key)
    redis.call('UNLINK', ARGV[2] .. key)
    redis.call('ZREM', KEYS[1], key)
end
"""
_EPOCHS = "cloister:spent:epochs"
"""The newest epoch of each log (a sorted set)."""
_NOTE = """
local seen = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or '0')
if seen < tonumber(ARGV[2]) then return 0 end
redis.call('ZADD', KEYS[1], 'GT', ARGV[3], ARGV[1])
return 1
"""
_PREFIX = "cloister:spent:"
_NEEDED = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}


class RedisSpendStore:
    """Connects to a URL such as `rediss://user:password@host:6379/0`.

    Raises:
        ConfigError: redis-py is not installed, or the server could lose records; the message lists the required settings.
        SpendStoreError: the server does not respond.
    """

    def __init__(self, url: str) -> None:
        try:
            import redis
        except ImportError:
            raise missing_extra("redis") from None
        self._error = redis.RedisError
        try:
            self._client: Any = redis.Redis.from_url(url, socket_timeout=WAIT_S, socket_connect_timeout=WAIT_S)
            settings = self._client.config_get(*_NEEDED)
        except redis.ResponseError:
            self.close()
            raise ConfigError(
                "this Redis does not say how it is set (CONFIG GET is refused), so it cannot be told whether it forgets"
            ) from None
        except redis.RedisError as error:
            self.close()
            raise _unavailable(error) from None
        wrong = [f"{name} {value}" for name, value in _NEEDED.items() if settings.get(name) != value]
        if wrong:
            self.close()
            raise ConfigError(
                f"this Redis could forget a spent token; set in redis.conf: {', '.join(wrong)}", param="spend_store"
            )

    def spend(self, key_id: bytes, token_digest: bytes, expires_at: int) -> bool:
        # A retry after a lost reply finds the record: the token may be lost, but is never spent twice.
        key = key_id.hex()
        return int(self._run(_SPEND, (*_NAMES, _PREFIX + key), (key, token_digest, expires_at))) == 1

    def forget(self, now: int) -> None:
        self._run(_FORGET, _NAMES, (now, _PREFIX))

    def note_epoch(self, log: str, known: int, number: int) -> bool:
        return int(self._run(_NOTE, (_EPOCHS,), (log, known, number))) == 1

    def close(self) -> None:
        self._client.close()

    def _run(self, script: str, names: tuple[str, ...], arguments: tuple[str | bytes | int, ...]) -> Any:
        """Runs a script atomically."""
        try:
            return self._client.eval(script, len(names), *names, *arguments)
        except self._error as error:
            raise _unavailable(error) from None


def _unavailable(error: Exception) -> SpendStoreError:
    return SpendStoreError(f"the Redis of spent tokens gives no answer ({type(error).__name__}); try again later")
