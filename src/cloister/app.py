"""The only place where the rooms are put together."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from cloister.backends import BACKENDS, native
from cloister.backends.base import AdapterProgram, Backend, KVLayout, Program, Weights
from cloister.backends.spec import FOREIGN_FAMILY, DecoderSpec
from cloister.engine.machine import Machine, process_age_s, read_machine, return_free_memory
from cloister.engine.memory import budget_memory
from cloister.kv import BlockPool, PrefixKeys
from cloister.models import LoadedModel, embedded_names, load, locate, read_pooling
from cloister.models.adapters import read_adapter
from cloister.privacy import Entry, Gate, Policy, hardening, is_loopback, read_credentials, settle, settle_front
from cloister.quant import FORMATS, FormatOptions, NumberFormat, choose_kv_dtype, quantize_on_read
from cloister.sched import POLICIES, BudgetConfig, Scheduler, SchedulerConfig
from cloister.types.allocator import overwrites
from cloister.types.clock import Stopwatch
from cloister.types.config import (
    EngineConfig,
    Resolved,
    ServerConfig,
    reject_unknown,
    resolve,
    setting_names,
)
from cloister.types.errors import ConfigError
from cloister.types.logs import set_up_logging
from cloister.types.request import ModelInfo

if TYPE_CHECKING:
    from cloister.engine import AdapterRegister, EngineCore, ProcessEngine
    from cloister.engine.launch import Process
    from cloister.runner.adapters import AdapterRoom
    from cloister.server.calls import Calls
    from cloister.server.reload import Source
    from cloister.server.serve import Site
    from cloister.server.switch import Seat
    from cloister.text import Tokenizer

ENGINE_ENTRY: Final = "cloister.app:build_engine"
SEALED_ENGINE_ENTRY: Final = "cloister.app:build_sealed_engine"
FRONT_PACKAGES: Final = tuple(f"cloister.{room}" for room in ("server", "sealed", "privacy", "engine", "text", "types"))
ENGINE_PACKAGES: Final = tuple(f"cloister.{room}" for room in ("engine", "sched", "kv", "runner", "text", "types"))
LATE_MODULES: Final = ("uvicorn.lifespan.off", "anyio._backends._asyncio", "pydantic._internal._dataclasses", "llguidance")
"""What is imported before a sealed node is closed: a request that needs a module later would fail."""
NO_QUANT: Final = "none"
QUANT_VERSION: Final = 1
"""Raise it when a number format writes other codes for the same weights."""
OFFLINE_STALL: Final = 100.0
"""`max_stall` of an engine that no server stands before: prompts go in as fast as they can."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that was decided before anything was loaded, and why.

    Attributes:
        models: name -> engine, of several models that take turns (tables `[models.NAME]` of the file); empty for one.
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
        flags: settings by name; None values do not count.
        listens: False for an engine that no socket leads to, such as `LLM`'s.

    Raises:
        ConfigError: a setting is unknown, has no meaning or contradicts another one.
        PolicyError: the profile denies what a setting asks for.
    """
    known = setting_names(EngineConfig, ServerConfig)
    known_flags = known if listens else setting_names(EngineConfig)
    layers: list[tuple[str, Mapping[str, object]]] = []
    tables: Mapping[str, Mapping[str, object]] = {}
    if not listens:
        layers.append(("nobody watches the streams of a batch", {"max_stall": OFFLINE_STALL}))
    if config_file is not None:
        from_file = _read_toml(config_file)
        tables = _take_models(from_file, config_file.name)
        reject_unknown(from_file, known, config_file.name)
        layers.append((f"file {config_file.name}", from_file))
    if flags:
        reject_unknown(flags, known_flags, "the settings given")
        layers.append(("flag", flags))
    if not tables:
        return _settle(layers, listens)
    if not listens or any("model" in given or "served_model_name" in given for _, given in layers):
        raise ConfigError(
            "the config file has several models: only `serve` takes them, without `model` and `served_model_name` beside them",
            param="models",
        )
    each = {name: _settle([*layers, (f"models.{name}", table)], listens) for name, table in tables.items()}
    first = next(iter(each.values()))
    return replace(first, models={name: settings.engine for name, settings in each.items()})


def _take_models(from_file: dict[str, object], source: str) -> Mapping[str, Mapping[str, object]]:
    """Takes the tables `[models.NAME]` out of what a file says.

    Raises:
        ConfigError: they are no tables, name no model, or set what holds for the whole server.
    """
    tables = from_file.pop("models", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f'models in {source} must be tables: [models.NAME] with model = "..."', param="models")
    known = [name for name in setting_names(EngineConfig) if name != "profile"]
    for name, table in tables.items():
        reject_unknown(table, known, f"[models.{name}] of {source}")
        if "model" not in table:
            raise ConfigError(f'[models.{name}] of {source} has no model; say model = "..."', param="model")
    return tables


def _settle(layers: Sequence[tuple[str, Mapping[str, object]]], listens: bool) -> Settings:
    """Resolves the settings of one engine and its front from layers of settings."""
    server = resolve(ServerConfig, layers)
    engine = _settle_machine(resolve(EngineConfig, layers), read_machine())
    policy, engine = settle(
        engine,
        loopback=not listens or is_loopback(server.config.host),
        has_api_keys=listens and server.config.api_keys is not None,
        sealed=listens and server.config.sealed,
        num_tenants=_count_tenants(server.config) if listens else 0,
        entries=(
            Entry.of(BACKENDS, chosen_backend(engine.config)),
            Entry.of(POLICIES, engine.config.scheduler),
            *([] if engine.config.quant == NO_QUANT else [Entry.of(FORMATS, engine.config.quant)]),
        ),
    )
    return Settings(engine, settle_front(policy, server), policy)


def _count_tenants(server: ServerConfig) -> int:
    """Returns how many tenants the API keys belong to; a file that cannot be read is an error where the gate is built."""
    try:
        return len(read_credentials(Path(server.api_keys)).tenants) if server.api_keys is not None else 0
    except ConfigError:
        return 0


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


def serve(settings: Settings, announce: Callable[[str], None] = print) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status.

    Args:
        announce: told, line by line, what was started and with what memory.

    Raises:
        CloisterError: something cannot be used or does not fit; the message says what to do.
    """
    from cloister.sealed.attesting import read_attesting
    from cloister.server.serve import serve as serve_site

    read_attesting(settings.server.config)
    gate = build_gate(settings)
    if settings.server.config.gateway_secret is not None and not settings.server.config.sealed:
        raise ConfigError("gateways show their secret to sealed nodes only; add --sealed", param="gateway_secret")
    set_up_logging(settings.server.config.log_format)
    open_site = _open_rotation if settings.models else _open_node if settings.server.config.sealed else _open_site

    async def open_closed_site() -> Site:
        site = await open_site(settings, gate, announce)
        if hardening.sealed() is not None:
            hardening.preload(FRONT_PACKAGES, LATE_MODULES)
            hardening.close_this()
        return site

    return serve_site(settings.server.config, open_closed_site, announce)


def launch_sealed(settings: Settings, arguments: Sequence[str], config_file: Path | None = None) -> NoReturn:
    """Executes the launcher, which takes the measures of a sealed node and then runs `cloister` with the arguments given.

    Models are downloaded before, as a sealed node calls nobody.

    Raises:
        CloisterError: the model cannot be found, or there are several.
    """
    from cloister.privacy.hardening.launching import Launch, execute, reading
    from cloister.sealed.attesting import read_attesting

    if settings.models:
        raise ConfigError("a sealed node serves one model; start a node for each", param="sealed")
    config, front = settings.engine.config, settings.server.config
    adapters = [part.partition("=")[2].strip() for part in (config.lora or "").split(",") if part]
    secrets = [front.api_keys, front.certfile, front.keyfile, front.gateway_secret]
    files = [*secrets, config.release_prefixes, str(config_file) if config_file is not None else None]
    cache = _weights_cache(config)
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
    model = locate(config.model, progress=True)
    attesting = read_attesting(front)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # what forks has one thread; our kernels have threads of their own
    execute(
        Launch(
            profile=str(config.profile),
            read=reading(
                [model, *map(Path, adapters), *attesting.folders],
                [*(Path(file) for file in files if file is not None), *attesting.files],
            ),
            write=(str(cache),) if cache is not None else (),
            listen=(front.port,),
            with_engine=True,
            with_attester=attesting.uses_hardware,
            module="cloister.cli",
            arguments=tuple(arguments),
        )
    )


def _start_sealed_engine(far: socket.socket) -> Process:
    """Has the starter make an engine process: in a sealed node nothing executes a program."""
    state = hardening.sealed()
    assert state is not None
    assert state.starter is not None
    return state.starter.start("engine", [], far.fileno())


def _start_sealed_module(module: str, sock: socket.socket) -> Process:
    """Has the starter make a process beside the engine, by the role that the module has."""
    from cloister.privacy.hardening.launching import ROLE_OF

    state = hardening.sealed()
    assert state is not None
    assert state.starter is not None
    return state.starter.start(ROLE_OF[module], [], sock.fileno())


def _make_engine(
    config: EngineConfig, front: ServerConfig, doorkeeper: Callable[[socket.socket], None] | None = None
) -> ProcessEngine:
    """Returns an engine in a process of its own, one with no way in if the front has none."""
    from cloister.engine import ProcessEngine

    if hardening.sealed() is None:
        return ProcessEngine(ENGINE_ENTRY, config, log_format=front.log_format, doorkeeper=doorkeeper)
    return ProcessEngine(
        SEALED_ENGINE_ENTRY, config, log_format=front.log_format, spawn=_start_sealed_engine, doorkeeper=doorkeeper
    )


async def _open_node(settings: Settings, gate: Gate, announce: Callable[[str], None]) -> Site:
    """Starts engine, sealer and zygote, and the front that carries sealed bytes between them and a gateway."""
    from cloister.privacy.shape import shape_of
    from cloister.sealed.attesting import check_prefixes, open_announcer, read_attesting
    from cloister.sealed.secret_files import read_secret
    from cloister.sealed.workers.crew import Crew, start_module
    from cloister.sealed.workers.sealer import SealerBoot
    from cloister.sealed.workers.site import WAITING_WORKERS, WORKER_ENTRY, worker_site
    from cloister.sealed.workers.zygote import ZygoteBoot
    from cloister.server.serve import Site
    from cloister.types.events import Ready

    config, front = settings.engine.config, settings.server.config
    gateway_secret = read_secret(Path(front.gateway_secret)) if front.gateway_secret is not None else None
    crew = Crew(start_module if hardening.sealed() is None else _start_sealed_module)
    engine = _make_engine(config, front, crew.keep_door)
    await engine.start()
    started_s = time.time()
    try:
        ready = Ready(engine.model, engine.memory, list(engine.adapters.loaded.values()), engine.startup)
        paths = [path for path in sys.path if path]
        must_lock = overwrites(config.profile)
        shape = shape_of(settings.policy.profile)
        await crew.open(SealerBoot(must_lock=must_lock), ZygoteBoot(WORKER_ENTRY, config, front, ready, paths, shape))
        check_prefixes(config.release_prefixes, Path(engine.model.path))
        announcer = await open_announcer(
            read_attesting(front),
            settings.policy.profile,
            Path(engine.model.path),
            crew.unsealer,
            started_s,
            _tell_hardening,
            None if hardening.sealed() is None else _start_sealed_module,
        )
    except BaseException:
        crew.close()
        await engine.drain(0.0)
        raise
    return_free_memory()
    for line in describe_start(settings, engine.model, engine.memory, engine.startup, gate.notice()):
        announce(line)
    announce(f"keys in a sealer ({crew.memory}), one worker for each request")
    app = worker_site(
        crew,
        engine.health,
        evidence=announcer.evidence,
        gateway_secret=gateway_secret,
        max_workers=config.max_num_seqs + WAITING_WORKERS,
    )
    announcing = asyncio.create_task(announcer.renew_forever())  # begins when this process is closed: its evidence says so

    def close() -> None:
        announcing.cancel()
        crew.close()

    return Site(app, engine, (), close, lambda: crew.fault)


def _tell_hardening() -> Mapping[str, str]:
    state = hardening.sealed()
    return {} if state is None else state.statement()


async def _open_site(settings: Settings, gate: Gate, announce: Callable[[str], None]) -> Site:
    """Starts the engine process, and the front that talks to it."""
    from cloister.server.app import create_app
    from cloister.server.serve import Site
    from cloister.server.trace_export import open_tracer
    from cloister.text import ChatTemplate, Tokenizer

    config, front = settings.engine.config, settings.server.config
    engine = _make_engine(config, front)
    imported_s = process_age_s()
    await engine.start()
    watch = Stopwatch()
    try:
        path = Path(engine.model.path)
        tracer = open_tracer(front, engine.model.name)
        app = create_app(
            engine,
            Tokenizer(path),
            ChatTemplate.load(path),
            gate,
            front,
            listeners=[tracer.write] if tracer is not None else [],
            request_timeout_s=config.request_timeout_s,
        )
    except BaseException:
        await engine.drain(0.0)
        raise
    return_free_memory()
    watch.lap("front")
    (name, engine_imported_s), *others = engine.startup
    engine.startup = [(name, imported_s + engine_imported_s), *others, *watch.laps]
    for line in describe_start(settings, engine.model, engine.memory, engine.startup, gate.notice()):
        announce(line)
    close = tracer.close if tracer is not None else lambda: None
    return Site(app, engine, _sources(settings, gate), close)


async def _open_rotation(settings: Settings, gate: Gate, announce: Callable[[str], None]) -> Site:
    """Starts the first of several models, and the front that sends requests to whichever they name."""
    from cloister.server.app import request_log, surround
    from cloister.server.calls import Calls
    from cloister.server.rotation import Rotation
    from cloister.server.serve import Site
    from cloister.server.switch import ModelSwitch, list_entry
    from cloister.server.trace_export import open_tracer

    front = settings.server.config
    entries = {name: list_entry(name, engine.config.model) for name, engine in settings.models.items()}
    tracer = open_tracer(front, "several")

    async def open_seat(name: str) -> Seat:
        one = replace(settings, engine=settings.models[name])
        seat = await _open_seat(one, gate, calls, name)
        entries[name] = list_entry(name, seat.engine.model.name, seat.engine.model)
        for line in describe_start(one, seat.engine.model, seat.engine.memory, seat.engine.startup, None):
            announce(line)
        return seat

    rotation = Rotation(open_seat, settings.engine.config.request_timeout_s)
    calls = Calls(
        lambda route, status: rotation.shown.count_reply(route, status) if rotation.shown is not None else None,
        [*request_log(front, gate), *([tracer.write] if tracer is not None else [])],
    )
    await rotation.begin(next(iter(settings.models)))
    if (notice := gate.notice()) is not None:
        announce(notice)
    announce(f"one at a time in memory: {', '.join(settings.models)}")
    app = surround(ModelSwitch(rotation, entries), calls, gate, front)
    return Site(app, rotation, _sources(settings, gate), tracer.close if tracer is not None else lambda: None)


async def _open_seat(settings: Settings, gate: Gate, calls: Calls, name: str) -> Seat:
    """Starts the engine of one of several models, and its routes."""
    from cloister.server.app import create_routes, make_exposition
    from cloister.server.switch import Seat
    from cloister.text import ChatTemplate, Tokenizer

    config, front = settings.engine.config, settings.server.config
    engine = _make_engine(config, front)
    await engine.start()
    try:
        exposition = make_exposition(engine, gate, [name])
        path = Path(engine.model.path)
        routes = create_routes(
            engine,
            Tokenizer(path),
            ChatTemplate.load(path),
            gate,
            front,
            calls,
            exposition,
            names=[name],
            request_timeout_s=config.request_timeout_s,
        )
    except BaseException:
        await engine.drain(0.0)
        raise
    return_free_memory()
    return Seat(routes, engine, exposition)


def _sources(settings: Settings, gate: Gate) -> tuple[Source, ...]:
    """Returns what a running server reads again when its file changes."""
    from cloister.server.reload import Source

    if settings.server.config.api_keys is None:
        return ()
    path = Path(settings.server.config.api_keys).expanduser()
    return (Source("API keys", (path,), lambda: gate.change_keys(read_credentials(path))),)


def describe_start(
    settings: Settings,
    model: ModelInfo,
    memory: Sequence[tuple[str, int]],
    startup: Sequence[tuple[str, float]],
    notice: str | None,
) -> Iterator[str]:
    """Yields the lines that an operator reads at start: what runs, under which profile, where memory and time went."""
    config = settings.engine.config
    yield f"{model.name} ({model.fingerprint}) on {config.backend}, {config.device}, {config.num_threads} threads"
    yield f"profile {config.profile}, scheduler {config.scheduler}, prefix cache {'on' if config.prefix_cache else 'off'}"
    yield f"context window {model.max_model_len} tokens, {config.max_num_seqs} sequences at once"
    items = [*memory, ("in all", sum(size for _, size in memory))]
    yield "memory: " + ", ".join(f"{what} {size / 2**20:.0f} MiB" for what, size in items)
    whole_s = sum(duration_s for _, duration_s in startup)
    yield f"started in {whole_s:.1f} s: " + ", ".join(f"{phase} {duration_s:.2f}" for phase, duration_s in startup)
    if notice is not None:
        yield notice


def build_engine(config: EngineConfig) -> EngineCore:
    """Loads the model and puts an engine together; the entry point of the engine process.

    Raises:
        ModelError: the model cannot be used.
        MemoryBudgetError: it cannot fit; the message has the figure that would.
    """
    from cloister.engine import EngineCore, Output
    from cloister.engine.tidying import Tidier
    from cloister.runner import Grammars, ModelRunner
    from cloister.runner.adapters import plan_room
    from cloister.text import Tokenizer
    from cloister.text.grammar import GrammarCompiler

    watch = Stopwatch()
    machine = read_machine()
    path = locate(config.model, progress=True)
    watch.lap("locate")
    is_local = config.model in embedded_names() or Path(config.model).expanduser().exists()
    cache = _weights_cache(config)
    digests = None if cache is None else cache / "digests.json"
    model = load(path, None if is_local else config.model, digests, config.max_model_len)
    max_model_len = _max_model_len(config, model)
    pooling = read_pooling(model.path, config.pooling)
    tokenizer = Tokenizer(model.path, remembers=not overwrites(config.profile))
    watch.lap("read")
    return_free_memory()  # before the weights are there, so that it does not count on top of them
    weights = _write_in_few_bits(config, model)
    backend = make_backend(config, machine, model.spec)
    need = backend.need(model.spec, weights, block_size=config.block_size, max_batched_tokens=_max_batched_tokens(config))
    room = plan_room(config)
    budget = budget_memory(
        need,
        available_bytes=machine.available_bytes if need.available_bytes is None else need.available_bytes,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_memory_mb=config.kv_memory_mb,
        adapters_bytes=0 if room is None else room.num_bytes(model.spec, _max_batched_tokens(config)),
    )
    identity = f"{model.info.fingerprint} {config.quant} {QUANT_VERSION}"
    program = backend.build(model.spec, weights, KVLayout(budget.num_blocks, config.block_size), identity=identity)
    slots, adapters = _open_adapters(config, model.spec, program, room)
    watch.lap("build")
    fingerprint = _fingerprint(model, backend, config)
    info = msgspec.structs.replace(
        model.info,
        max_model_len=max_model_len,
        fingerprint=fingerprint,
        hidden_size=model.spec.hidden_size,
        pooling=pooling,
    )
    vocab_size = model.spec.vocab_size
    grammars = Grammars(GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_token_ids=info.eos_token_ids))
    runner = ModelRunner(
        program,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        block_size=config.block_size,
        adapters=slots,
        grammars=grammars,
    )
    tidier = Tidier(runner.wipe_buffers) if overwrites(config.profile) else None
    return EngineCore(
        build_scheduler(config, info, budget.num_blocks, _release_prefixes(config, model.path, tokenizer)),
        runner,
        Output(tokenizer, info),
        model=info,
        memory=list(budget.items),
        startup=watch.laps,
        adapters=adapters,
        grammars=grammars,
        tidier=tidier,
    )


def build_program(config: EngineConfig, num_blocks: int) -> Program:
    """Loads the model and builds its program alone, with the numbers that an engine with these settings has.

    Raises:
        ModelError: the model cannot be used.
    """
    machine = read_machine()
    model = load(locate(config.model), None, None, config.max_model_len)
    backend = make_backend(config, machine, model.spec)
    identity = f"{model.info.fingerprint} {config.quant} {QUANT_VERSION}"
    weights = _write_in_few_bits(config, model)
    return backend.build(model.spec, weights, KVLayout(num_blocks, config.block_size), identity=identity)


def build_sealed_engine(config: EngineConfig) -> EngineCore:
    """As `build_engine`, in a process that is closed before it says that it is ready.

    Raises:
        HardeningError: it cannot be closed.
    """
    core = build_engine(config)
    hardening.preload(ENGINE_PACKAGES, LATE_MODULES)
    hardening.close_this()
    return core


def _open_adapters(
    config: EngineConfig, spec: DecoderSpec, program: Program, room: AdapterRoom | None
) -> tuple[Mapping[str, int], AdapterRegister]:
    """Loads the adapters that the settings name; returns their slots by digest, and who knows them by name."""
    from cloister.engine import AdapterRegister
    from cloister.runner.adapters import AdapterSlots

    if room is None:
        return {}, AdapterRegister()
    if not isinstance(program, AdapterProgram):
        raise ConfigError(
            "this back end has no adapters; leave `lora` and `runtime_adapters` out, or compute on a CPU", param="lora"
        )
    host = AdapterSlots(program, partial(read_adapter, spec=spec, max_rank=room.max_rank), room.num_slots)
    loaded = [host.load(name, path) for name, path in room.given]
    return host.slots, AdapterRegister(host if config.runtime_adapters else None, loaded)


def _release_prefixes(config: EngineConfig, path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    if config.release_prefixes is None:
        return []
    from cloister.text import ChatTemplate
    from cloister.text.release_prefixes import read_release_prefixes

    return read_release_prefixes(Path(config.release_prefixes).expanduser(), tokenizer, ChatTemplate.load(path))


def build_scheduler(config: EngineConfig, model: ModelInfo, num_blocks: int, public: Sequence[Sequence[int]] = ()) -> Scheduler:
    """Returns a scheduler as the settings want it, over `num_blocks` blocks of its own.

    Args:
        public: token ids of prefixes that everybody shares.

    Raises:
        ConfigError: those would take more than half of the blocks.
    """
    keys = PrefixKeys(model.fingerprint, config.block_size, public)
    if len(keys.public) > num_blocks // 2:
        raise ConfigError(
            f"release_prefixes take {len(keys.public)} of {num_blocks} KV blocks; shorten them or raise kv_memory_mb",
            param="release_prefixes",
        )
    target_s = config.target_step_ms / 1e3 if config.target_step_ms is not None else None
    return Scheduler(
        SchedulerConfig(
            max_model_len=model.max_model_len,
            max_num_seqs=config.max_num_seqs,
            policy=config.scheduler,
            budget=BudgetConfig(_max_batched_tokens(config), target_s, config.max_stall, config.stall_floor_ms / 1e3),
            eos_token_ids=model.eos_token_ids,
            prefix_cache=bool(config.prefix_cache),
            cache_scopes=config.cache_scopes or 0,
        ),
        BlockPool(num_blocks, config.block_size),
        keys,
    )


def make_backend(config: EngineConfig, machine: Machine, spec: DecoderSpec) -> Backend:
    """Returns the back end that the settings name, for a model of that spec."""
    is_foreign = spec.family == FOREIGN_FAMILY
    if is_foreign and config.quant != NO_QUANT:
        raise ConfigError("a model without a spec cannot be quantised here; leave `quant` out", param="quant")
    factory = BACKENDS.get(FOREIGN_FAMILY if is_foreign else chosen_backend(config))
    return factory(
        num_threads=config.num_threads or machine.num_cpus,
        device=config.device or "cpu",
        dtype=config.dtype,
        kv_dtype=config.kv_dtype or (None if config.quant == NO_QUANT else choose_kv_dtype(number_format(config.quant), spec)),
        numerics=config.numerics,
        store=_weights_cache(config),
        store_bytes=round(config.weights_cache_mb * (1 << 20)),
    )


def chosen_backend(config: EngineConfig) -> str:
    """Returns the name of the back end: the setting, or what `_settle_machine` would choose."""
    return config.backend or _choose_backend(config.device or "cpu")[0]


def _choose_backend(device: str) -> tuple[str, str]:
    """Returns a back end's name and why."""
    if device != "cpu":
        return "torch", f"the device is {device}"
    reason = native.available()
    return ("native", "the device is a CPU") if reason is None else ("torch", reason)


def number_format(name: str) -> NumberFormat:
    """Returns the number format of that name with its own options."""
    return FORMATS.get(name)(FormatOptions())


def _write_in_few_bits(config: EngineConfig, model: LoadedModel) -> Weights:
    """Returns the model's weights, quantised as they are read if the settings say so."""
    if config.quant == NO_QUANT:
        return model.weights
    return quantize_on_read(model.spec, model.weights, number_format(config.quant))


def _weights_cache(config: EngineConfig) -> Path | None:
    return Path(config.weights_cache).expanduser() if config.weights_cache else None


def _settle_machine(engine: Resolved[EngineConfig], machine: Machine) -> Resolved[EngineConfig]:
    """Fills what the machine decides."""
    chosen: dict[str, tuple[object, str]] = {}
    if engine.config.num_threads is None:
        chosen["num_threads"] = (machine.num_cpus, f"CPUs that this process may use ({machine.num_cpus})")
    if engine.config.device is None:
        has_gpu = Path("/dev/nvidiactl").exists()
        chosen["device"] = ("cuda", "there is an NVIDIA device") if has_gpu else ("cpu", "there is no NVIDIA device")
    if engine.config.backend is None:
        device = str(chosen["device"][0]) if "device" in chosen else engine.config.device
        chosen["backend"] = _choose_backend(device or "cpu")
    return engine.explain(**chosen)


def _max_model_len(config: EngineConfig, model: LoadedModel) -> int:
    trained = model.spec.max_positions
    if config.max_model_len is not None and config.max_model_len > trained:
        raise ConfigError(
            f"max_model_len is {config.max_model_len} and the model was trained for {trained} positions; set {trained} or less",
            param="max_model_len",
        )
    return config.max_model_len or trained


def _max_batched_tokens(config: EngineConfig) -> int:
    """Tokens in one step: on a CPU longer ones win little, and buffers stay small."""
    return config.max_batched_tokens or (1024 if (config.device or "cpu") == "cpu" else 2048)


def _fingerprint(model: LoadedModel, backend: Backend, config: EngineConfig) -> str:
    """What the bits of an answer depend on (rule 6), as `system_fingerprint`."""
    turns = repr([layer.attention.rope for layer in model.spec.layers])  # the greatest length of a sequence may decide them
    parts = (model.info.fingerprint, backend.fingerprint, config.quant, str(QUANT_VERSION), turns)
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _read_toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the config file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path} is not TOML: {error}") from None
