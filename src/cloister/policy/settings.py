"""Applies a profile to the configuration: one pure step between reading settings and starting a server."""

from __future__ import annotations

from collections.abc import Iterable

from cloister.policy.matrix import Entry
from cloister.policy.policy import Policy, Use
from cloister.policy.profile import default_profile
from cloister.policy.verdict import Profile
from cloister.types.config import AUTO_DRAFTER, DRAFTER_FILES, NO_DRAFTER, C, EngineConfig, Resolved, ServerConfig
from cloister.types.errors import ConfigError
from cloister.types.refusals import Refusals

SESSION_SHARES = 16
"""Number of concurrent sessions that keep their prefixes, if there are no tenants."""


def apply_profile(
    engine: Resolved[EngineConfig],
    *,
    loopback: bool,
    has_api_keys: bool,
    sealed: bool = False,
    num_tenants: int = 0,
    entries: Iterable[tuple[str, Entry]] = (),
    refusals: Refusals,
) -> tuple[Policy, Resolved[EngineConfig]]:
    """Chooses the default profile if none is set, sets what the profile decides, and refuses what it denies.

    Args:
        engine: settings and the origin of each.
        loopback: only this machine can connect; True for `LLM`, which has no listener.
        sealed: the server is a sealed node.
        num_tenants: number of tenants of the API keys; 0 if keys are not required.
        entries: setting -> implementation that it selects by name, such as `Entry.of(POLICIES, config.scheduler)`.
        refusals: takes what the profile denies; the message names the rule and what to change.

    Returns:
        The policy, and the configuration with `profile`, `prefix_cache`, `cache_scopes` and `speculate` set and explained.
    """
    if engine.config.profile is None:
        profile, why = default_profile(loopback=loopback, has_api_keys=has_api_keys, sealed=sealed)
        engine = engine.explain(profile=(profile.value, why))
    policy = Policy(str(engine.config.profile))
    for setting, entry in entries:
        refusals.extend(policy.entry_refusals(entry, setting))
    refusals.extend(
        policy.refusals({"runtime-adapters": Use(engine.config.runtime_adapters, _source_of(engine, "runtime_adapters"))})
    )
    wanted = engine.config.prefix_cache
    chosen = _choose(policy, "prefix-cache", wanted, _source_of(engine, "prefix_cache"), refusals)
    if wanted is None:
        ruling = policy.ruling("prefix-cache")
        engine = engine.explain(prefix_cache=(chosen, f"{ruling.rule}: {ruling.text}"))
    if engine.config.release_prefixes is not None:
        refusals.extend(policy.refusals({"release-prefixes": Use(True, _source_of(engine, "release_prefixes"))}))
        if not chosen:
            refusals.add(
                ConfigError(
                    "release_prefixes needs the prefix cache; leave it out, or prefix_cache on", param="release_prefixes"
                )
            )
    follows_cache = engine.config.scheduler in ("lpm", "prefill_only")
    has_one_cache = chosen and engine.config.cache_scopes == 0
    refusals.extend(
        policy.refusals(
            {
                "cache-aware-order": Use(follows_cache, _source_of(engine, "scheduler")),
                "one-cache": Use(has_one_cache, _source_of(engine, "cache_scopes")),
            }
        )
    )
    if engine.config.cache_scopes is None:
        engine = engine.explain(cache_scopes=_choose_cache_scopes(policy, chosen, loopback, num_tenants))
    return policy, _resolve_speculation(policy, engine, sealed, refusals)


def _choose(policy: Policy, feature: str, wanted: bool | None, source: str, refusals: Refusals) -> bool:
    """Returns whether a feature is on: as requested, even if that is refused, or the profile's default."""
    refusals.extend(policy.refusals({feature: Use(wanted, source)}))
    return policy.is_default(feature) if wanted is None else wanted


def _resolve_speculation(
    policy: Policy, engine: Resolved[EngineConfig], sealed: bool, refusals: Refusals
) -> Resolved[EngineConfig]:
    """Returns the configuration with `speculate` set. Refuses drafts that the profile denies, and settings without effect."""
    feature, config = "sealed-speculation" if sealed else "speculation", engine.config
    wanted = None if config.speculate is None else config.speculates
    asking = next((name for name in ("draft_model", "draft_tokens", "datastore") if getattr(config, name) is not None), None)
    if wanted is None and asking is not None:
        is_on = _choose(policy, feature, True, _source_of(engine, asking), refusals)
    else:
        is_on = _choose(policy, feature, wanted, _source_of(engine, "speculate"), refusals)
    refusals.extend(policy.refusals({"datastore": Use(config.datastore is not None, _source_of(engine, "datastore"))}))
    read = {DRAFTER_FILES.get(name) for name in config.drafter_names}
    refusals.extend(policy.refusals({"datastore": Use("datastore" in read, _source_of(engine, "speculate"))}))
    if wanted is None:
        why = f"{asking} is set" if asking is not None else "drafts were not requested, and wrong drafts cost time"
        engine = engine.explain(speculate=(AUTO_DRAFTER if is_on else NO_DRAFTER, why))
    if not is_on and asking is not None:
        refusals.add(ConfigError(f"{asking} needs drafts, which are off here; leave it out, or set speculate", param=asking))
    for name in ("draft_model", "datastore"):
        if config.drafter_names and getattr(config, name) is not None and name not in read:
            able = ", ".join((AUTO_DRAFTER, *(drafter for drafter, file in DRAFTER_FILES.items() if file == name)))
            refusals.add(
                ConfigError(
                    f"{name} is set, and {config.speculate} does not read it; leave it out, or speculate with {able}",
                    param=name,
                )
            )
    return engine


def _choose_cache_scopes(policy: Policy, has_cache: bool, loopback: bool, num_tenants: int) -> tuple[int, str]:
    """Returns how many scopes get a share of the prefix cache, and why."""
    if not has_cache:
        return 0, "there is no prefix cache"
    if num_tenants:
        return num_tenants, "one for each tenant"
    if loopback and policy.profile is Profile.OPEN:
        return 0, "one person on one machine: there are no others to protect"
    return SESSION_SHARES, "for sessions, as tenants are not distinguished"


def apply_profile_to_front(policy: Policy, server: Resolved[ServerConfig], refusals: Refusals) -> Resolved[ServerConfig]:
    """Sets what the profile decides about the HTTP front.

    Args:
        refusals: takes what the profile denies (the message names the rule and what to change), and a sealed node that is
            configured to accept users' tokens, to fetch images, or to end or fork its engine.

    Returns:
        The configuration with `log_requests`, `keep_responses` and `fork_server` set and explained.
    """
    config = server.config
    asked = {
        "identity-tokens": ("oidc", config.oidc is not None),
        "traces": ("otlp_endpoint", config.otlp_endpoint is not None),
        "files": ("files", config.files is not None),
        "remote-images": ("remote_images", config.remote_images),
    }
    refusals.extend(policy.refusals({name: Use(is_on, _source_of(server, by)) for name, (by, is_on) in asked.items()}))
    if config.oidc is not None and config.sealed:
        refusals.add(ConfigError("a sealed node accepts no users' tokens; leave `oidc` out", param="oidc"))
    if config.remote_images and config.sealed:
        refusals.add(ConfigError("a sealed node fetches no images; leave `remote_images` out", param="remote_images"))
    server = _resolve_engines(policy, _resolve_kept_responses(policy, server, refusals), refusals)
    chosen = _choose(policy, "request-log", config.log_requests, _source_of(server, "log_requests"), refusals)
    if config.log_requests is None:
        ruling = policy.ruling("request-log")
        server = server.explain(log_requests=(chosen, f"{ruling.rule}: {ruling.text}"))
    return server


def _resolve_engines(policy: Policy, server: Resolved[ServerConfig], refusals: Refusals) -> Resolved[ServerConfig]:
    """Decides whether engines are forked, and refuses to end idle ones where the profile denies it."""
    config = server.config
    ends_idle = config.idle_timeout_s is not None
    refusals.extend(policy.refusals({"idle-engines": Use(ends_idle, _source_of(server, "idle_timeout_s"))}))
    for name, is_asked in (("idle_timeout_s", ends_idle), ("fork_server", config.fork_server)):
        if config.sealed and is_asked:
            refusals.add(ConfigError(f"the starter of a sealed node makes its engines; leave {name} out", param=name))
    chosen = _choose(policy, "fork-server", config.fork_server, _source_of(server, "fork_server"), refusals)
    if config.fork_server is None:
        ruling = policy.ruling("fork-server")
        why = f"{ruling.rule}: {ruling.text}"
        if config.sealed:
            chosen, why = False, "the starter of a sealed node makes its engines"
        elif config.on != "local":
            chosen, why = False, "an engine on another machine starts by itself"
        server = server.explain(fork_server=(chosen, why))
    return server


def _resolve_kept_responses(policy: Policy, server: Resolved[ServerConfig], refusals: Refusals) -> Resolved[ServerConfig]:
    wanted = server.config.keep_responses
    keeps = _choose(policy, "stored-responses", wanted, _source_of(server, "keep_responses"), refusals)
    if not server.config.sealed and wanted is not None:
        return server
    if wanted:
        refusals.add(ConfigError("a sealed node keeps nothing; leave `keep_responses` out", param="keep_responses"))
    ruling = policy.ruling("stored-responses")
    why = "a sealed node keeps nothing" if server.config.sealed else f"{ruling.rule}: {ruling.text}"
    return server.explain(keep_responses=(keeps and not server.config.sealed, why))


def _source_of(resolved: Resolved[C], name: str) -> str:
    return f"setting `{name}` ({next(reason.why for reason in resolved.reasons if reason.name == name)})"
