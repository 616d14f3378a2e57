"""The front of one model, and the engine behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cloister.app.backend import kept_tokenizers
from cloister.app.gate import reread_sources
from cloister.app.processes import make_engine
from cloister.app.settings import Settings
from cloister.app.starting import describe_start
from cloister.engine.machine import process_age_s, return_free_memory
from cloister.privacy import Gate
from cloister.types.clock import Stopwatch

if TYPE_CHECKING:
    from cloister.server.serve import ServerApp


def _find_early(model: str) -> Path | None:
    """Returns where a model lies that is on this machine, as the engine will say; None for one that has to be fetched first."""
    from cloister.models import locate
    from cloister.models.directory import find_model
    from cloister.models.location import find_named

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
            from cloister.server.trace_export import open_tracer
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
