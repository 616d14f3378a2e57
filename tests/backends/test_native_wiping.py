"""What a step leaves in the buffers of the native back end: it is there, and after the last request it is not."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from cloister.backends.base import DRAW, FloatArray
from cloister.backends.native.program import NativeProgram
from cloister.bench.idle import make_idle_engine
from cloister.types.events import Submit
from cloister.types.request import Request, SamplingParams
from tests.driving import Driver, RandomWeights, make_spec
from tests.memory_search import CAN_SEARCH, Needle
from tests.native import GivenWeights, build_native

pytestmark = pytest.mark.skipif(not CAN_SEARCH, reason="memory is searched through /proc")

SPEC = make_spec(hidden=256, intermediate=172, heads=(8, 2), head_dim=32, vocab=1500)
PROMPT = list(range(100, 140))


def make() -> tuple[Driver, NativeProgram]:
    driver = build_native(SPEC, RandomWeights(SPEC), num_threads=2)
    assert isinstance(driver.program, NativeProgram)
    return driver, driver.program


def last_logits(driver: Driver, program: NativeProgram) -> Needle:
    """The logits that follow the prompt, which nothing in this process holds any more."""
    logits: FloatArray = program.forward(driver.plan({"once": PROMPT}))
    needle = Needle(np.ascontiguousarray(logits[-1, 600:608]))
    logits[:] = 0
    driver.free("once")
    program.wipe_buffers()
    assert needle.count() == 0
    return needle


def test_logits_of_a_greedy_step_stay_until_they_are_wiped() -> None:
    driver, program = make()
    needle = last_logits(driver, program)
    program.forward_best(driver.plan({"a": PROMPT}, [len(PROMPT) - 1]))
    assert needle.count() == 1
    program.wipe_buffers()
    assert needle.count() == 0


def test_logits_of_a_drawing_step_stay_until_they_are_wiped() -> None:
    driver, program = make()
    needle = last_logits(driver, program)
    draws = np.zeros(1, DRAW)
    draws["temperature"], draws["top_p"], draws["top_k"] = 1, 0.9, 100
    program.forward_draw(driver.plan({"a": PROMPT}, [len(PROMPT) - 1]), draws)
    assert needle.count() == 1
    program.wipe_buffers()
    assert needle.count() == 0


def test_activations_stay_until_they_are_wiped() -> None:
    tensors = dict(RandomWeights(SPEC))
    for layer in range(len(SPEC.layers)):
        for name in ("o", "down"):
            tensors[f"layers.{layer}.{name}.weight"][:] = 0  # so that the residual stream stays what was embedded
    tensors["embed.weight"][PROMPT[0]] = np.float32(1234.567)
    driver = build_native(SPEC, GivenWeights(tensors), num_threads=2)
    assert isinstance(driver.program, NativeProgram)
    tensors["embed.weight"][:] = 0
    needle = Needle(np.full(64, 1234.567, np.float32))
    gc.collect()
    before = needle.count()
    driver.program.forward_best(driver.plan({"a": PROMPT}))
    assert needle.count() > before
    driver.program.wipe_buffers()
    assert needle.count() == before


def test_a_buffer_that_grows_leaves_nothing_where_it_was() -> None:
    driver, program = make()
    needle = last_logits(driver, program)
    driver, program = make()
    program.forward_best(driver.plan({"a": PROMPT}, [len(PROMPT) - 1]))
    assert needle.count() == 1
    program.forward_best(driver.plan({"b": list(range(200))}))
    assert needle.count() == 0


def test_after_a_wipe_a_step_has_the_same_bits() -> None:
    driver, program = make()
    before = driver.run("a", PROMPT).tobytes()
    program.wipe_buffers()
    program.wipe_buffers()
    assert driver.run("b", PROMPT).tobytes() == before


def test_an_engine_without_requests_keeps_nothing_of_them() -> None:
    driver, program = make()
    needle = last_logits(driver, program)
    engine = make_idle_engine(program, vocab_size=SPEC.vocab_size, num_seqs=1)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    engine.core.inbox.put(Submit(Request(request_id="a", token_ids=PROMPT, sampling=sampling, timeout_s=60.0)))
    assert engine.core.step() is not None
    assert needle.count() == 1
    while engine.core.step() is not None:
        pass
    assert needle.count() == 0


def test_a_row_of_logits_stays_on_no_stack_whichever_thread_computed_it_last() -> None:
    driver, program = make()
    logits: FloatArray = program.forward(driver.plan({"once": PROMPT}))
    ends = (20, 21, 22, 44, 45, 46)  # of 47 panels those that one of two threads may have multiplied last
    panels = [Needle(np.ascontiguousarray(logits[-1, 32 * panel : 32 * panel + 8])) for panel in ends]
    logits[:] = 0
    assert any(needle.count() for needle in panels)
    program.wipe_buffers()
    assert not any(needle.count() for needle in panels)
