"""A template that starts before its settings are known: it serves once, answers as any other, and ends if nobody needs it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloister.engine import spawning
from cloister.types.request import FinishReason
from tests.engine.replica import VOCAB_SIZE, make_request
from tests.engine.test_fork_server import forking
from tests.engine.test_process import answer, is_alive, reasons, run, until
from tests.history_program import greedy_continuation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="templates are forked on Linux only")


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    spawning.discard_early_template()
    yield
    spawning.discard_early_template()


def start_early(preloaded: str = "") -> int:
    spawning.start_early_template(preloaded)
    assert spawning._early is not None
    return spawning._early[0].pid


@pytest.mark.parametrize("preloaded", ["", "tests.engine.replica", "cloister.no_such_module"])
def test_engines_are_forks_of_the_template_that_was_started_early(model_path: Path, preloaded: str) -> None:
    async def main() -> None:
        early = start_early(preloaded)
        async with forking(model_path) as (server, (engine,)):
            assert server.pid == early
            request = make_request("tell me", max_tokens=20)
            outputs = await answer(engine, request)
            assert [i for o in outputs for i in o.token_ids] == greedy_continuation(request.token_ids, 20, VOCAB_SIZE)
            assert reasons(outputs) == [FinishReason.LENGTH]
        assert not is_alive(early)

    run(main())


def test_it_is_taken_once(model_path: Path) -> None:
    async def main() -> None:
        early = start_early()
        async with forking(model_path) as (one, _), forking(model_path) as (other, _):
            assert one.pid == early
            assert other.pid not in (None, early)

    run(main())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_one_that_has_died_is_replaced(model_path: Path, number: int) -> None:
    async def main() -> None:
        early = start_early()
        os.kill(early, number)
        await until(lambda: not is_alive(early))
        async with forking(model_path) as (server, (engine,)):
            assert server.pid not in (None, early)
            assert reasons(await answer(engine, make_request("tell me", max_tokens=2))) == [FinishReason.LENGTH]

    run(main())


def test_one_that_nobody_needs_ends() -> None:
    early = start_early()
    spawning.discard_early_template()
    assert not is_alive(early)
    assert spawning.take_early_template() is None


def test_it_ends_when_nobody_is_at_the_other_end() -> None:
    start_early()
    taken = spawning.take_early_template()
    assert taken is not None
    process, near = taken
    near.close()
    assert process.wait(300) == 0


def test_where_none_can_be_started_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    spawning.start_early_template("")
    assert spawning.take_early_template() is None
