"""Spent tokens in Redis, for gateways on several machines. Needs `cloister[stores]`.

A Redis as it comes is a cache: it may forget the last second, or throw keys out when memory is short, and each forgotten key
is a token that can be spent again. So a server is asked first, and refused unless it writes every command to disk before it
answers and never evicts. What no setting mends: a replica that takes over may lack the last records of the one that failed.
"""

from __future__ import annotations

from typing import Any

from cloister.privacy.tokens.spend import WAIT_S, SpendStoreError, missing_extra
from cloister.types.errors import ConfigError

MARGIN_S = 86400
"""Records outlive their key by a day, as the server goes by a clock of its own."""

_NEEDED = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}


class RedisSpendStore:
    """Connects to a URL such as `rediss://user:password@host:6379/0`.

    Raises:
        ConfigError: redis-py is not installed, or the server could forget; the message has the settings that it needs.
        SpendStoreError: the server gives no answer.
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
        # A retry after a lost answer finds the key: the token may be lost, and is never spent twice.
        key = b"cloister:spent:" + key_id.hex().encode() + b":" + token_digest.hex().encode()
        try:
            return bool(self._client.set(key, b"", nx=True, exat=expires_at + MARGIN_S))
        except self._error as error:
            raise _unavailable(error) from None

    def forget(self, now: int) -> None:
        """Nothing to do: every record has its end with it."""

    def close(self) -> None:
        self._client.close()


def _unavailable(error: Exception) -> SpendStoreError:
    return SpendStoreError(f"the Redis of spent tokens gives no answer ({type(error).__name__}); try again later")
