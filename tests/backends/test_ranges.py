"""Sequences that see their KV at addresses in a row have the bits of those with block tables (decisions/0042)."""

from __future__ import annotations

import errno
import gc
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cloister.backends import BACKENDS, ranges
from cloister.backends.base import FloatArray, ForwardBatch, KVGroup, KVLayout
from cloister.backends.ranges import KVRanges, RangeLayout
from cloister.backends.spec import AttentionSpec
from cloister.backends.torch import program as torch_program
from cloister.types.errors import ConfigError, EngineError
from tests.driving import Driver, RandomWeights, make_spec
from tests.native import KERNELS
from tests.thinning import thin

BASE = make_spec(hidden=32, intermediate=48, heads=(4, 2), head_dim=16, num_layers=3, vocab=64)
_SECOND = BASE.layers[1].attention
assert isinstance(_SECOND, AttentionSpec)
SPEC = replace(BASE, layers=(*BASE.layers[:2], replace(BASE.layers[2], attention=replace(_SECOND, shared_kv=1))))
"""A decoder whose last layer reads the KV of the one before."""
WEIGHTS = RandomWeights(SPEC, 4)
LONGEST, NUM_SEQS = 700, 5
NATIVE = [
    *({"kernels": kernels, "dtype": ("float32", "bfloat16")[place % 2]} for place, kernels in enumerate(KERNELS)),
    *({"dtype": "bfloat16", "kv_dtype": kind} for kind in ("int8", "int4")),
]
KINDS = [
    *(("torch", {"dtype": dtype}, size) for dtype, size in (("float32", 16), ("bfloat16", 8))),
    *(("native", options, (16, 5, 32)[place % 3]) for place, options in enumerate(NATIVE)),
]
"""Back ends, number formats and block sizes, one of which divides no page."""


class RangedDriver(Driver):
    """A driver whose sequences are read at their addresses."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._slots: dict[object, int] = {}

    @property
    def ranges(self) -> KVRanges:
        assert self.program.ranges is not None
        return self.program.ranges

    def plan(self, parts: Mapping[Any, Sequence[int]], logit_rows: Sequence[int] | None = None) -> ForwardBatch:
        batch = super().plan(parts, logit_rows)
        firsts = []
        for seq in parts:
            if seq not in self._slots:
                self._slots[seq] = min(set(range(NUM_SEQS)) - set(self._slots.values()))
            self.ranges.map(self._slots[seq], 0, self._tables[seq])
            firsts.append(self.ranges.first_block(self._slots[seq]))
        tables = np.array(firsts, np.int32)[:, None] + np.arange(batch.block_tables.shape[1], dtype=np.int32)
        return replace(batch, block_tables=tables)

    def forget(self, seq: object, owner: object) -> None:
        super().forget(seq, owner)
        if seq in self._slots:
            self.ranges.release(self._slots.pop(seq))


def make_driver(backend: str, options: Mapping[str, Any], block_size: int, *, ranged: bool, num_threads: int = 1) -> Driver:
    num_blocks = (NUM_SEQS + 1) * -(-LONGEST // block_size)
    layout = KVLayout(num_blocks, block_size)
    if ranged:
        layout = replace(layout, ranges=RangeLayout(NUM_SEQS, -(-LONGEST // block_size)))
    maker = BACKENDS.get(backend)(num_threads=num_threads, device="cpu", **options)
    return (RangedDriver if ranged else Driver)(maker.build(SPEC, WEIGHTS, layout), num_blocks, block_size)


def run_history(one: Driver, seed: int, num_steps: int) -> list[FloatArray]:
    """Steps of sequences that come, go, share prefixes, take back tokens and end; returns the logits of each step."""
    rng, found = random.Random(seed), []
    lengths: dict[int, int] = {}
    owners: dict[int, int] = {}
    for number in range(num_steps):
        if len(lengths) < NUM_SEQS and rng.random() < 0.5:
            sources = [seq for seq in lengths if seq not in owners and lengths[seq]]
            if sources and rng.random() < 0.6:  # a prefix hit, or a fork
                source = rng.choice(sources)
                lengths[number] = rng.randrange(1, lengths[source] + 1)
                owners[number] = source
                one.share(source, number, lengths[number])
            else:
                lengths[number] = 0
        leaving = [seq for seq in lengths if seq not in owners.values() and lengths[seq]]
        if leaving and rng.random() < 0.15:
            seq = rng.choice(leaving)
            one.forget(seq, owners.pop(seq, None))
            del lengths[seq]
        parts = {}
        for seq in rng.sample(list(lengths), rng.randrange(len(lengths) + 1)):
            count = min(rng.choice((1, 1, 1, 3, 40, 300)), LONGEST - 4 - lengths[seq])
            if count > 0:
                parts[seq] = [rng.randrange(SPEC.vocab_size) for _ in range(count)]
                lengths[seq] += count
        if not parts:
            continue
        found += one.step(parts).values()
        for seq, tokens in parts.items():
            if len(tokens) == 3:  # drafts, of which two are rejected
                lengths[seq] -= 2
                one.cut(seq, lengths[seq])
    return found


@pytest.mark.parametrize("seed", thin(range(6), 1))
@pytest.mark.parametrize(("backend", "options", "block_size"), thin(KINDS, [KINDS[0], KINDS[2], KINDS[3], *KINDS[-2:]]))
def test_bits_are_those_of_block_tables(backend: str, options: Mapping[str, Any], block_size: int, seed: int) -> None:
    paged, ranged = (
        run_history(make_driver(backend, options, block_size, ranged=ranged, num_threads=1 + seed % 2), seed, 24)
        for ranged in (False, True)
    )
    assert [each.tobytes() for each in ranged] == [each.tobytes() for each in paged]


def test_whole_splits_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_driver("torch", {"dtype": "float32"}, 16, ranged=True)
    runs, attend = [], torch_program.attend
    monkeypatch.setattr(torch_program, "attend", lambda *given: (runs.extend(given[3].runs), attend(*given)))
    one.step({"a": [1] * 600, "b": [2] * 300})
    one.step({"a": [1], "b": [2], "c": [3]})
    in_place = [run for run in runs if run.first_slot is not None]
    assert sum(run.num_splits * run.width for run in in_place) >= 2 * len(SPEC.layers) * 512
    assert all(run.first_slot is not None for run in runs if run.hidden is None)


def test_attention_that_knows_no_blocks_runs_on_a_range() -> None:
    """`scaled_dot_product_attention` gets a view of the memory in which blocks lie in a shuffled order."""
    one = make_driver("torch", {"dtype": "float32"}, 16, ranged=True)
    assert isinstance(one, RangedDriver)
    one.run("a", [token % 64 for token in range(600)], chunk=150)
    slots = one.program._cache.layers[1]  # type: ignore[attr-defined]
    first = one.ranges.first_block(0) * 16
    attention = SPEC.layers[1].attention
    assert attention is not None
    size = attention.num_kv_heads * attention.head_dim
    shape = (600, attention.num_kv_heads, attention.head_dim)
    queries = torch.randn(1, shape[1], 8, shape[2], generator=torch.Generator().manual_seed(1))

    def attend(rows: torch.Tensor) -> torch.Tensor:
        keys, values = (part.unflatten(1, shape[1:]).transpose(0, 1)[None] for part in rows.split(size, 1))
        return F.scaled_dot_product_attention(queries, keys, values)

    view = slots[first : first + 600]
    assert view.data_ptr() == slots.data_ptr() + first * slots.stride(0) * 4, "it is a copy"
    gathered = slots[[one.slot("a", position) for position in range(600)]]
    assert torch.equal(view, gathered)
    assert torch.equal(attend(view), attend(gathered))


def make_ranges(num_ranges: int = 3, num_entries: int = 20, num_blocks: int = 30) -> KVRanges:
    made = KVRanges(RangeLayout(num_ranges, num_entries), num_blocks, 4096)
    made.memory[:num_blocks] = np.arange(1, num_blocks + 1, dtype=np.uint8)[:, None]
    return made


def seen(made: KVRanges, slot: int, num_blocks: int) -> list[int]:
    first = made.first_block(slot)
    return [int(page[0]) - 1 for page in made.memory[first : first + num_blocks]]


def count_mappings() -> int:
    """Mappings of KV in this process."""
    return sum("memfd:kv" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_block_in_two_ranges_is_one_page() -> None:
    made = make_ranges()
    made.map(0, 0, [7, 8, 3])
    made.map(2, 0, [7, 8, 5])
    made.memory[7] = 99  # as wiping it would
    assert made.memory[made.first_block(0), 0] == made.memory[made.first_block(2), 0] == 99
    assert (made.memory[-1] == 0).all()


def test_neighbours_are_one_mapping() -> None:
    made = make_ranges()
    before = count_mappings()
    made.map(0, 0, [4, 5, 6, 2, 9, 10])
    assert made.num_mappings == count_mappings() - before == 3
    made.map(0, 2, [4, 5])
    assert made.num_mappings == count_mappings() - before == 1
    made.map(0, 1, [4, 1, 12])
    assert seen(made, 0, 3) == [4, 1, 12]
    made.release(0)
    assert made.num_mappings == 0
    assert count_mappings() == before


def test_addresses_go_with_the_last_array() -> None:
    before, num_files = count_mappings(), len(os.listdir("/proc/self/fd"))
    made = make_ranges()
    memory = made.memory
    del made
    gc.collect()
    assert memory[4, 0] == 5
    del memory
    gc.collect()
    assert (count_mappings(), len(os.listdir("/proc/self/fd"))) == (before, num_files)


def test_a_fork_has_memory_of_its_own() -> None:
    made = make_ranges()
    made.map(1, 0, [3, 4])
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        held = made.num_mappings, int(made.memory[:30].max())
        made.memory[:30] = 77
        made.map(1, 0, [5])
        os.write(writing, repr((*held, seen(made, 1, 1))).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100) == b"(0, 0, [76])"
    assert seen(made, 1, 2) == [3, 4]
    os.close(reading), os.close(writing)


def test_a_range_that_the_system_refuses_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    made, system = make_ranges(), ranges._map
    made.map(0, 0, [4])
    before, calls = count_mappings(), []

    def refuse(*given: Any) -> int:
        calls.append(given)
        if len(calls) == 3:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return system(*given)

    monkeypatch.setattr(ranges, "_map", refuse)
    with pytest.raises(EngineError, match=r"refuses to map .*memory.*vm\.max_map_count"):
        made.map(1, 0, [1, 3, 5, 7])
    assert (count_mappings(), made.num_mappings) == (before, 1)
    made.map(1, 0, [1, 3, 5, 7])
    assert (seen(made, 1, 4), seen(made, 0, 1)) == ([1, 3, 5, 7], [4])


def test_a_sequence_without_a_range_is_refused() -> None:
    made = make_ranges()
    for slot, blocks in ((3, [1]), (0, list(range(21)))):
        with pytest.raises(EngineError, match="restart without --kv-layout"):
            made.map(slot, 0, blocks)
    assert made.num_mappings == 0


def test_memory_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(MemoryError, match=r"refuses .* addresses"):
        KVRanges(RangeLayout(1, 1 << 40), 4, 1 << 20)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_layers_with_several_tables_are_refused(backend: str) -> None:
    maker = BACKENDS.get(backend)(num_threads=1, device="cpu", dtype="float32")
    layers = frozenset(range(3))
    groups = KVGroup(8, layers - {1}), KVGroup(8, frozenset({1}), 24)
    layout = replace(KVLayout.of_groups(groups, 16), ranges=RangeLayout(2, 8))
    with pytest.raises(ConfigError, match="no windows, states or latents"):
        maker.build(SPEC, WEIGHTS, layout)


@pytest.mark.parametrize(("backend", "options", "block_size"), [KINDS[1], KINDS[2]])
def test_contents_of_blocks_are_those_of_a_paged_cache(backend: str, options: Mapping[str, Any], block_size: int) -> None:
    paged, ranged = (make_driver(backend, options, block_size, ranged=ranged) for ranged in (False, True))
    for one in (paged, ranged):
        one.run("a", list(range(50)))
    contents = paged.program.export_blocks(paged.blocks("a"))
    assert ranged.program.export_blocks(ranged.blocks("a")) == contents
    free = [block for block in range(20) if block not in ranged.blocks("a")][: len(contents)]
    ranged.program.import_blocks(free, contents)
    assert ranged.program.export_blocks(free) == contents
