"""A front that has started: what it keeps is exempt from garbage collection, and nothing that is garbage is."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cloister.launch import app, resolve_settings
from cloister.server.serve import ServerApp
from tests.server.running_server import INFO, ScriptedEngine, says, write_model

SEVERAL = """
[models.one]
model = "cloister-5m"

[models.two]
model = "cloister-draft"
"""


class Loop:
    """Garbage that refers to itself."""

    def __init__(self) -> None:
        self.me = self


class StartedEngine(ScriptedEngine):
    """An engine that says how long it took to start, as those that load a model do."""

    async def start(self) -> None:
        await super().start()
        self.startup = [("import", 0.1)]


@pytest.mark.parametrize("several", [False, True], ids=["one model", "several models"])
def test_the_front_freezes_what_it_keeps_and_frees_what_starting_has_left(
    several: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "models.toml"
    config.write_text(SEVERAL)
    settings = resolve_settings({} if several else {"model": "cloister-5m"}, config_file=config if several else None)
    engine = StartedEngine(says("hello"), model=msgspec.structs.replace(INFO, path=str(write_model(tmp_path))))
    left: list[weakref.ref[Loop]] = []

    def make_engine(*_: object) -> StartedEngine:
        left.append(weakref.ref(Loop()))
        return engine

    monkeypatch.setattr(app, "make_engine", make_engine)
    open_server: Callable[..., object] = app.open_model_switcher if several else app.open_plain

    async def start() -> ServerApp:
        await engine.start()
        return await open_server(settings, app.build_gate(settings), lambda _: None)  # type: ignore[misc, no-any-return]

    gc.disable()
    try:
        server = asyncio.run(start())
        if several:  # a start of one model searches for none, which would take a tenth of a second (decisions/0059)
            assert [found() for found in left] == [None]
        assert all(found is not server.engine for found in gc.get_objects())  # frozen: no collection looks at it
    finally:
        gc.enable()
