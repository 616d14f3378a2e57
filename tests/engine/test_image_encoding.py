"""Images are encoded beside the steps: nobody waits for another's image, and who leaves takes his along."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cloister.backends.base import FloatArray
from cloister.engine.core import EngineCore
from cloister.executor import image_encoding
from cloister.executor.image_encoding import ENCODING_FAILED, ImageEncoding
from cloister.launch.engine import build_engine
from cloister.models.image_processing import open_image_processor
from cloister.types.config import EngineConfig
from cloister.types.errors import EngineError
from cloister.types.events import Abort, Ended, Outputs, Submit
from cloister.types.images import ImageTile
from cloister.types.request import FinishReason, Request
from cloister.types.scope import Scope, ScopeKind
from cloister.types.step import StepPlan, StepResult
from tests.memory_search import CAN_SEARCH, Needle, find_any
from tests.vision_factory import NUM_TOKENS, make_picture, make_vision_model
from tests.vision_serving import make_request, place_tiles

PATIENCE_S = 60.0


class Gate:
    """Stands before the tower: images wait until it is opened.

    Attributes:
        begun: set when an image has arrived there.
        ended: how the encodings ended, in order: "done", or the name of an exception's type.
        fails: images that pass it are not encoded, but fail.
    """

    def __init__(self, core: EngineCore) -> None:
        encoding = core._runner.encoding  # type: ignore[attr-defined]
        self._encode = encoding._encode
        encoding._encode = self
        self.opened, self.begun = threading.Event(), threading.Event()
        self.ended: list[str] = []
        self.fails = False

    def __call__(self, image: ImageTile, check: Callable[[], None]) -> FloatArray:
        self.begun.set()
        try:
            while not self.opened.wait(0.002):
                check()
            if self.fails:
                raise RuntimeError("the tower broke")
            found: FloatArray = self._encode(image, check)
        except Exception as error:
            self.ended.append(type(error).__name__)
            raise
        self.ended.append("done")
        return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["torch", "native"])
def core(path: Path, request: pytest.FixtureRequest) -> EngineCore:
    return build_engine(
        EngineConfig(
            model=str(path), backend=request.param, dtype="float32", num_threads=1, max_model_len=400, kv_memory_mb=8,
            block_size=8, max_num_seqs=4, profile="open", speculate="none", prefix_cache=True, weights_cache="",
        )
    )  # fmt: skip


@pytest.fixture
def gate(core: EngineCore) -> Iterator[Gate]:
    gate = Gate(core)
    yield gate
    gate.opened.set()


def ask(name: str, path: Path, *, seed: int | None = None, timeout_s: float = 600.0) -> Request:
    """Returns a request about the picture of a seed, or one of text only."""
    prompt, images = list(range(5, 25)), ()
    if seed is not None:
        opened = open_image_processor(path)
        assert opened is not None
        prompt, images = place_tiles(prompt, opened[0].cut(make_picture(24, 24, seed))[:1], [2], NUM_TOKENS)
    return msgspec.structs.replace(make_request(name, prompt, images), timeout_s=timeout_s)


class Driven:
    """Steps an engine and keeps what it says.

    Attributes:
        tokens: of each request.
        ends: how each request ended, and with which error.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, tuple[FinishReason, str | None]] = {}

    def until(self, is_over: Callable[[], object]) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not is_over():
            assert time.monotonic() < give_up_s, "the engine waits for something"
            outputs = self.core.step()
            if outputs is not None:
                self._note(outputs)

    def _note(self, outputs: Outputs) -> None:
        for output in outputs.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        for event in outputs.events:
            if isinstance(event, Ended):
                self.ends[event.request_id] = (event.reason, event.error)


def serve(core: EngineCore, *requests: Request) -> dict[str, list[int]]:
    driven = Driven(core)
    for request in requests:
        core.input_queue.put(Submit(request))
    driven.until(lambda: len(driven.ends) == len(requests))
    return driven.tokens


def test_others_are_answered_while_an_image_is_encoded(core: EngineCore, path: Path) -> None:
    expected = serve(core, ask("text", path))["text"]
    gate, driven = Gate(core), Driven(core)
    core.input_queue.put(Submit(ask("other", path, seed=2)))
    driven.until(gate.begun.is_set)
    core.input_queue.put(Submit(ask("text", path)))
    driven.until(lambda: "text" in driven.ends)
    assert driven.tokens["text"] == expected
    assert "other" not in driven.tokens
    gate.opened.set()
    driven.until(lambda: "other" in driven.ends)
    assert driven.ends["other"] == (FinishReason.LENGTH, None)


def test_who_leaves_ends_the_encoding(core: EngineCore, gate: Gate, path: Path) -> None:
    driven = Driven(core)
    core.input_queue.put(Submit(ask("seen", path, seed=1)))
    driven.until(gate.begun.is_set)
    core.input_queue.put(Abort("seen"))
    driven.until(lambda: gate.ended)
    assert gate.ended == ["EncodingCancelledError"]
    assert driven.ends["seen"][0] is FinishReason.ABORT
    gate.opened.set()
    driven.until(lambda: not core._runner.encoding.is_busy)  # type: ignore[attr-defined]
    assert not core._runner.encoding._jobs  # type: ignore[attr-defined]


def test_an_image_that_takes_too_long_ends_its_request_at_the_deadline(core: EngineCore, gate: Gate, path: Path) -> None:
    driven = Driven(core)
    core.input_queue.put(Submit(ask("seen", path, seed=1, timeout_s=0.1)))
    driven.until(lambda: "seen" in driven.ends)
    assert driven.ends["seen"][0] is FinishReason.TIMEOUT
    driven.until(lambda: gate.ended)
    assert gate.ended == ["EncodingCancelledError"]


def test_a_tower_that_fails_ends_its_request_alone(
    core: EngineCore, gate: Gate, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate.fails = True
    gate.opened.set()
    driven = Driven(core)
    with caplog.at_level(logging.DEBUG):
        core.input_queue.put(Submit(ask("seen", path, seed=1)))
        core.input_queue.put(Submit(ask("text", path)))
        driven.until(lambda: len(driven.ends) == 2)
    assert driven.ends == {"seen": (FinishReason.ERROR, ENCODING_FAILED), "text": (FinishReason.LENGTH, None)}
    assert "could not be encoded" in caplog.text
    assert "the tower broke" not in caplog.text, "what a library says may be content"


def test_an_idle_engine_wakes_when_an_image_is_done_and_says_that_it_lives(core: EngineCore, gate: Gate, path: Path) -> None:
    said: list[Outputs] = []
    thread = threading.Thread(target=core.run, args=(said.append,), daemon=True)
    thread.start()
    core.input_queue.put(Submit(ask("seen", path, seed=1)))
    wait_for(lambda: any(not (outputs.outputs or outputs.events) for outputs in said))
    gate.opened.set()
    opened_s = time.monotonic()
    wait_for(lambda: any(isinstance(event, Ended) for outputs in said for event in outputs.events))
    assert time.monotonic() - opened_s < PATIENCE_S / 2
    core._drain_by_s = 0.0
    core.input_queue.wake()
    thread.join(PATIENCE_S)


def test_a_failed_step_ends_the_requests_that_it_should_have_begun_to_encode(core: EngineCore, path: Path) -> None:
    run, driven = core._runner.run, Driven(core)

    def fail_once(plan: StepPlan) -> StepResult:
        core._runner.run = run  # type: ignore[method-assign]
        raise RuntimeError

    core._runner.run = fail_once  # type: ignore[method-assign]
    core.input_queue.put(Submit(ask("seen", path, seed=1)))
    driven.until(lambda: "seen" in driven.ends)
    assert driven.ends["seen"][0] is FinishReason.ERROR
    assert len(serve(core, ask("again", path, seed=1))["again"]) == 12


def test_a_preempted_sequence_has_its_images_encoded_again(core: EngineCore, path: Path) -> None:
    expected = serve(core, ask("seen", path, seed=3))["seen"]
    gate, driven = Gate(core), Driven(core)
    other = msgspec.structs.replace(ask("seen", path, seed=3), scope=Scope(ScopeKind.TENANT, b"another"))
    core.input_queue.put(Submit(other))
    driven.until(gate.begun.is_set)
    (sequence,) = core._scheduler._requests.running.values()
    core._scheduler._requests.preempt(sequence, 0.0)
    driven.until(lambda: gate.ended)
    gate.opened.set()
    driven.until(lambda: "seen" in driven.ends)
    assert gate.ended == ["EncodingCancelledError", "done"]
    assert driven.tokens["seen"] == expected


def test_a_plan_that_reaches_an_image_too_early_is_refused() -> None:
    encoding = ImageEncoding(lambda image, check: np.ones(4, np.float32), 1)
    with pytest.raises(EngineError, match="not encoded"):
        encoding.collect(1, 2)


def test_embeddings_that_nobody_took_are_overwritten() -> None:
    made = np.ones((4, 4), np.float32)
    encoding = ImageEncoding(lambda image, check: made, 1)
    encoding.start(1, ImageTile(offset=0, num_tokens=4, digest=b"", pixels=b""))
    wait_for(lambda: not encoding.num_running)
    encoding.cancel(1)
    assert not made.any()
    assert encoding.take() == []


def test_threads_that_encode_yield_to_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def encode(image: ImageTile, check: Callable[[], None]) -> FloatArray:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return np.ones(1, np.float32)

    encoding = ImageEncoding(encode, 1)
    encoding.start(1, ImageTile(offset=0, num_tokens=1, digest=b"", pixels=b""))
    wait_for(lambda: not encoding.num_running)
    assert found == [max(image_encoding.NICENESS, os.getpriority(os.PRIO_PROCESS, 0))]


@pytest.mark.skipif(not CAN_SEARCH, reason="reads /proc")
def test_no_embedding_is_left_in_memory_when_its_request_has_ended(core: EngineCore, path: Path) -> None:
    encode, needles = core._runner.encoding._encode, []  # type: ignore[attr-defined]

    def watch(image: ImageTile, check: Callable[[], None]) -> FloatArray:
        found: FloatArray = encode(image, check)
        needles.extend(Needle(row[:8].copy()) for row in found)
        return found

    core._runner.encoding._encode = watch  # type: ignore[attr-defined]
    driven = Driven(core)
    core.input_queue.put(Submit(ask("seen", path, seed=4)))
    driven.until(lambda: len(needles) == NUM_TOKENS)
    assert find_any(needles), "while the image waits for its step"
    driven.until(lambda: "seen" in driven.ends)
    for _ in range(3):
        core.step()
    gc.collect()
    core._runner.wipe_buffers()  # type: ignore[attr-defined]
    assert not find_any(needles)


def wait_for(is_over: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not is_over():
        assert time.monotonic() < give_up_s
        time.sleep(0.002)
