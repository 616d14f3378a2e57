"""Mixtures of experts on the native kernels: number formats, routing among equals, and that nobody else's choice matters."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cloister.backends.base import GREEDY, KVLayout, Weights
from cloister.backends.native import store
from cloister.backends.native.backend import NativeBackend
from cloister.backends.native.program import NativeProgram
from cloister.backends.native.store import PackedStore
from cloister.backends.spec import MlpSpec, MoeSpec
from cloister.backends.tensors import E2M1_CODES, Activations, GroupedTensor, QuantizedTensor, Tensor, dequantized
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights
from cloister.types.errors import ModelError
from tests.batch_invariance import differing_arrangements
from tests.driving import Driver, RandomWeights, build, make_spec
from tests.native import KERNELS, GivenWeights, build_native, changed, in_turns, relative_error

MIXTURE = MoeSpec(num_experts=6, num_chosen=2, expert=MlpSpec(96), shared=MlpSpec(160), shared_gate=True)
SPEC = changed(make_spec(hidden=128, intermediate=96, heads=(4, 2), head_dim=32), layer={"mlp": MIXTURE})
EVERY = changed(SPEC, layer={"mlp": replace(MIXTURE, num_chosen=6)})
"""Every expert is chosen, so that rounding does not change who computes."""
FORMS = ("none", "int8", "int4", "qoq", "w4a16", "int8, shared one not", "MXFP4", "MXFP4 that meets int8", "NVFP4")
TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, SPEC.vocab_size, 150)]


def four_bits_that_meet_bfloat16(plain: Weights) -> Weights:
    """Codes of every matrix of a layer but its routers, as most GPTQ and AWQ checkpoints have them."""

    def coded(name: str) -> Tensor:
        weight = plain.read(name)
        if not name.startswith("layers.") or len(weight.shape) == 1 or "router" in name:
            return weight
        groups = np.asarray(weight).reshape(len(weight), -1, 32)  # type: ignore[arg-type]
        scales = np.abs(groups).max(2) / 7
        codes = np.rint(groups / scales[:, :, None] + 8).clip(0, 15).astype(np.uint8)
        return GroupedTensor(codes.reshape(weight.shape), scales.astype(np.float32), None, None, 4, 32, "bfloat16")

    return GivenWeights({name: coded(name) for name in plain.names()})


def in_mxfp4(plain: Weights, activations: Activations) -> Weights:
    """Experts in MXFP4, as gpt-oss has them; the nearest numbers, with the power of two below a group's peak as its scale."""

    def coded(name: str) -> Tensor:
        weight = plain.read(name)
        if "experts" not in name:
            return weight
        groups = np.asarray(weight, np.float32).reshape(len(weight), -1, 32)  # type: ignore[arg-type]
        scales = np.ldexp(np.float32(1), np.frexp(np.abs(groups).max(2) / 12)[1])
        numbers = np.array(sorted({int(code) - 128 for code in E2M1_CODES}), np.float32)
        nearest = np.abs((groups / scales[:, :, None])[..., None] - numbers).argmin(-1)
        codes = (numbers[nearest] + 128).astype(np.uint8).reshape(weight.shape)
        return GroupedTensor(codes, scales, None, None, 8, 32, activations, is_mxfp4=True)

    return GivenWeights({name: coded(name) for name in plain.names()})


def in_nvfp4(plain: Weights) -> Weights:
    """Experts in NVFP4, as ModelOpt writes them: the greatest weight of a group over 6 is its scale."""
    numbers = np.array(sorted({int(code) - 128 for code in E2M1_CODES}), np.float32) / 2

    def coded(name: str) -> Tensor:
        weight = plain.read(name)
        if "experts" not in name:
            return weight
        groups = np.asarray(weight, np.float32).reshape(len(weight), -1, 16)  # type: ignore[arg-type]
        peaks = np.abs(groups).max(2)
        factor = peaks.max() / np.float32(6 * 448)
        scales = (peaks / 6 / factor).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        nearest = np.abs((groups / (scales * factor)[:, :, None])[..., None] - numbers).argmin(-1)
        codes = (2 * numbers[nearest] + 128).astype(np.uint8).reshape(weight.shape)
        factors = np.full(len(weight), factor, np.float32)  # type: ignore[arg-type]
        return GroupedTensor(codes, scales / 2, None, None, 8, 16, "bfloat16", output_scales=factors, is_nvfp4=True)

    return GivenWeights({name: coded(name) for name in plain.names()})


class Partly:
    """Weights of which some matrices are in a format (protocol `backends.base.Weights`)."""

    def __init__(self, plain: Weights, form: str, only: str) -> None:
        self._plain, self._coded, self._only = plain, QuantizedWeights(plain, FORMATS.get(form)(FormatOptions())), only

    def names(self) -> Sequence[str]:
        return self._plain.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._plain.shape(name)

    def form(self, name: str) -> QuantizedTensor | None:
        return (self._coded if self._only in name else self._plain).form(name)

    def read(self, name: str) -> Tensor:
        return (self._coded if self._only in name else self._plain).read(name)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.read(name)) for name in self.names())


@cache
def weights_in(form: str) -> Weights:
    plain = RandomWeights(SPEC)
    if form == "int8, shared one not":
        return Partly(plain, "int8", "experts")
    if form.startswith("MXFP4"):
        return in_mxfp4(plain, "bfloat16" if form == "MXFP4" else "int8_group")
    if form == "NVFP4":
        return in_nvfp4(plain)
    if form == "w4a16":
        return four_bits_that_meet_bfloat16(plain)
    return plain if form == "none" else QuantizedWeights(plain, FORMATS.get(form)(FormatOptions()))


@pytest.mark.parametrize("form", FORMS)
def test_experts_in_a_format_stay_near_the_oracle_on_the_same_codes(form: str) -> None:
    weights = weights_in(form)
    exact = build(EVERY, weights).run("a", TOKENS)
    for kernels in KERNELS:
        found = build_native(EVERY, weights, kernels=kernels, dtype="bfloat16").run("a", TOKENS)
        bound = 0.01 if form in ("none", "w4a16", "MXFP4", "NVFP4") else 0.03  # measured 0.0048, 0.0156
        assert 1e-4 < relative_error(found, exact) < bound


@pytest.mark.parametrize("kernels", KERNELS)
def test_experts_in_mxfp4_have_the_bits_of_the_numbers_that_they_stand_for(kernels: str) -> None:
    weights = weights_in("MXFP4")
    numbers = GivenWeights({name: dequantized(tensor) for name, tensor in weights})
    found, expected = (build_native(SPEC, given, kernels=kernels, dtype="bfloat16") for given in (weights, numbers))
    assert found.run("a", TOKENS).tobytes() == expected.run("a", TOKENS).tobytes()


def make(weights: Weights, kernels: str, block_size: int, num_threads: int) -> Driver:
    settings = {"num_blocks": 4096 // block_size, "block_size": block_size, "num_threads": num_threads}
    return build_native(SPEC, weights, dtype="bfloat16", kernels=kernels, **settings)


@pytest.mark.parametrize(("form", "kernels"), in_turns(FORMS))
def test_who_else_chose_an_expert_changes_no_bit(form: str, kernels: str) -> None:
    arrangements = {"chunks": (1, 33), "block_sizes": (), "companions": (3, 40)}
    make_one = partial(make, weights_in(form), kernels)
    assert differing_arrangements(make_one, TOKENS[:70], vocab=SPEC.vocab_size, **arrangements) == []


def with_router(router: np.ndarray, **more: np.ndarray) -> GivenWeights:
    """Weights of one layer whose router is given."""
    tensors = dict(RandomWeights(SPEC))
    for layer in range(len(SPEC.layers)):
        tensors[f"layers.{layer}.router.weight"] = router.astype(np.float32)
        tensors |= {f"layers.{layer}.{name}": value for name, value in more.items()}
    return GivenWeights(tensors)


def test_among_equals_the_lower_numbers_are_chosen() -> None:
    tied = np.zeros((6, 128))
    chosen = build_native(SPEC, with_router(tied)).run("a", TOKENS)
    ruined = {f"experts.{expert}.down.weight": np.full((128, 96), np.nan, np.float32) for expert in (2, 3, 4, 5)}
    assert np.isfinite(chosen).all()
    assert build_native(SPEC, with_router(tied, **ruined)).run("a", TOKENS).tobytes() == chosen.tobytes()
    first = {"experts.1.down.weight": np.full((128, 96), np.nan, np.float32)}
    assert not np.isfinite(build_native(SPEC, with_router(tied, **first)).run("a", TOKENS)).any()


def test_a_router_that_is_not_a_number_gives_no_answer() -> None:
    router = np.random.default_rng(0).standard_normal((6, 128))
    router[3, 5] = np.nan
    assert not np.isfinite(build_native(SPEC, with_router(router)).run("a", TOKENS)).any()


def test_experts_of_one_layer_in_several_formats_are_refused() -> None:
    with pytest.raises(ModelError, match="several number formats"):
        build_native(SPEC, Partly(RandomWeights(SPEC), "int8", "experts.3."), dtype="bfloat16")


@pytest.mark.parametrize("form", ["int8", "MXFP4", "MXFP4 that meets int8", "NVFP4"])
def test_a_second_start_reads_experts_from_the_file(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_LEAST_BYTES", 0)

    def start(weights: Weights) -> bytes:
        backend = NativeBackend(num_threads=1, device="cpu", dtype="bfloat16", store=PackedStore(tmp_path))
        return Driver(backend.build(SPEC, weights, KVLayout(16, 16), identity="these"), 16, 16).run("a", TOKENS).tobytes()

    first = start(weights_in(form))
    assert start(GivenWeights({})) == first


@pytest.fixture
def _small_pages() -> Iterator[None]:
    """Pages of 4 KiB, each of which the kernel says whether it was used."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    yield
    libc.prctl(_PR_SET_THP_DISABLE, 0, 0, 0, 0)


_PR_SET_THP_DISABLE = 41


def used_bytes(arrays: Sequence[np.ndarray]) -> int:
    """Returns the bytes of pages used since `forget_uses`, of all mappings in which the arrays lie."""
    starts = [array.ctypes.data for array in arrays]
    total, holds = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            holds = any(int(span[1], 16) <= start < int(span[2], 16) for start in starts)
        elif line.startswith("Referenced:") and holds:
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.usefixtures("_small_pages")
def test_a_token_reads_the_experts_that_it_chose_and_no_others() -> None:
    forget_uses = Path("/proc/self/clear_refs")
    if not forget_uses.exists():
        pytest.skip("pages are watched through /proc")
    mixture = MoeSpec(num_experts=16, num_chosen=2, expert=MlpSpec(512))
    spec = changed(make_spec(hidden=256, intermediate=1, heads=(4, 2), head_dim=64), layer={"mlp": mixture})
    driver = build_native(spec, RandomWeights(spec), dtype="bfloat16")
    assert isinstance(driver.program, NativeProgram)
    codes = {name: matrix.parts["codes"] for name, matrix in driver.program._model.matrices.items()}
    driver.run("a", TOKENS[:20])
    batch = driver.plan({"a": TOKENS[:1]}, [0])
    forget_uses.write_text("1")
    if used_bytes(list(codes.values())):
        pytest.skip("this kernel does not say which pages were used")
    driver.program.step(batch, GREEDY)
    experts = sum(array.nbytes for name, array in codes.items() if ".experts." in name)
    others = sum(array.nbytes for name, array in codes.items() if ".experts." not in name)
    chosen = experts * mixture.num_chosen / mixture.num_experts
    assert chosen < used_bytes(list(codes.values())) < chosen + others + 0.05 * experts
