"""What a step leaves in the buffers of the native back end: it is there, and after the last request it is not."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest

from benchmarks.idle import make_idle_engine
from cloister.backends.base import GREEDY, LOGITS, SAMPLING_METADATA, FloatArray, Wants
from cloister.backends.native.program import NativeProgram
from cloister.backends.spec import MlpSpec, MoeSpec
from cloister.types.events import Submit
from cloister.types.request import Request, SamplingParams
from tests.driving import Driver, RandomWeights, make_spec
from tests.memory_search import CAN_SEARCH, Needle, find_any
from tests.native import STREAMS, GivenWeights, build_native, changed

pytestmark = pytest.mark.skipif(not CAN_SEARCH, reason="memory is searched through /proc")

SPEC = make_spec(hidden=256, intermediate=172, heads=(8, 2), head_dim=32, vocab=1500)
_STARTS = itertools.count(100, 7)


def make() -> tuple[Driver, NativeProgram]:
    driver = build_native(SPEC, RandomWeights(SPEC), num_threads=2)
    assert isinstance(driver.program, NativeProgram)
    return driver, driver.program


@pytest.fixture
def prompt() -> list[int]:
    """Another one for each test: what an earlier one left in memory that it freed is not found."""
    start = next(_STARTS)
    return list(range(start, start + 40))


def last_logits(driver: Driver, program: NativeProgram, prompt: list[int]) -> Needle:
    """The logits that follow the prompt, which nothing in this process holds any more."""
    logits: FloatArray = program.step(driver.plan({"once": prompt}), LOGITS).logits
    needle = Needle(np.ascontiguousarray(logits[-1, 600:608]))
    logits[:] = 0
    driver.free("once")
    program.wipe_buffers()
    assert needle.count() == 0
    return needle


def test_logits_of_a_greedy_step_stay_until_they_are_wiped(prompt: list[int]) -> None:
    driver, program = make()
    needle = last_logits(driver, program, prompt)
    program.step(driver.plan({"a": prompt}, [len(prompt) - 1]), GREEDY)
    assert needle.count() == 1
    program.wipe_buffers()
    assert needle.count() == 0


@pytest.mark.slow  # a masked step draws too
def test_logits_of_a_drawing_step_stay_until_they_are_wiped(prompt: list[int]) -> None:
    driver, program = make()
    needle = last_logits(driver, program, prompt)
    draws = np.zeros(1, SAMPLING_METADATA)
    draws["temperature"], draws["top_p"], draws["top_k"] = 1, 0.9, 100
    program.step(driver.plan({"a": prompt}, [len(prompt) - 1]), Wants(sampling=draws))
    assert needle.count() == 1
    program.wipe_buffers()
    assert needle.count() == 0


def test_logits_of_a_masked_step_stay_until_they_are_wiped(prompt: list[int]) -> None:
    driver, program = make()
    needle = last_logits(driver, program, prompt)
    draws = np.zeros(2, SAMPLING_METADATA)
    draws["temperature"], draws["top_p"] = 1, 1
    every = np.full((2, 47), 0xFFFFFFFF, np.uint32)
    program.step(driver.plan({"a": prompt}, [len(prompt) - 1]), Wants(sampling=draws, masks=lambda: every))
    assert needle.count() == 3  # both draws choose from one row: kept, and copied for each of their masks
    program.wipe_buffers()
    assert needle.count() == 0


def test_activations_stay_until_they_are_wiped(prompt: list[int]) -> None:
    tensors = dict(RandomWeights(SPEC))
    for layer in range(len(SPEC.layers)):
        for name in ("o", "down"):
            tensors[f"layers.{layer}.{name}.weight"][:] = 0  # so that the residual stream stays what was embedded
    tensors["embed.weight"][prompt[0]] = np.float32(1234.567)
    driver = build_native(SPEC, GivenWeights(tensors), num_threads=2)
    assert isinstance(driver.program, NativeProgram)
    tensors["embed.weight"][:] = 0
    needle = Needle(np.full(64, 1234.567, np.float32))
    gc.collect()
    before = needle.count()
    driver.program.step(driver.plan({"a": prompt}), GREEDY)
    assert needle.count() > before
    driver.program.wipe_buffers()
    assert needle.count() == before


def test_what_experts_were_given_stays_until_it_is_wiped(prompt: list[int]) -> None:
    spec = changed(SPEC, layer={"mlp": MoeSpec(4, 2, MlpSpec(64))})
    tensors = dict(RandomWeights(spec))
    for name in tensors:
        if name.endswith(("o.weight", "down.weight")):
            tensors[name][:] = 0  # so that the residual stream stays what was embedded
        if name.endswith("mlp_norm.weight"):
            tensors[name][:] = 1234.567
    tensors["embed.weight"][prompt[0]] = 1
    driver = build_native(spec, GivenWeights(tensors), num_threads=2)
    assert isinstance(driver.program, NativeProgram)
    needle = Needle(np.full(64, np.float32(1234.567) * np.float32((1 + 1e-5) ** -0.5), np.float32))
    gc.collect()
    before = needle.count()
    driver.program.step(driver.plan({"a": prompt[:1], "b": prompt[:1]}), GREEDY)
    assert needle.count() > before + 2  # the router's inputs, and those of two experts
    driver.program.wipe_buffers()
    assert needle.count() == before


def test_nothing_of_several_residual_streams_stays(prompt: list[int]) -> None:
    """A token whose embedding is no number, of bits of its own, makes all that is computed of it the same."""
    tensors = dict(RandomWeights(STREAMS))
    no_number = np.array([0x7FC12345], np.uint32).view(np.float32)
    tensors["embed.weight"][prompt[0]] = no_number
    driver = build_native(STREAMS, GivenWeights(tensors), num_threads=2)
    assert isinstance(driver.program, NativeProgram)
    tensors["embed.weight"][:] = 0
    needle = Needle(no_number.repeat(8))
    gc.collect()
    before = needle.count()
    driver.program.step(driver.plan({"a": prompt[:1] * 3}, [1, 2]), GREEDY)
    driver.free("a")
    assert needle.count() > before + 1000
    driver.program.wipe_buffers()
    assert needle.count() == before


def test_a_buffer_that_grows_leaves_nothing_where_it_was(prompt: list[int]) -> None:
    driver, program = make()
    needle = last_logits(driver, program, prompt)
    driver, program = make()
    program.step(driver.plan({"a": prompt}, [len(prompt) - 1]), GREEDY)
    assert needle.count() == 1
    program.step(driver.plan({"b": list(range(200))}), GREEDY)
    assert needle.count() == 0


def test_after_a_wipe_a_step_has_the_same_bits(prompt: list[int]) -> None:
    driver, program = make()
    before = driver.run("a", prompt).tobytes()
    program.wipe_buffers()
    program.wipe_buffers()
    assert driver.run("b", prompt).tobytes() == before


def test_an_engine_without_requests_keeps_nothing_of_them(prompt: list[int]) -> None:
    driver, program = make()
    needle = last_logits(driver, program, prompt)
    engine = make_idle_engine(program, vocab_size=SPEC.vocab_size, num_seqs=1)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    engine.core.input_queue.put(Submit(Request(request_id="a", token_ids=prompt, sampling=sampling, timeout_s=600.0)))
    assert engine.core.step() is not None
    assert needle.count() == 1
    while engine.core.step() is not None:
        pass
    assert needle.count() == 0


def test_a_row_of_logits_stays_on_no_stack_whichever_thread_computed_it_last(prompt: list[int]) -> None:
    driver, program = make()
    batch = driver.plan({"once": prompt})
    logits: FloatArray = program.step(batch, LOGITS).logits
    ends = (20, 21, 22, 44, 45, 46)  # of 47 panels those that one of two threads multiplies last, unless one was held up
    panels = [Needle(np.ascontiguousarray(logits[-1, 32 * panel : 32 * panel + 8])) for panel in ends]
    logits[:] = 0
    for _ in range(5):
        if find_any(panels):
            break
        program.step(batch, LOGITS).logits[:] = 0
    else:
        pytest.fail("no row of logits is on any stack")
    program.wipe_buffers()
    assert not find_any(panels)
