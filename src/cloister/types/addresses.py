"""Addresses of programs, as people type them. Pure."""

from __future__ import annotations

from cloister.types.errors import ConfigError


def check_scheme(url: str, param: str, example: str = "https://relay.example") -> None:
    """Refuses an address that lacks http:// or https://.

    Args:
        param: the setting or argument that has it.
        example: an address, for the message.

    Raises:
        ConfigError: it lacks its scheme, or is no address at all.
    """
    if url.startswith(("http://", "https://")):
        return
    if "." in url or (":" in url and "://" not in url):
        rest = url.partition("://")[2] or url
        raise ConfigError(f"the address {url} lacks its scheme; give http://{rest}, or https:// with TLS", param=param)
    raise ConfigError(f"{url} is no address; give one such as {example}", param=param)
