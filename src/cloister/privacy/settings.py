"""How a profile settles the configuration: one pure step between reading settings and starting an engine."""

from __future__ import annotations

from collections.abc import Iterable

from cloister.privacy.catalogue import Entry
from cloister.privacy.policy import Policy
from cloister.privacy.profile import default_profile
from cloister.types.config import EngineConfig, Resolved


def settle(
    engine: Resolved[EngineConfig], *, loopback: bool, has_api_keys: bool, entries: Iterable[Entry] = ()
) -> tuple[Policy, Resolved[EngineConfig]]:
    """Chooses the profile if nobody did, fills what it decides, and refuses what it denies.

    Args:
        engine: settings and where each came from.
        loopback: only this machine can connect; True for `LLM`, which listens nowhere.
        entries: implementations that the settings chose by name, such as `Entry.of(POLICIES, config.scheduler)`.

    Returns:
        The policy, and the configuration with `profile` and `prefix_cache` set and explained.

    Raises:
        PolicyError: a setting wants what the profile denies; the message names the rule and what to change.
    """
    if engine.config.profile is None:
        profile, why = default_profile(loopback=loopback, has_api_keys=has_api_keys)
        engine = engine.explain(profile=(profile.value, why))
    policy = Policy(str(engine.config.profile))
    for entry in entries:
        policy.check_entry(entry.kind, entry.name, entry.threat)
    wanted = engine.config.prefix_cache
    source = next(reason.why for reason in engine.reasons if reason.name == "prefix_cache")
    chosen = policy.resolve("prefix-cache", wanted, f"setting `prefix_cache` ({source})")
    if wanted is None:
        ruling = policy.ruling("prefix-cache")
        engine = engine.explain(prefix_cache=(chosen, f"{ruling.rule}: {ruling.text}"))
    return policy, engine
