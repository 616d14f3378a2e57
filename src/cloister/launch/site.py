"""The server of one model, with its engine and its access control."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cloister.engine.machine import process_age_s, return_free_memory
from cloister.launch.backend import kept_tokenizers
from cloister.launch.processes import make_engine
from cloister.launch.settings import Settings
from cloister.launch.starting import describe_start
from cloister.policy import Gate, is_loopback, read_credentials
from cloister.types.clock import Stopwatch

if TYPE_CHECKING:
    from cloister.policy.oidc import People
    from cloister.server.reload import WatchedFiles
    from cloister.server.serve import ServerApp


# Access control, and the files that a running server reloads.


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
    from cloister.policy.oidc import People, read_oidc
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


def _find_early(model: str) -> Path | None:
    """Returns where a model lies that is on this machine, as the engine will say; None for one that has to be fetched first."""
    from cloister.models import locate
    from cloister.models.location import find_model, find_named

    if find_named(model) is not None or Path(model).expanduser().exists():
        return find_model(locate(model))
    return None


async def open_plain(settings: Settings, gate: Gate, announce: Callable[[str], None]) -> ServerApp:
    """Starts the engine process, and the front that talks to it."""
    config, front = settings.engine.config, settings.server.config
    engine = make_engine(config, front)
    imported_s = process_age_s()
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)  # its process is there now, and loads while this one imports
    try:
        try:
            from cloister.server.app import create_app
            from cloister.server.files.service import FileService
            from cloister.server.responses.keeping import ResponseStore
            from cloister.server.serve import ServerApp
            from cloister.server.traces import open_tracer
            from cloister.text import ChatTemplate, Tokenizer

            early = _find_early(config.model)
            read = partial(Tokenizer, kept=kept_tokenizers(config))
            tokenizer = await asyncio.to_thread(read, early) if early is not None else None
        finally:
            await starting
        watch = Stopwatch()
        path = Path(engine.model.path)
        if tokenizer is None or early != path:
            tokenizer = read(path)
        tracer = open_tracer(front, engine.model.name)
        stored = FileService.open(front, gate)
        app = create_app(
            engine,
            tokenizer,
            ChatTemplate.load(path, tokenizer.special),
            gate,
            front,
            listeners=[tracer.write] if tracer is not None else [],
            stored=stored,
            responses_kept=ResponseStore() if front.keep_responses else None,
            request_timeout_s=config.request_timeout_s,
            num_threads=config.num_threads,
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
    return ServerApp(app, engine, reread_sources(settings, gate), close, engine.fault)
