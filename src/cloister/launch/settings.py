"""Resolves settings from flags, a file, the machine and the privacy profile."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from cloister.backends import BACKENDS
from cloister.engine.machine import Machine, read_machine
from cloister.kv.codec_levels import is_lossy
from cloister.launch.backend_choice import NO_QUANT, choose_backend, chosen_backend
from cloister.policy import Entry, Policy, apply_profile, apply_profile_to_front, is_loopback, read_credentials
from cloister.policy.policy import Use
from cloister.policy.settings import SESSION_SHARES
from cloister.scheduler.policies import POLICIES
from cloister.types.config import (
    ATTESTING,
    AUTO_DRAFTER,
    NO_DRAFTER,
    EngineConfig,
    Resolved,
    ServerConfig,
    parse_unit_members,
    refuse_unknown,
    resolve_readable,
    setting_names,
)
from cloister.types.errors import CloisterError, ConfigError
from cloister.types.extras import install_command
from cloister.types.refusals import Refusals
from cloister.types.setting_groups import GROUPS, flatten_groups
from cloister.types.text_files import read_text_file

OFFLINE_STALL: Final = 100.0
"""`max_stall` of an engine without a server: prompts are computed as fast as possible."""
LOCAL: Final = "local"
"""Value of the setting `on` for replicas that are processes of this machine."""
OF_ONE_MODEL: Final[Mapping[str, object]] = {"replicas": 1, "max_replicas": None, "on": LOCAL}
"""Settings that a server of several models refuses, with their values when unset."""
_RAY_ADDRESS: Final = re.compile(r"auto|(?:\[[0-9a-fA-F:.]+\]|[^\s:/@\[\]]+):(\d{1,5})")
DRAWN: Final = "capacity_random"
"""The router that draws replicas at random, so that no request can be steered."""
SEALED_LINKS: Final = "sealed"
"""The transport of KV inside a sealed node (`engine.kv_unit`)."""
MAX_SEALED_ENGINES: Final = 12
"""Most engines of a sealed node: a statement lists the hardening measures of each, and has room for this many."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings that are resolved before anything is loaded, with reasons.

    Attributes:
        models: name -> engine, for several models that take turns (tables `[models.NAME]` of the file); empty for a single
            model.
    """

    engine: Resolved[EngineConfig]
    server: Resolved[ServerConfig]
    policy: Policy
    models: Mapping[str, Resolved[EngineConfig]] = field(default_factory=dict)


def resolve_settings(
    flags: Mapping[str, object] | None = None, config_file: Path | None = None, *, listens: bool = True
) -> Settings:
    """Resolves settings from flags, a TOML file, the machine and the privacy profile.

    Args:
        flags: settings by name; None values are ignored.
        listens: False for an engine without a socket, such as `LLM`'s.

    Raises:
        ConfigError: a setting is unknown, invalid or contradicts another one; if several are wrong or refused,
            `RefusedSettings`.
        PolicyError: the profile denies what a setting requests.
    """
    with Refusals() as refusals:
        return _resolve_all(flags or {}, config_file, listens, refusals)


def _resolve_all(flags: Mapping[str, object], config_file: Path | None, listens: bool, refusals: Refusals) -> Settings:
    known = setting_names(EngineConfig, ServerConfig)
    layers: list[tuple[str, Mapping[str, object]]] = []
    tables: Mapping[str, Mapping[str, object]] = {}
    if not listens:
        layers.append(("no client reads streams of a batch", {"max_stall": OFFLINE_STALL}))
    if config_file is not None:
        from_file = _read_toml(config_file)
        tables = _take_models(from_file, config_file.name, refusals)
        from_file = flatten_groups(from_file, config_file.name, refusals)
        refuse_unknown(from_file, [*known, *GROUPS], config_file.name, refusals)
        layers.append((f"file {config_file.name}", from_file))
    refuse_unknown(flags, known if listens else setting_names(EngineConfig), "the settings given", refusals)
    layers.append(("flag", flags))
    if not tables:
        return _resolve_layers(layers, listens, refusals)
    for name, unset in OF_ONE_MODEL.items():
        if listens and any(given.get(name, unset) != unset for _, given in layers):
            refusals.add(
                ConfigError("all replicas serve one model; leave this setting out, or leave [models.NAME] out", param=name)
            )
    if not listens or any("model" in given or "served_model_name" in given for _, given in layers):
        raise ConfigError(
            "the config file has several models: only `serve` takes them, without `model` and `served_model_name` beside them",
            param="models",
        )
    parts = {name: refusals.fork() for name in tables}
    each: dict[str, Settings] = {}
    try:
        for name, table in tables.items():
            each[name] = _resolve_layers([*layers, (f"models.{name}", table)], listens, parts[name])
    finally:
        refusals.merge(parts)
    first = next(iter(each.values()))
    return replace(first, models={name: settings.engine for name, settings in each.items()})


def _take_models(from_file: dict[str, object], source: str, refusals: Refusals) -> Mapping[str, Mapping[str, object]]:
    """Removes the tables `[models.NAME]` from a file's settings and returns them.

    Refuses tables that name no model, or contain a setting of the whole server.

    Raises:
        ConfigError: one is not a table.
    """
    tables = from_file.pop("models", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f'models in {source} must be tables: [models.NAME] with model = "..."', param="models")
    known = [name for name in setting_names(EngineConfig) if name != "profile"]
    shared = {"profile", *setting_names(ServerConfig)} - {*known}
    flat = {name: flatten_groups(table, f"[models.{name}] of {source}", refusals) for name, table in tables.items()}
    for name, table in flat.items():
        for setting in [setting for setting in table if setting in shared]:
            remedy = "leave it out, or [models.NAME]" if setting in OF_ONE_MODEL else "put it above the tables"
            why = f"{setting} stands in [models.{name}] of {source}, and is a setting of the whole server; {remedy}"
            refusals.add_unreadable(ConfigError(why, param=setting), setting)
        refuse_unknown([setting for setting in table if setting not in shared], known, f"[models.{name}] of {source}", refusals)
        if "model" not in table:
            refusals.add(ConfigError(f'[models.{name}] of {source} has no model; add model = "..."', param="model"))
    return flat


def _resolve_layers(layers: Sequence[tuple[str, Mapping[str, object]]], listens: bool, refusals: Refusals) -> Settings:
    """Resolves the settings of one engine and its front from layers of settings."""
    server = resolve_readable(ServerConfig, layers, refusals)
    engine = resolve_readable(EngineConfig, layers, refusals)
    server = _resolve_scaling(server, refusals)
    engine = _resolve_machine(engine, read_machine(), server.config)
    refusals.extend(_check_replicas(server.config, engine.config))
    if server.config.replicas > 1 or server.config.prefill or server.config.decode or server.config.rebalance:
        refusals.extend(_check_roles(server.config))
    if listens and not server.config.sealed:
        refusals.extend(_check_unsealed(server.config))
    elif listens:
        engine = _resolve_sealed(engine, refusals)
    policy, engine = apply_profile(
        engine,
        loopback=not listens or is_loopback(server.config.host),
        has_api_keys=listens and (server.config.api_keys is not None or server.config.oidc is not None),
        sealed=listens and server.config.sealed,
        num_tenants=_count_tenants(server.config) if listens else 0,
        entries=_find_entries(engine.config, refusals),
        refusals=refusals,
    )
    num_replicas = server.config.replicas if listens else 1
    refusals.extend(_check_kv_transfer(policy, engine.config, server.config, num_replicas=num_replicas))
    refusals.extend(_check_kv_tier(policy, engine.config, server.config))
    front = apply_profile_to_front(policy, server, refusals)
    resolved = Settings(engine, _resolve_router(policy, front, refusals), policy)
    refusals.extend(_check_handover(server.config, engine.config))
    if server.config.on == "ray" and importlib.util.find_spec("ray") is None:
        refusals.add(ConfigError(f"replicas on Ray need an extra: {install_command('ray')}", param="on"))
    return resolved


def _check_kv_transfer(
    policy: Policy, config: EngineConfig, server: ServerConfig, *, num_replicas: int
) -> Iterator[CloisterError]:
    """Refuses a KV transfer that the profile denies, that has no effect, or whose `kv_transfer` lacks an address."""
    if config.kv_transfer is None:
        return
    from cloister.engine.kv_transports import KV_TRANSPORTS, has_fixed_port, lacks_address, parse_places  # only if configured

    names = [name for name, _ in parse_places(config.kv_transfer)]
    if unknown := set(names) - set(KV_TRANSPORTS.names()):
        choices = [name for name in KV_TRANSPORTS.names() if (name == SEALED_LINKS) == server.sealed]
        raise ConfigError(f"unknown transport of KV {min(unknown)!r}; choose one of: {', '.join(choices)}", param="kv_transfer")
    if len(set(names)) < len(names):
        yield ConfigError("kv_transfer names a transport twice; name each once", param="kv_transfer")
    feature = "sealed-kv-transfer" if server.sealed else "kv-transfer"
    yield from policy.refusals({feature: Use(True, f"setting `kv_transfer` {config.kv_transfer}")})
    if server.sealed != (config.kv_transfer == SEALED_LINKS):  # before other transports are checked: a sealed node uses its own
        yield ConfigError(
            f"engines of a sealed node exchange KV over links of their own; set kv_transfer to {SEALED_LINKS}"
            if server.sealed
            else f"kv_transfer {SEALED_LINKS} is between engines of a sealed node; add sealed, or set it to shm",
            param="kv_transfer",
        )
    is_through_mooncake = "mooncake" in names
    yield from policy.refusals(
        {"kv-transfer-mooncake": Use(is_through_mooncake, f"setting `kv_transfer` {config.kv_transfer}")}
    )
    for name in names:
        yield from policy.entry_refusals(Entry.of(KV_TRANSPORTS, name), "kv_transfer")
    if server.sealed and not (server.prefill or server.decode):
        yield ConfigError(
            "in a sealed node KV passes from engines that compute prompts to those that go on; set prefill and decode, or leave"
            " kv_transfer out",
            param="kv_transfer",
        )
    if lacks_address(config.kv_transfer) != (server.on != LOCAL):
        yield ConfigError(
            f"on {server.on}, engines are on several machines, and listen on their addresses; set kv_transfer to shm,tls"
            if server.on != LOCAL
            else "kv_transfer tls has no address to listen on; set it to shm, or tls://HOST:0",
            param="kv_transfer",
        )
    if has_fixed_port(config.kv_transfer):
        yield ConfigError("each replica listens on a port of its own; set kv_transfer to tls://HOST:0", param="kv_transfer")
    if num_replicas == 1:
        yield ConfigError("kv_transfer is between replicas; set replicas to 2 or more, or leave it out", param="kv_transfer")
    if not config.prefix_cache:
        yield ConfigError("kv_transfer needs the prefix cache; leave it out, or prefix_cache on", param="kv_transfer")
    if is_through_mooncake and importlib.util.find_spec("mooncake") is None:  # last: the profile may refuse it anyway
        yield ConfigError(
            f"kv_transfer mooncake needs an extra: {install_command('mooncake')}; or set it to shm", param="kv_transfer"
        )


def _check_kv_tier(policy: Policy, config: EngineConfig, server: ServerConfig) -> Iterator[CloisterError]:
    """Refuses a KV tier that the profile denies, that has no effect, or that does not exist."""
    lossy = is_lossy(config.kv_tier_codec)
    if config.kv_tier is None:
        if config.kv_tier_codec is not None:
            yield ConfigError(
                "kv_tier_codec compresses what kv_tier stores; set kv_tier, or leave it out", param="kv_tier_codec"
            )
        if config.kv_tier_admission is not None:
            yield ConfigError(
                "kv_tier_admission chooses what kv_tier stores; set kv_tier, or leave it out", param="kv_tier_admission"
            )
        return
    from cloister.engine.kv_tier_storage import KV_TIERS, ONLY_REPLICAS, parse_tiers  # only if configured
    from cloister.kv.tier_admission import DEFAULT_ADMISSION, TIER_ADMISSIONS

    yield from policy.refusals({"kv-tier-lossy": Use(lossy, f"setting `kv_tier_codec` {config.kv_tier_codec}")})
    if lossy and config.numerics == "exact":
        yield ConfigError(
            f"kv_tier_codec {config.kv_tier_codec} may change answers, depending on what was evicted; choose lossless or auto, "
            "or set numerics fast",
            param="kv_tier_codec",
        )

    tiers = parse_tiers(config.kv_tier)
    for where in tiers:
        entry = Entry.of(KV_TIERS, where.name)
        feature = "kv-tier-peer" if where.lends else "kv-tier-shared" if where.is_shared else "kv-tier"
        yield from policy.refusals({feature: Use(True, f"setting `kv_tier` {where.name}")})
        yield from policy.entry_refusals(entry, "kv_tier")
    admission = Entry.of(TIER_ADMISSIONS, config.kv_tier_admission or DEFAULT_ADMISSION)
    yield from policy.entry_refusals(admission, "kv_tier" if config.kv_tier_admission is None else "kv_tier_admission")
    if not config.prefix_cache:
        yield ConfigError("kv_tier keeps what the prefix cache evicts; leave it out, or prefix_cache on", param="kv_tier")
    if any(where.is_shared for where in tiers) and (server.replicas == 1 or server.on != LOCAL):
        yield ConfigError(ONLY_REPLICAS, param="kv_tier")
    if any(where.is_shared for where in tiers) and config.kv_tier_codec is not None:
        yield ConfigError(
            "a shared tier is not compressed, because each of its engines would choose its own level; leave "
            "kv_tier_codec out, or set kv_tier to host:SIZE",
            param="kv_tier_codec",
        )
    if any(where.num_bytes is None and (where.storage.is_memory or server.replicas > 1) for where in tiers):
        yield ConfigError(
            "give kv_tier a size, such as host:4G; of several replicas each has a tier of its own", param="kv_tier"
        )


def _resolve_scaling(server: Resolved[ServerConfig], refusals: Refusals) -> Resolved[ServerConfig]:
    """Reserves places for the maximum number of replicas, and lets the last engine end when idle if the minimum is 0."""
    refusals.extend(_check_scaling(server.config))
    config = server.config
    if config.max_replicas is None:
        return server
    server = server.explain(replicas=(config.max_replicas, "max_replicas"))
    may_end = config.on == LOCAL and not config.standby
    if config.min_replicas == 0 and config.idle_timeout_s is None and may_end:
        server = server.explain(idle_timeout_s=(config.downscale_delay_s, "min_replicas 0"))
    return server


def _check_scaling(config: ServerConfig) -> Iterator[CloisterError]:
    """Refuses scaling settings that have no effect, or contradict each other or other settings."""
    most, least = config.max_replicas, config.min_replicas
    if most is None:
        defaults = ServerConfig()
        for name in ("min_replicas", "upscale_delay_s", "downscale_delay_s"):
            if getattr(config, name) != getattr(defaults, name):
                yield ConfigError(f"{name} is for replicas that come and go; set max_replicas, or leave it out", param=name)
        return
    if config.replicas > 1:
        yield ConfigError("min_replicas and max_replicas say how many replicas there are; leave replicas out", param="replicas")
    if config.sealed:
        yield ConfigError(
            "a sealed node has as many engines as it states; set replicas, and leave max_replicas out", param="max_replicas"
        )
    fewest = max(least or 1, bool(config.prefill) + bool(config.decode))  # the last one of a role stays
    if fewest + config.standby > most:
        beside = f" beside {config.standby} that stand by" if config.standby else ""
        yield ConfigError(
            f"{fewest} replicas stay{beside}, so set max_replicas to {fewest + config.standby} or more", param="max_replicas"
        )
    if least != 0:
        if config.idle_timeout_s is not None:
            yield ConfigError(
                f"min_replicas {least or 1} keeps engines that idle_timeout_s would end; set min_replicas to 0, or leave "
                "idle_timeout_s out",
                param="idle_timeout_s",
            )
        return
    for name, asked in (("on", config.on != LOCAL), ("standby", bool(config.standby))):
        if asked:
            yield ConfigError(
                f"engines on other machines, and those beside one that stands by, do not end while idle; set min_replicas to 1 "
                f"or more, or leave {name} out",
                param="min_replicas",
            )


def _check_replicas(server: ServerConfig, config: EngineConfig) -> Iterator[CloisterError]:
    """Refuses settings of replicas that cannot be combined, or have no effect."""
    if server.idle_keeps is not None and server.idle_timeout_s is None:
        yield ConfigError(
            "idle_keeps says what stays when engines end; set idle_timeout_s, or leave it out", param="idle_keeps"
        )
    if server.idle_keeps == "weights" and server.fork_server is False:
        yield ConfigError("the template of the fork server keeps the weights; switch fork_server on", param="idle_keeps")
    if server.router is not None and server.replicas == 1 and not (server.sealed and _is_in_unit(server)):
        yield ConfigError("router divides requests among replicas; set replicas to 2 or more, or leave it out", param="router")
    if server.slow_replicas is not None and server.replicas == 1:
        yield ConfigError("slow_replicas compares replicas; set replicas to 2 or more, or leave it out", param="slow_replicas")
    if server.verify_replay and server.replicas == 1:
        yield ConfigError("verify_replay compares replicas; set replicas to 2 or more, or leave it out", param="verify_replay")
    if server.verify_replay and config.numerics != "exact":
        yield ConfigError("verify_replay compares tokens, which are equal with numerics exact only", param="verify_replay")
    if server.standby and server.standby >= server.replicas:
        yield ConfigError(
            f"standby says how many of the replicas wait; set replicas to {server.standby + 1} or more, or leave it out",
            param="standby",
        )
    if server.standby and server.idle_timeout_s is not None:
        yield ConfigError(
            "engines that stand by get no requests, so they would end as idle; leave standby or idle_timeout_s out",
            param="standby",
        )
    if server.replicate_hot_prefixes and server.replicas == 1:
        yield ConfigError(
            "replicate_hot_prefixes copies KV between replicas; set replicas to 2 or more, or leave it out",
            param="replicate_hot_prefixes",
        )
    if server.replicate_hot_prefixes and config.kv_transfer is None:
        where = "shm" if server.on == LOCAL else "shm,tls"
        yield ConfigError(
            f"replicate_hot_prefixes copies KV between replicas; set kv_transfer to {where}, or leave it out",
            param="replicate_hot_prefixes",
        )
    if server.sealed:
        yield from _check_sealed_replicas(server)
        yield from _check_unit(server)
    if server.on == LOCAL and server.ray_address is not None:
        yield ConfigError("ray_address names a Ray cluster; add --on ray, or leave it out", param="ray_address")
    if server.ray_address is not None and not _is_ray_address(server.ray_address):
        yield ConfigError(
            f"ray_address {server.ray_address} is not an address; give HOST:PORT, as `ray start --head` prints it, or auto",
            param="ray_address",
        )
    if server.on != LOCAL and server.idle_timeout_s is not None:
        yield ConfigError(
            f"only engines of this machine end while idle; leave idle_timeout_s out, or on {server.on}", param="idle_timeout_s"
        )
    if server.on != LOCAL and server.fork_server:
        yield ConfigError(
            f"only engines of this machine are forked; leave fork_server out, or on {server.on}", param="fork_server"
        )
    if server.max_ttft_s is not None and server.router != "conductor":
        yield ConfigError(
            "max_ttft_s needs the router that predicts it; set router to conductor, and replicas to 2 or more",
            param="max_ttft_s",
        )


def _check_sealed_replicas(server: ServerConfig) -> Iterator[CloisterError]:
    """Refuses replicas that a single statement cannot cover, and settings that require a front that sees requests."""
    if server.on != LOCAL:
        yield ConfigError("a sealed node is one machine; leave on out, and start more nodes", param="on")
    if server.replicas > MAX_SEALED_ENGINES:
        yield ConfigError(
            f"a node's statement has room for {MAX_SEALED_ENGINES} engines; set replicas to less, and start more nodes",
            param="replicas",
        )
    if server.router not in (None, DRAWN):
        yield ConfigError(
            "a sealed node cannot choose by load or text, because nothing in it sees other requests; set router to "
            f"{DRAWN}, or leave it out",
            param="router",
        )
    needing = {
        "standby": server.standby > 0,
        "rebalance": server.rebalance,
        "verify_replay": server.verify_replay > 0.0,
        "replicate_hot_prefixes": server.replicate_hot_prefixes,
        "slow_replicas": server.slow_replicas == "avoid",
    }
    for name in (name for name, is_asked in needing.items() if is_asked):
        yield ConfigError(f"the front of a sealed node sees no request, so it cannot do this; leave {name} out", param=name)


def _check_unit(server: ServerConfig) -> Iterator[CloisterError]:
    """Refuses inconsistent settings of a unit of several machines."""
    if server.unit_members is not None and server.unit_port is not None:
        yield ConfigError(
            "a node leads a unit or is a member of one; leave unit_members out on members, and unit_port on the leader",
            param="unit_members",
        )
    parse_unit_members(server.unit_members)
    if server.unit_policy is not None and not _is_in_unit(server):
        yield ConfigError(
            "unit_policy is for machines of a unit; set unit_members or unit_port, or leave it out", param="unit_policy"
        )
    if server.unit_port is not None and server.unit_port == server.port:
        yield ConfigError("the unit port takes no requests; set unit_port to another port than `port`", param="unit_port")


def _is_in_unit(server: ServerConfig) -> bool:
    """Whether this machine is one of several in a sealed unit."""
    return server.unit_members is not None or server.unit_port is not None


def _check_roles(server: ServerConfig) -> Iterator[CloisterError]:
    """Refuses roles without a replica for prompts or for answers, and settings without effect."""
    from cloister.cluster.roles import assign_roles

    given = [name for name in ("prefill", "decode", "rebalance") if getattr(server, name)]
    if server.replicas == 1 and given:
        raise ConfigError(f"{given[0]} is for several replicas; set replicas to 2 or more, or leave it out", param=given[0])
    num_active = server.replicas - server.standby
    if server.standby and server.prefill + server.decode > num_active:
        yield ConfigError(
            f"{server.standby} of {server.replicas} replicas stand by, so {num_active} are left for {server.prefill} that "
            f"prefill and {server.decode} that decode; set replicas to {server.prefill + server.decode + server.standby} or "
            "more",
            param="replicas",
        )
    assign_roles(num_active, server.prefill, server.decode)


def _check_handover(server: ServerConfig, config: EngineConfig) -> Iterator[CloisterError]:
    """Refuses roles without a KV transfer. Runs once the profile has allowed roles, so it allows the suggested setting too."""
    if (server.prefill or server.decode) and config.kv_transfer is None:
        where = SEALED_LINKS if server.sealed else "shm" if server.on == LOCAL else "shm,tls"
        yield ConfigError(
            f"with roles and without kv_transfer every prompt would be computed twice; set kv_transfer to {where}",
            param="prefill",
        )


def _resolve_router(policy: Policy, server: Resolved[ServerConfig], refusals: Refusals) -> Resolved[ServerConfig]:
    """Chooses the router of several replicas; refuses one that the profile denies or that does not exist."""
    if server.config.replicas == 1 and server.config.on == LOCAL and not _is_in_unit(server.config):
        return server
    from cloister.cluster import ROUTERS  # late import: one replica needs no router

    if server.config.router is None:
        may_steer = policy.allows("load-routing") and not server.config.sealed
        no_other = (
            "nothing in a sealed node sees the load"
            if server.config.sealed
            else "the profile allows no router that can be steered"
        )
        name, why = ("least_load", "default") if may_steer else (DRAWN, no_other)
        server = server.explain(router=(name, why))
    name = str(server.config.router)
    predicts_lengths = False
    with refusals.collect("router"):
        entry = Entry.of(ROUTERS, name)
        predicts_lengths = ROUTERS.get(name).predicts_lengths
        refusals.extend(policy.entry_refusals(entry, "router"))
    if server.config.slow_replicas is None:
        may_avoid = policy.allows("slow-replicas") and not server.config.sealed
        what, why = (
            ("avoid", "default") if may_avoid else ("report", "the profile lets no measured time decide where requests go")
        )
        server = server.explain(slow_replicas=(what, why))
    has_roles = bool(server.config.prefill or server.config.decode)
    refused = policy.refusals(
        {
            "load-routing": Use(name != DRAWN, f"setting `router` {name}"),
            "length-prediction": Use(predicts_lengths, f"setting `router` {name}"),
            "sealed-disaggregation" if server.config.sealed else "disaggregation": Use(has_roles, "setting `prefill`"),
            "load-levelling": Use(server.config.rebalance, "setting `rebalance`"),
            "role-flips": Use(server.config.rebalance and has_roles, "setting `rebalance` with roles"),
            "hot-prefixes": Use(server.config.replicate_hot_prefixes, "setting `replicate_hot_prefixes`"),
            "standby": Use(server.config.standby > 0, "setting `standby`"),
            "replica-scaling": Use(server.config.max_replicas is not None, "setting `max_replicas`"),
            "sealed-unit": Use(_is_in_unit(server.config), _name_unit_setting(server.config)),
            "placed-replicas": Use(server.config.on != LOCAL, f"setting `on` {server.config.on}"),
            "slow-replicas": Use(server.config.slow_replicas == "avoid", "setting `slow_replicas` avoid"),
            "verify-replay": Use(server.config.verify_replay > 0.0, "setting `verify_replay`"),
        }
    )
    refusals.extend(refused)
    return server


def _name_unit_setting(server: ServerConfig) -> str:
    return "setting `unit_members`" if server.unit_members is not None else "setting `unit_port`"


def _find_entries(config: EngineConfig, refusals: Refusals) -> Iterator[tuple[str, Entry]]:
    """Yields the implementations that settings select by name, each with its setting, and refuses names that do not exist.

    Imports number formats and drafters before the engine only if there are some.
    """
    with refusals.collect("backend"):
        yield "backend", Entry.of(BACKENDS, chosen_backend(config))
    with refusals.collect("scheduler"):
        yield "scheduler", Entry.of(POLICIES, config.scheduler)
    if config.quant != NO_QUANT:
        from cloister.quant import FORMATS

        if config.quant in FORMATS.names():
            yield "quant", Entry.of(FORMATS, config.quant)
        else:
            formats = (NO_QUANT, *FORMATS.names())
            refusals.add(
                ConfigError(f"unknown number format {config.quant!r}; choose one of: {', '.join(formats)}", param="quant")
            )
    if not config.drafter_names:
        return
    from cloister.executor.drafters import DRAFTERS

    for name in config.drafter_names:
        if name in (NO_DRAFTER, AUTO_DRAFTER):
            refusals.add(
                ConfigError(f"speculate takes {name} alone; leave it out, or the drafters beside it", param="speculate")
            )
            continue
        with refusals.collect("speculate"):
            yield "speculate", Entry.of(DRAFTERS, name)


def _count_tenants(server: ServerConfig) -> int:
    """Returns how many tenants get a share of the cache: those of API keys, plus spare shares for users of an issuer.

    An unreadable file raises an error later, when the gate is built.
    """
    try:
        num_tenants = len(read_credentials(Path(server.api_keys)).tenants) if server.api_keys is not None else 0
    except ConfigError:
        return 0
    # The number of an issuer's users is unknown here.
    return num_tenants + SESSION_SHARES if server.oidc is not None else num_tenants


def _resolve_machine(engine: Resolved[EngineConfig], machine: Machine, server: ServerConfig) -> Resolved[EngineConfig]:
    """Sets the defaults that depend on the machine."""
    chosen: dict[str, tuple[object, str]] = {}
    if engine.config.num_threads is None and server.ray_address is not None:
        chosen["num_threads"] = (None, "CPUs of the Ray cluster, divided among its replicas")
    elif engine.config.num_threads is None:
        num_replicas = max(1, server.replicas - server.standby)  # standby replicas compute nothing
        why = f"CPUs that this process may use ({machine.num_cpus})"
        why += f", divided among {num_replicas} replicas" if num_replicas > 1 else ""
        chosen["num_threads"] = (max(1, machine.num_cpus // num_replicas), why)
    if engine.config.device is None:
        has_gpu = Path("/dev/nvidiactl").exists()
        chosen["device"] = ("cuda", "there is an NVIDIA device") if has_gpu else ("cpu", "there is no NVIDIA device")
    if engine.config.backend is None:
        device = str(chosen["device"][0]) if "device" in chosen else engine.config.device
        name, why = choose_backend(device or "cpu")
        # if both are available, the model decides (`launch.backend.choose_backend_for`)
        chosen["backend"] = (
            (None, f"native where it computes the model, else torch: {why}") if name == "native" else (name, why)
        )
    return engine.explain(**chosen)


def _is_ray_address(address: str) -> bool:
    found = _RAY_ADDRESS.fullmatch(address)
    return found is not None and 0 < int(found[1] or "1") < 65536


def _check_unsealed(server: ServerConfig) -> Iterator[CloisterError]:
    """Refuses settings that only a sealed node uses."""
    unset = ServerConfig()
    if server.gateway_secret is not None:
        yield ConfigError("gateways show their secret to sealed nodes only; add --sealed", param="gateway_secret")
    for name in ATTESTING:
        if getattr(server, name) != getattr(unset, name):
            yield ConfigError(f"`{name}` says what a sealed node's evidence is; start one with --sealed", param=name)


def _resolve_sealed(engine: Resolved[EngineConfig], refusals: Refusals) -> Resolved[EngineConfig]:
    """Disables features that a sealed node's statement cannot cover, and refuses them if they were requested: caches of
    unattested origin, and adapters loaded later."""
    if engine.config.runtime_adapters:
        refusals.add(
            ConfigError(
                "a sealed node states what it runs when it starts; name its adapters with `lora`", param="runtime_adapters"
            )
        )
    source = next(reason.why for reason in engine.reasons if reason.name == "weights_cache")
    if engine.config.weights_cache and source != "default":
        refusals.add(
            ConfigError(
                "a sealed node packs weights from the files that it measured, and reads no packed ones; leave `weights_cache` "
                "out",
                param="weights_cache",
            )
        )
    return engine.explain(weights_cache=("", "a sealed node reads the files that it measured, and nothing packed from them"))


def _read_toml(path: Path) -> dict[str, object]:
    text = read_text_file(path)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        said = f"the config file {path} is not TOML: {error}; a line is NAME = VALUE, and text has quotes"
        raise ConfigError(said) from None
