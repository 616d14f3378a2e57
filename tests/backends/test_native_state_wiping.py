"""What drafts leave of states in the buffers of the native back end: it is there, and after the last request it is not."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from cloister.backends.base import GREEDY, FloatArray
from cloister.backends.native.program import NativeProgram
from cloister.backends.spec import DecoderSpec, ShortConvSpec, StateSpec
from tests.driving import Driver, RandomWeights
from tests.memory_search import CAN_SEARCH, Needle, count_each, find_any
from tests.native import DELTA_NETS, MAMBA_LAYERS, SHORT_CONVOLUTIONS, SIDE_BY_SIDE, build_native
from tests.thinning import thin

pytestmark = pytest.mark.skipif(not CAN_SEARCH, reason="memory is searched through /proc")

SPECS: Mapping[str, DecoderSpec] = {
    "gated delta nets": DELTA_NETS,
    "Mamba 2": MAMBA_LAYERS,
    "Mamba 2 beside attention": SIDE_BY_SIDE,
    "short convolutions": SHORT_CONVOLUTIONS,
}
_STARTS = itertools.count(20, 7)


@pytest.fixture
def prompt() -> list[int]:
    """Another one for each test: what an earlier one left in memory that it freed is not found."""
    start = next(_STARTS)
    return list(range(start, start + 12))


def advance(driver: Driver, tokens: list[int], num_drafts: int) -> int:
    """Computes tokens of a new sequence, the last of them as drafts, and returns the block of its state."""
    batch = driver.plan({"a": tokens}, [len(tokens) - 1])
    block, known = driver.blocks("a")[0], len(tokens) - num_drafts
    spans = [[0, known, block, block], [known, len(tokens), block, -1]][: 1 + (num_drafts > 0)]
    driver.program.step(replace(batch, state_spans=np.array(spans, np.int32)), GREEDY)
    return block


def find_states(driver: Driver, spec: DecoderSpec, tokens: list[int]) -> tuple[list[Needle], list[Needle]]:
    """Returns the last inputs of each convolution behind the tokens, and the states of each head; nothing in this process holds
    them any more."""
    program = driver.program
    assert isinstance(program, NativeProgram)
    block = advance(driver, tokens, 0)
    inputs, states = [], []
    for number, layer in enumerate(spec.layers):
        if layer.state is None:
            continue
        # of a layer with attention too, the states come last; `read_block` would leave a copy in freed memory
        cache = [cache for owner, cache, *_ in program._caches if owner == number][-1]
        state: FloatArray = cache[block].view(np.float32)
        channels, start = conv_size(layer.state), (layer.state.kernel_size - 1) * conv_size(layer.state)
        inputs.append(Needle(state[start - channels :][:8].copy()))
        states += [Needle(state[-5:].copy())] if len(state) > start else []
        state[:] = 0
    driver.free("a")
    program.wipe_buffers()
    assert not find_any((*inputs, *states))
    return inputs, states


def conv_size(state: StateSpec) -> int:
    return state.size if isinstance(state, ShortConvSpec) else state.conv_size


@pytest.mark.parametrize("name", thin(SPECS, 2))
def test_what_is_kept_of_drafts_stays_until_it_is_wiped(name: str, prompt: list[int]) -> None:
    driver = build_native(SPECS[name], RandomWeights(SPECS[name]))
    assert isinstance(driver.program, NativeProgram)
    inputs, states = find_states(driver, SPECS[name], prompt)
    advance(driver, prompt, 3)
    assert all(count_each((*inputs, *states[-1:]))), "the last inputs, and the copy of the last head"
    driver.program.wipe_buffers()
    driver.free("a")
    assert not find_any((*inputs, *states))


def test_accepted_drafts_leave_the_state_in_its_block_alone(prompt: list[int]) -> None:
    driver = build_native(DELTA_NETS, RandomWeights(DELTA_NETS))
    assert isinstance(driver.program, NativeProgram)
    inputs, states = find_states(driver, DELTA_NETS, prompt)
    block = advance(driver, prompt, 2)
    drafts = np.array([[len(prompt) - 2, block], [len(prompt) - 1, block]], np.int32)
    driver.program.accept_drafts(drafts)
    driver.program.wipe_buffers()
    assert count_each((*inputs, *states)) == [1] * len((*inputs, *states))
    driver.free("a")
    assert not find_any((*inputs, *states))
