"""Spend stores, selected by URL; only the chosen one's library is imported."""

from __future__ import annotations

from urllib.parse import urlsplit

from cloister.trust.tokens.spend import SpendStore
from cloister.types.errors import ConfigError

SQLITE, POSTGRES, REDIS = ("sqlite",), ("postgresql", "postgres"), ("redis", "rediss", "unix")


def open_spend_store(url: str) -> SpendStore:
    """Opens the store at a URL: `sqlite:///FILE`, `postgresql://...`, `redis://...` or `rediss://...`.

    Raises:
        ConfigError: the URL has another form, the client library is not installed, or the server could lose records.
        SpendStoreError: the server does not respond.
    """
    scheme = urlsplit(url).scheme
    if scheme in SQLITE:
        from cloister.trust.tokens.stores.sqlite import SqliteSpendStore

        return SqliteSpendStore(url)
    if scheme in POSTGRES:
        from cloister.trust.tokens.stores.postgres import PostgresSpendStore

        return PostgresSpendStore(url)
    if scheme in REDIS:
        from cloister.trust.tokens.stores.redis import RedisSpendStore

        return RedisSpendStore(url)
    # The URL may contain a password, so it is not repeated.
    raise ConfigError(
        "a spend store is sqlite:///FILE, postgresql://HOST/DATABASE, redis://HOST or rediss://HOST", param="spend_store"
    )
