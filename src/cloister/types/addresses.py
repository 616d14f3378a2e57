"""Addresses of programs, as people type them. Pure."""

from __future__ import annotations

from cloister.types.errors import ConfigError


def check_scheme(url: str, param: str, example: str = "https://relay.example") -> None:
    """Refuses an address that lacks http:// or https://.

    Args:
        param: the setting or argument that has it.
        example: an address, for the message.

    Raises:
        ConfigError: it lacks its scheme or has another one, or is no address at all.
    """
    scheme, separator, rest = url.partition("://")
    if separator and scheme.lower() in ("http", "https"):
        return
    if separator and "." in rest:
        raise ConfigError(
            f"the address {url} has a scheme other than http; give http://{rest}, or https:// with TLS", param=param
        )
    if not separator and ("." in url or ":" in url) and ":/" not in url:
        raise ConfigError(f"the address {url} lacks its scheme; give http://{url}, or https:// with TLS", param=param)
    raise ConfigError(f"{url} is no address; give one such as {example}", param=param)
