"""Who lets requests in, and what a running server reads again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cloister.app.settings import Settings
from cloister.privacy import Gate, is_loopback, read_credentials

if TYPE_CHECKING:
    from cloister.server.reload import Source


def build_gate(settings: Settings) -> Gate:
    """Returns who lets requests in.

    Raises:
        ConfigError: the API key file cannot be used.
    """
    server = settings.server.config
    credentials = read_credentials(Path(server.api_keys).expanduser()) if server.api_keys is not None else None
    engines = [settings.engine, *settings.models.values()]
    reuses_prefixes = any(engine.config.prefix_cache for engine in engines)
    return Gate(settings.policy, credentials, loopback=is_loopback(server.host), reuses_prefixes=reuses_prefixes)


def reread_sources(settings: Settings, gate: Gate) -> tuple[Source, ...]:
    """Returns what a running server reads again when its file changes."""
    from cloister.server.reload import Source

    if settings.server.config.api_keys is None:
        return ()
    path = Path(settings.server.config.api_keys).expanduser()
    return (Source("API keys", (path,), lambda: gate.change_keys(read_credentials(path))),)
