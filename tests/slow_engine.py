"""Engines whose steps take their time: what a test does to an answer happens in its middle, on however fast a machine, and
although the test itself may be stopped by others for a while.

`python -m tests.slow_engine serve ...` is `cloister serve` with such engines (`tests.serving.ServeProcess`, `module=SLOW`). A
test that starts engines itself sets `cloister.launch.processes.ENGINE_ENTRY`, and one with an engine in its own process
calls `slow_down`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec

from cloister.engine.core import EngineCore
from cloister.launch import build_engine, processes
from cloister.types.config import EngineConfig
from cloister.types.events import Outputs

if TYPE_CHECKING:
    import pytest

P = ParamSpec("P")
SLOW = ("tests.slow_engine", "serve")
ENTRY = "tests.slow_engine:build_slow_engine"
STEP_S = 0.01
"""A step takes so much longer than it computes: some fifty times as long."""


def build_slow_engine(config: EngineConfig) -> EngineCore:
    """Entry point of an engine process."""
    core = build_engine(config)
    core.step = _slowly(core.step)  # type: ignore[method-assign]
    return core


def slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the engines of this process take their time until the test ends, those too that run already."""
    monkeypatch.setattr(EngineCore, "step", _slowly(EngineCore.step))


def _slowly(step: Callable[P, Outputs | None]) -> Callable[P, Outputs | None]:
    def step_slowly(*args: P.args, **kwargs: P.kwargs) -> Outputs | None:
        outputs = step(*args, **kwargs)
        if outputs is not None:
            time.sleep(STEP_S)
        return outputs

    return step_slowly


if __name__ == "__main__":
    from cloister.cli import main

    processes.ENGINE_ENTRY = ENTRY  # type: ignore[misc]
    main()
