"""What the native back end says that it will take, against what it takes."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from cloister.backends.base import LOGITS, KVLayout, Weights
from cloister.backends.native import _native
from cloister.backends.native.backend import NativeBackend
from cloister.backends.native.memory import Arena
from cloister.backends.native.model import pack_model
from cloister.backends.native.packing import PackedKind, Packer
from cloister.backends.native.store import array_bytes
from cloister.backends.spec import DecoderSpec
from cloister.backends.tensors import Activations, GroupedTensor, QuantizedTensor, Tensor, take_rows
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights
from tests.driving import Driver, RandomWeights, make_spec
from tests.native import DELTA_NETS, MAMBA_LAYERS, OF_ONE_PART, PARTS, SHORT_CONVOLUTIONS, SIDE_BY_SIDE
from tests.thinning import cover

SPEC = make_spec(hidden=256, intermediate=172, heads=(8, 2), head_dim=32, num_layers=2, qk_norm=True)
WIDE = make_spec(hidden=256, intermediate=256, heads=(8, 2), head_dim=32, num_layers=2, qk_norm=True)


class Coded:
    """Weights (`backends.base.Weights`) whose layers' matrices are codes of some kind."""

    def __init__(
        self, spec: DecoderSpec, bits: int, group_size: int, activations: Activations, *, ordered: bool, only: str
    ) -> None:
        self._plain = RandomWeights(spec)
        self._kind = bits, group_size, activations
        self._ordered, self._only = ordered, only

    def names(self) -> Sequence[str]:
        return self._plain.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._plain.shape(name)

    def form(self, name: str) -> QuantizedTensor | None:
        found = self.read(name)
        return None if isinstance(found, np.ndarray) else take_rows(found, slice(0, 1))

    def read(self, name: str) -> Tensor:
        shape = self.shape(name)
        parts = name.split(".")
        if len(shape) != 2 or parts[0] != "layers" or parts[2] not in self._only.split():
            return self._plain.read(name)
        bits, group_size, activations = self._kind
        order = np.arange(shape[1], dtype=np.int32)[::-1].copy() if self._ordered else None
        scales = np.full((shape[0], shape[1] // group_size), 1 / 3, np.float32)
        codes = np.ones(shape, np.uint8)
        return GroupedTensor(codes, scales, np.zeros(scales.shape, np.uint8), None, bits, group_size, activations, order)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.read(name)) for name in self.names())


class InMXFP4(Coded):
    """The same in MXFP4."""

    def read(self, name: str) -> Tensor:
        tensor = super().read(name)
        if isinstance(tensor, np.ndarray):
            return tensor
        scales = np.full(tensor.shape, 0.25, np.float32)[:, ::32]
        return GroupedTensor(np.full(tensor.shape, 140, np.uint8), scales, None, None, 8, 32, "bfloat16", is_mxfp4=True)


class InNVFP4(Coded):
    """The same in NVFP4."""

    def read(self, name: str) -> Tensor:
        tensor = super().read(name)
        if isinstance(tensor, np.ndarray):
            return tensor
        codes, scales = np.full(tensor.shape, 140, np.uint8), np.full(tensor.shape, 0.25, np.float32)[:, ::16]
        factors = np.full(len(codes), 0.1, np.float32)
        return GroupedTensor(codes, scales, None, None, 8, 16, "bfloat16", output_scales=factors, is_nvfp4=True)


EVERY = "q k v o gate up down"
CASES: dict[str, Weights] = {
    "4 bits that meet bfloat16": Coded(WIDE, 4, 32, "bfloat16", ordered=False, only=EVERY),
    "4 bits, act-order": Coded(WIDE, 4, 32, "bfloat16", ordered=True, only=EVERY),
    "4 bits, groups of 16": Coded(WIDE, 4, 16, "int8", ordered=False, only=EVERY),
    "8 bits that meet bfloat16": Coded(WIDE, 8, 64, "bfloat16", ordered=False, only=EVERY),
    "8 bits in groups": Coded(WIDE, 8, 64, "int8", ordered=False, only=EVERY),
    "numbers beside codes in one matrix": Coded(WIDE, 4, 32, "int8", ordered=False, only="q k gate o"),
    "MXFP4": InMXFP4(WIDE, 8, 32, "bfloat16", ordered=False, only=EVERY),
    "MXFP4 beside numbers in one matrix": InMXFP4(WIDE, 8, 32, "bfloat16", ordered=False, only="q gate o"),
    "NVFP4": InNVFP4(WIDE, 8, 16, "bfloat16", ordered=False, only=EVERY),
    "NVFP4 beside numbers in one matrix": InNVFP4(WIDE, 8, 16, "bfloat16", ordered=False, only="q gate o"),
    "numbers": RandomWeights(SPEC),
    **{name: QuantizedWeights(RandomWeights(WIDE), FORMATS.get(name)(FormatOptions())) for name in FORMATS.names()},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_weights_take_what_was_named_whatever_becomes_of_them(case: str, dtype: str) -> None:
    weights, spec = CASES[case], SPEC if case == "numbers" else WIDE
    backend = NativeBackend(num_threads=1, device="cpu", dtype=dtype)
    named = backend.need(spec, weights, block_size=16, max_batched_tokens=16).weights_bytes
    packed = pack_model(spec, weights, Packer(_native.Pool(1), PackedKind.F32 if dtype == "float32" else PackedKind.BF16))
    assert named == array_bytes(packed)


@pytest.mark.parametrize("case", ["numbers", "NVFP4"])
def test_packed_matrices_lie_side_by_side_so_that_huge_pages_hold_them(case: str) -> None:
    """Each by itself, an expert's matrices of 3 MiB would lie in small pages for the most part."""
    spec = SPEC if case == "numbers" else WIDE
    packed = pack_model(spec, CASES[case], Packer(_native.Pool(1), PackedKind.BF16, Arena()))
    places = sorted((part.ctypes.data, part.nbytes) for matrix in packed.matrices.values() for part in matrix.parts.values())
    assert len(places) > 8
    for (start, num_bytes), (following, _) in itertools.pairwise(places):
        assert 0 <= following - start - num_bytes < 64
    assert all(start % 64 == 0 for start, _ in places)


def test_an_arena_gives_zeros_that_nobody_else_has_however_large() -> None:
    arena = Arena()
    taken = [arena.take(num_bytes) for num_bytes in (1, 100, 70 << 20, 64, (64 << 20) - 64, 5)]
    for number, array in enumerate(taken):
        assert not array.any()
        array[:] = number + 1
    assert all((array == number + 1).all() for number, array in enumerate(taken))
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert arena.keep(numbers).tolist() == list(range(12))


SPECS = {
    **PARTS,
    "short convolutions": SHORT_CONVOLUTIONS,
    "Mamba 2": MAMBA_LAYERS,
    "Mamba 2 beside attention": SIDE_BY_SIDE,
    "layers of one part": OF_ONE_PART,
    "gated delta nets": DELTA_NETS,
    "Mamba 2 alone": replace(OF_ONE_PART, layers=OF_ONE_PART.layers[:1] * 2),
}


@pytest.mark.parametrize(("name", "dtype"), cover(SPECS, ["float32", "bfloat16"]))
def test_whatever_a_spec_asks_for_takes_what_was_named(name: str, dtype: str) -> None:
    spec = replace(SPECS[name], max_positions=400)
    weights, num_tokens = RandomWeights(spec), 300
    backend = NativeBackend(num_threads=2, device="cpu", dtype=dtype)
    program = backend.build(spec, weights, KVLayout(32, 16))
    driver = Driver(program, 32, 16)
    program.step(driver.plan({"a": list(range(num_tokens))}, [num_tokens - 1]), LOGITS)
    need = backend.need(spec, weights, block_size=16, max_batched_tokens=num_tokens)
    packed = pack_model(spec, weights, Packer(_native.Pool(1), PackedKind.F32 if dtype == "float32" else PackedKind.BF16))
    assert need.weights_bytes == array_bytes(packed)
    assert program.buffer_bytes < need.activations_bytes < 2.1 * program.buffer_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["latent attention", "experts"])
def test_a_layer_that_predicts_further_tokens_takes_what_was_named_and_no_head(name: str, dtype: str) -> None:
    model, num_tokens = replace(PARTS[name], max_positions=400), 300
    spec = replace(model, layers=model.layers[:1], merges_hidden=True)
    backend = NativeBackend(num_threads=2, device="cpu", dtype=dtype)
    program = backend.build(model, RandomWeights(model), KVLayout(32, 16))
    layer = backend.build(spec, RandomWeights(spec), KVLayout(32, 16), beside=program)
    plan = Driver(layer, 32, 16).plan({"a": list(range(num_tokens))}, [num_tokens - 1])
    layer.step(replace(plan, hidden=np.ones((num_tokens, spec.hidden_size), np.float32)), LOGITS)
    need = backend.need(spec, RandomWeights(spec), block_size=16, max_batched_tokens=num_tokens)
    kind = PackedKind.F32 if dtype == "float32" else PackedKind.BF16
    packed = pack_model(spec, RandomWeights(spec), Packer(_native.Pool(1), kind))
    assert need.weights_bytes == array_bytes(packed)
    assert not {"embedding", "head"} & set(packed.matrices)
    assert layer.buffer_bytes < need.activations_bytes < 2.1 * layer.buffer_bytes


@pytest.mark.parametrize(
    "spec",
    [SHORT_CONVOLUTIONS, MAMBA_LAYERS, DELTA_NETS, SIDE_BY_SIDE],
    ids=["convolutions", "Mamba 2", "delta nets", "side by side"],
)
def test_drafts_of_layers_with_a_state_take_what_was_named(spec: DecoderSpec) -> None:
    weights, backend = RandomWeights(spec), NativeBackend(num_threads=2, device="cpu", dtype="float32")
    num_drafts, grown = 299, []
    for spans in ([[0, 300, 0, 0]], [[0, 1, 0, 0], [1, 300, 0, -1]]):
        program = backend.build(spec, weights, KVLayout(32, 16))
        plan = Driver(program, 32, 16).plan({"a": list(range(300))}, [299])
        parents = np.arange(-1, 299, dtype=np.int32)
        program.step(replace(plan, parents=parents, state_spans=np.array(spans, np.int32)), LOGITS)
        grown.append(program.buffer_bytes)
    need = backend.need(spec, weights, block_size=16, max_batched_tokens=300)
    named = num_drafts * (need.draft_bytes + need.draft_state_bytes)
    assert 0.7 * named < grown[1] - grown[0] < named + 2 * mmap.PAGESIZE
