"""One server for several models that take turns in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cloister.engine.machine import return_free_memory
from cloister.launch.backend import kept_tokenizers
from cloister.launch.processes import make_engine
from cloister.launch.settings import Settings
from cloister.launch.site import reread_sources
from cloister.launch.starting import describe_start
from cloister.policy import Gate

if TYPE_CHECKING:
    from cloister.engine import EngineClient
    from cloister.server.calls import HttpCalls
    from cloister.server.files.service import FileService
    from cloister.server.model_switcher import LoadedApp
    from cloister.server.responses.keeping import ResponseStore
    from cloister.server.serve import ServerApp


async def open_rotation(settings: Settings, gate: Gate, announce: Callable[[str], None]) -> ServerApp:
    """Starts the first of several models, and the front that sends requests to whichever they name."""
    from cloister.server.app import request_log, surround
    from cloister.server.calls import HttpCalls
    from cloister.server.files.service import FileService
    from cloister.server.metrics import make_tenant_figures
    from cloister.server.model_switcher import ModelSwitch, ModelSwitcher, list_entry
    from cloister.server.responses.keeping import ResponseStore
    from cloister.server.serve import ServerApp
    from cloister.server.traces import open_tracer

    front = settings.server.config
    entries = {name: list_entry(name, engine.config.model) for name, engine in settings.models.items()}
    tracer = open_tracer(front, "several")
    engine: EngineClient | None = None

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
    responses_kept = ResponseStore() if front.keep_responses else None
    switcher = ModelSwitcher(open_app, settings.engine.config.request_timeout_s)
    calls = HttpCalls(
        lambda route, status: switcher.shown.count_reply(route, status) if switcher.shown is not None else None,
        [*request_log(front, gate), *([tracer.write] if tracer is not None else [])],
        make_tenant_figures(gate),
    )
    await switcher.begin(next(iter(settings.models)))
    if (notice := gate.notice()) is not None:
        announce(notice)
    announce(f"one at a time in memory: {', '.join(settings.models)}")
    app = surround(ModelSwitch(switcher, entries), calls, gate, front, stored=stored)
    close = tracer.close if tracer is not None else lambda: None
    return ServerApp(
        app, switcher, reread_sources(settings, gate), close, lambda: engine.fault() if engine is not None else None
    )


async def _open_app(
    settings: Settings,
    engine: EngineClient,
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
