"""Builds the server of one model, or of several that take turns in memory: engine, access control, startup messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cloister.engine.machine import freeze_gc_heap, process_age_s, return_free_memory
from cloister.launch.kept_files import kept_tokenizers
from cloister.launch.processes import make_engine
from cloister.launch.settings import LOCAL, Settings
from cloister.policy import Gate, is_loopback, read_credentials
from cloister.types.clock import Stopwatch
from cloister.types.config import AUTO_DRAFTER, EngineConfig, ServerConfig
from cloister.types.request import ModelInfo

if TYPE_CHECKING:
    from cloister.engine import RequestClient
    from cloister.policy.oidc import People
    from cloister.server.calls import HttpCalls
    from cloister.server.files.service import FileService
    from cloister.server.model_switcher import LoadedApp
    from cloister.server.reload import WatchedFiles
    from cloister.server.responses.keeping import ResponseStore
    from cloister.server.serve import ServerApp


def describe_start(
    settings: Settings,
    model: ModelInfo,
    memory: Sequence[tuple[str, int]],
    startup: Sequence[tuple[str, float]],
    notice: str | None,
) -> Iterator[str]:
    """Yields the startup messages for an operator: model, drafters, profile, memory and startup times."""
    config, front = settings.engine.config, settings.server.config
    if front.replicas > 1 or front.on != LOCAL:
        where = "" if front.on == LOCAL else f" on {front.on} ({front.ray_address or 'this machine alone'})"
        yield f"{_say_number(front)} replicas{_say_roles(front)}{_say_standby(front)}{where}, router {front.router}; each:"
    num_threads = config.num_threads
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads" if num_threads else "as many threads as it gets CPUs"
    yield f"{model.name} ({model.fingerprint}) on {model.backend}, {config.device}, {threads}"
    if front.fork_server and model.backend != "native":
        yield f"each engine starts by itself, not as a fork: {model.backend} computes this model"
    yield f"profile {config.profile}, scheduler {config.scheduler}, prefix cache {'on' if config.prefix_cache else 'off'}"
    yield f"context window {model.max_model_len} tokens, {config.max_num_seqs} sequences at once"
    yield f"drafts: {_say_drafts(config, model.drafters)}"
    items = [*memory, ("in all", sum(size for _, size in memory))]
    whose = "memory of all replicas" if front.replicas > 1 else "memory"
    yield f"{whose}, at most: " + ", ".join(f"{what} {size / 2**20:.0f} MiB" for what, size in items)
    if config.kv_tier is not None:
        yield from _say_disk(config.kv_tier, front.replicas)
    whole_s = sum(duration_s for _, duration_s in startup)
    yield f"started in {whole_s:.1f} s: " + ", ".join(f"{phase} {duration_s:.2f}" for phase, duration_s in startup)
    if notice is not None:
        yield notice


def _say_disk(kv_tier: str, num_replicas: int) -> Iterator[str]:
    """Yields a message with the disk space of the KV tier, if there is one; each engine has its own file."""
    from cloister.engine.kv_tier_storage import FREE_SHARE, parse_tiers  # only if a tier is configured: it imports cryptography

    for tier in parse_tiers(kv_tier):
        if not tier.storage.is_memory:
            most = f"{FREE_SHARE:.0%} of what is free" if tier.num_bytes is None else f"{tier.num_bytes / 2**20:.0f} MiB"
            yield f"disk, at most: KV tier {most} in {tier.path}{' for each replica' if num_replicas > 1 else ''}"


def _say_number(front: ServerConfig) -> str:
    if front.max_replicas is None:
        return str(front.replicas)
    return f"{1 if front.min_replicas is None else front.min_replicas} to {front.max_replicas}"


def _say_roles(front: ServerConfig) -> str:
    if not front.prefill and not front.decode:
        return ""
    counts = {"prefill": front.prefill, "decode": front.decode, "mixed": front.replicas - front.prefill - front.decode}
    return f" ({', '.join(f'{count} {role}' for role, count in counts.items() if count)})"


def _say_standby(front: ServerConfig) -> str:
    if not front.standby:
        return ""
    return f", {front.standby} of them {'stands' if front.standby == 1 else 'stand'} by until another one is lost"


def _say_drafts(config: EngineConfig, drafters: Sequence[str]) -> str:
    if not drafters:
        return "none"
    notes = []
    if config.speculate == AUTO_DRAFTER:
        notes.append("auto")
    if config.draft_tokens is not None:
        notes.append(f"{config.draft_tokens} token{'' if config.draft_tokens == 1 else 's'} a step")
    return ", ".join(drafters) + (f" ({', '.join(notes)})" if notes else "")


# Access control, and the files that a running server reloads.


def build_gate(settings: Settings) -> Gate:
    """Returns the gate that admits requests.

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
    from cloister.policy.oidc import People, read_oidc
    from cloister.server.oidc import check_extra

    check_extra()
    return People(read_oidc(path))


def reread_sources(settings: Settings, gate: Gate) -> tuple[WatchedFiles, ...]:
    """Returns the files that a running server reloads when they change."""
    from cloister.server.reload import WatchedFiles

    if settings.server.config.api_keys is None:
        return ()
    path = Path(settings.server.config.api_keys).expanduser()
    return (WatchedFiles("API keys", (path,), lambda: gate.change_keys(read_credentials(path))),)


def _find_early(model: str) -> Path | None:
    """Returns the local path of a model, as the engine will report it; None if it must be downloaded first."""
    from cloister.models import locate
    from cloister.models.location import find_model, find_named

    if find_named(model) is not None or Path(model).expanduser().exists():
        return find_model(locate(model))
    return None


def _own_path(config: EngineConfig, front: ServerConfig, model: ModelInfo) -> Path:
    """Returns the local path of the model's tokenizer.

    Raises:
        ModelError: replicas run on other machines, and this one does not have the model.
    """
    if front.on == LOCAL:
        return Path(model.path)
    from cloister.models.location import find_model, locate_here

    return find_model(locate_here(config.model))


def _open_files(front: ServerConfig, gate: Gate) -> FileService | None:
    """Returns the service for users' files and batches; None if it is off (`FileService.open`)."""
    if front.files is None:
        return None
    from cloister.server.files.service import FileService

    return FileService.open(front, gate)


def _response_store(front: ServerConfig) -> ResponseStore | None:
    from cloister.server.responses.keeping import ResponseStore

    return ResponseStore(most_continued_bytes=front.max_request_kb * 1024) if front.keep_responses else None


async def open_plain(settings: Settings, gate: Gate, announce: Callable[[str], None]) -> ServerApp:
    """Starts the engine process, and the front that talks to it."""
    config, front = settings.engine.config, settings.server.config
    stored = _open_files(front, gate)  # first: report an unusable directory before a model is loaded for minutes
    engine = make_engine(config, front)
    imported_s = process_age_s()
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)  # lets the engine process start, so that it loads while this process imports
    try:
        try:
            from cloister.server.app import create_app
            from cloister.server.serve import ServerApp
            from cloister.server.traces import open_tracer
            from cloister.text import ChatTemplate, Tokenizer

            early = _find_early(config.model)
            read = partial(Tokenizer, kept=kept_tokenizers(config))
            tokenizer = await asyncio.to_thread(read, early) if early is not None else None
        except asyncio.CancelledError:
            starting.cancel()  # the server is stopping
            raise
        finally:
            await starting
        watch = Stopwatch()
        path = _own_path(config, front, engine.model)
        if tokenizer is None or early != path:
            tokenizer = read(path)
        tracer = open_tracer(front, engine.model.name)
        app = create_app(
            engine,
            tokenizer,
            ChatTemplate.load(path, tokenizer.special),
            gate,
            front,
            listeners=[tracer.write] if tracer is not None else [],
            stored=stored,
            responses_kept=_response_store(front),
            request_timeout_s=config.request_timeout_s,
            num_threads=config.num_threads,
        )
    except BaseException:
        if stored is not None:
            stored.close()
        await engine.drain(0.0)
        raise
    freeze_gc_heap(searches=False)  # each full collection would stop all streams for 0.1 s
    return_free_memory()
    watch.lap("front")
    (name, engine_imported_s), *others = engine.startup
    engine.startup = [(name, imported_s + engine_imported_s), *others, *watch.laps]
    for line in describe_start(settings, engine.model, engine.memory, engine.startup, gate.notice()):
        announce(line)
    close = tracer.close if tracer is not None else lambda: None
    return ServerApp(app, engine, reread_sources(settings, gate), close, engine.fault)


async def open_model_switcher(settings: Settings, gate: Gate, announce: Callable[[str], None]) -> ServerApp:
    """Starts the first of several models, and the front that routes requests by model name."""
    from cloister.server.app import request_log, surround
    from cloister.server.calls import HttpCalls, count_unread
    from cloister.server.files.service import FileService
    from cloister.server.metrics import make_tenant_figures
    from cloister.server.model_switcher import ModelSwitch, ModelSwitcher, list_entry
    from cloister.server.serve import ServerApp
    from cloister.server.traces import open_tracer

    front = settings.server.config
    entries = {name: list_entry(name, engine.config.model) for name, engine in settings.models.items()}
    tracer = open_tracer(front, "several")
    engine: RequestClient | None = None

    async def open_app(name: str) -> LoadedApp:
        one = replace(settings, engine=settings.models[name])
        nonlocal engine
        engine = make_engine(one.engine.config, front)
        loaded = await _open_app(one, engine, gate, calls, name, stored, responses_kept)
        entries[name] = list_entry(name, loaded.engine.model.name, loaded.engine.model)
        for line in describe_start(one, loaded.engine.model, loaded.engine.memory, loaded.engine.startup, None):
            announce(line)
        return loaded

    stored = FileService.open(front, gate)
    responses_kept = _response_store(front)
    switcher = ModelSwitcher(open_app, settings.engine.config.request_timeout_s, partial(freeze_gc_heap, thaw=True))
    calls = HttpCalls(
        lambda route, status: switcher.shown.count_reply(route, status) if switcher.shown is not None else None,
        [
            *request_log(front, gate),
            count_unread(lambda: None if switcher.shown is None else switcher.shown.count_unread()),
            *([tracer.write] if tracer is not None else []),
        ],
        make_tenant_figures(gate),
    )
    await switcher.begin(next(iter(settings.models)))
    if (notice := gate.notice()) is not None:
        announce(notice)
    announce(f"one at a time in memory: {', '.join(settings.models)}")
    app = surround(ModelSwitch(switcher, entries), calls, gate, front, stored=stored)
    freeze_gc_heap(searches=False)
    close = tracer.close if tracer is not None else lambda: None
    return ServerApp(
        app, switcher, reread_sources(settings, gate), close, lambda: engine.fault() if engine is not None else None
    )


async def _open_app(
    settings: Settings,
    engine: RequestClient,
    gate: Gate,
    calls: HttpCalls,
    name: str,
    stored: FileService | None,
    responses_kept: ResponseStore | None,
) -> LoadedApp:
    """Starts the engine of one of several models, and its routes."""
    from cloister.server.app import create_routes, make_exposition
    from cloister.server.model_switcher import LoadedApp
    from cloister.text import ChatTemplate, Tokenizer

    config, front = settings.engine.config, settings.server.config
    await engine.start()
    try:
        exposition = make_exposition(engine, gate, [name])
        path = Path(engine.model.path)
        tokenizer = Tokenizer(path, kept=kept_tokenizers(config))
        routes = create_routes(
            engine,
            tokenizer,
            ChatTemplate.load(path, tokenizer.special),
            gate,
            front,
            calls,
            exposition,
            names=[name],
            stored=stored,
            responses_kept=responses_kept,
            request_timeout_s=config.request_timeout_s,
            num_threads=config.num_threads,
        )
    except BaseException:
        await engine.drain(0.0)
        raise
    return_free_memory()
    return LoadedApp(routes, engine, exposition)
