"""The default profile. Pure."""

from __future__ import annotations

import ipaddress

from cloister.policy.verdict import Profile


def default_profile(*, loopback: bool, has_api_keys: bool, sealed: bool = False) -> tuple[Profile, str]:
    """Returns the default profile of a server, and why."""
    if sealed:
        return Profile.PRIVATE, "the server is a sealed node"
    if loopback and not has_api_keys:
        return Profile.OPEN, "only this machine can connect, and API keys are not required"
    if has_api_keys:
        return Profile.TEAM, "API keys distinguish tenants"
    return Profile.TEAM, "other machines can connect"


def is_loopback(host: str) -> bool:
    """True if only this machine can connect to a socket bound to `host`. A name other than localhost may be anything."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.lower() == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
