"""Who lets requests in, and what a running server reads again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cloister.app.settings import Settings
from cloister.privacy import Gate, is_loopback, read_credentials

if TYPE_CHECKING:
    from cloister.privacy.oidc import People
    from cloister.server.reload import WatchedFiles


def build_gate(settings: Settings) -> Gate:
    """Returns who lets requests in.

    Raises:
        ConfigError: the file of API keys or of the issuer cannot be used.
    """
    server = settings.server.config
    credentials = read_credentials(Path(server.api_keys).expanduser()) if server.api_keys is not None else None
    engines = [settings.engine, *settings.models.values()]
    reuses_prefixes = any(engine.config.prefix_cache for engine in engines)
    return Gate(
        settings.policy,
        credentials,
        people=_read_people(Path(server.oidc)) if server.oidc is not None else None,
        loopback=is_loopback(server.host),
        reuses_prefixes=reuses_prefixes,
    )


def _read_people(path: Path) -> People:
    from cloister.privacy.oidc import People, read_oidc
    from cloister.server.oidc import check_extra

    check_extra()
    return People(read_oidc(path))


def reread_sources(settings: Settings, gate: Gate) -> tuple[WatchedFiles, ...]:
    """Returns what a running server reads again when its file changes."""
    from cloister.server.reload import WatchedFiles

    if settings.server.config.api_keys is None:
        return ()
    path = Path(settings.server.config.api_keys).expanduser()
    return (WatchedFiles("API keys", (path,), lambda: gate.change_keys(read_credentials(path))),)
