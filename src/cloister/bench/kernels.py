"""Measures this machine: the operators of a program against the roofline, and its peaks as a chip."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

import ml_dtypes
import numpy as np

from cloister.backends import BACKENDS
from cloister.backends.base import LOGITS, Capability, ForwardBatch, KVLayout, Program
from cloister.backends.recording import OperatorSpan
from cloister.backends.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from cloister.backends.tensors import GroupedTensor, Tensor
from cloister.bench.chips import HERE, Chip
from cloister.bench.roofline import put_under_roof
from cloister.bench.roofline_operators import Numbers, Operator, Work, list_operators
from cloister.engine.machine import Machine, read_machine
from cloister.models.decoder import tensor_shapes
from cloister.quant import HeldWeights
from cloister.types.errors import ConfigError

REST = "between operators"
READ_BYTES = 512 << 20  # larger than the private caches of a few cores
PRODUCT_SIZE = 1536
REPEATS = 5

_ROWS = 512
_LAYER = LayerSpec(AttentionSpec(8, 8, 128, 128**-0.5, RopeSpec((1.0,) * 64)), MlpSpec(4096))
_DECODER = DecoderSpec("measured", 64, 1024, (_LAYER,), 1e-6, _ROWS)


@dataclass(frozen=True, slots=True)
class KernelRate:
    """One operator of a program, all its calls in a step.

    Attributes:
        seconds: measured: time in which any thread ran it, median over the repeats.
        num_flops, num_bytes: its operations, and bytes of weights and KV that it moves; activations stay in caches.
        roof_s: lower bound on the chip; None if nothing is counted.
    """

    name: str
    seconds: float
    num_flops: float
    num_bytes: float
    roof_s: float | None


@dataclass(frozen=True, slots=True)
class KernelTable:
    """One kind of step: its operators, the time between them, and the whole forward pass."""

    work: Work
    rates: tuple[KernelRate, ...]


def measure_kernels(
    program: Program,
    spec: DecoderSpec,
    work: Work,
    chip: Chip,
    numbers: Numbers,
    *,
    block_size: int,
    num_repeats: int,
    group_blocks: Sequence[int] = (),
) -> KernelTable:
    """Runs one step several times on random tokens and returns the median time of each operator with its lower bound.

    Args:
        group_blocks: see `make_batch`.

    Raises:
        ConfigError: the program cannot record.
    """
    if Capability.RECORDING not in program.capabilities:
        raise ConfigError("this back end does not say where its time goes; choose another one", param="backend")
    batch = make_batch(work, spec.vocab_size, block_size, group_blocks)
    program.step(batch, LOGITS)
    times: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(num_repeats):
        with program.record() as spans:
            start_s = time.perf_counter()
            program.step(batch, LOGITS)
            whole_s = time.perf_counter() - start_s
        for name, seconds in wall_times(spans).items():
            times[name].append(seconds)
        times[REST].append(whole_s - union(spans))
        times["forward"].append(whole_s)
    operators = list_operators(spec, work, numbers)
    medians = {name: median(seconds) for name, seconds in times.items()}
    return KernelTable(work, tuple(_rate(name, seconds, work, operators, chip) for name, seconds in medians.items()))


def make_batch(work: Work, vocab_size: int, block_size: int, group_blocks: Sequence[int] = ()) -> ForwardBatch:
    """Returns a step of random tokens; each sequence has its own blocks, numbered from 0, with arbitrary content.

    Args:
        group_blocks: blocks of each group of layers (`KVLayout.groups`), if there are several. If a group has fewer than the
            step's positions need, tables repeat them: positions behind a window are not read.
    """
    entries = np.arange(num_blocks(work, block_size), dtype=np.int32)
    firsts = np.cumsum([0, *group_blocks])[:-1]
    groups = [first + entries % count for first, count in zip(firsts, group_blocks, strict=True)] or [entries]
    starts = np.arange(work.num_seqs + 1, dtype=np.int32) * work.num_queries
    positions = np.arange(work.context - work.num_queries, work.context, dtype=np.int32)
    return ForwardBatch(
        token_ids=np.random.default_rng(0).integers(vocab_size, size=work.num_tokens, dtype=np.int32),
        positions=np.tile(positions, work.num_seqs),
        query_starts=starts,
        context_lens=np.full(work.num_seqs, work.context, np.int32),
        block_tables=np.stack(groups, axis=1).astype(np.int32).reshape(work.num_seqs, -1),
        logit_rows=starts[1:] - np.int32(1),
    )


def num_blocks(work: Work, block_size: int) -> int:
    """Returns the KV blocks that a step needs."""
    return work.num_seqs * -(-work.context // block_size)


def wall_times(spans: Iterable[OperatorSpan]) -> dict[str, float]:
    """Returns seconds in which any thread ran an operator, by name, in order of first appearance."""
    by_name: defaultdict[str, list[OperatorSpan]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_s):
        by_name[span.name].append(span)
    return {name: union(group) for name, group in by_name.items()}


def union(spans: Iterable[OperatorSpan]) -> float:
    """Returns seconds that are inside at least one span."""
    total, end_s = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start_s):
        total += max(0.0, span.end_s - max(end_s, span.start_s))
        end_s = max(end_s, span.end_s)
    return total


def _rate(name: str, seconds: float, work: Work, operators: Sequence[Operator], chip: Chip) -> KernelRate:
    """Combines a measured time with the lower bound of the operators in its name; `forward` is all of them."""
    parts = set(name.split("+"))
    own = [operator for operator in operators if name == "forward" or operator.part in parts]
    if not own:
        return KernelRate(name, seconds, 0.0, 0.0, None)
    step = put_under_roof(work, own, chip)
    return KernelRate(
        name, seconds, step.total("num_flops"), step.total("weights_bytes") + step.total("kv_bytes"), step.limit_s
    )


# This machine as a chip: memory bandwidth and peak matrix throughput, measured now.
# numpy's BLAS multiplies float32. Peaks of narrow formats are those of the native kernels on matrices of suitable size;
# without compiled kernels there are none.
def measure_here(num_threads: int | None = None, *, read_bytes: int = READ_BYTES, product_size: int = PRODUCT_SIZE) -> Chip:
    """Measures this machine: the best of some runs, about three seconds in all.

    Args:
        num_threads: threads for reading and narrow products; None uses every CPU that this process may use. Products in float32
            use the threads of numpy's BLAS.
        read_bytes: size of the buffer to read; at most a quarter of the free memory.
        product_size: rows and columns of the matrices.
    """
    machine = read_machine()
    num_threads = num_threads or machine.num_cpus
    size = min(read_bytes, machine.available_bytes // 4)
    return Chip(
        HERE,
        measure_narrow_products(num_threads) | {"float32": measure_product(product_size)},
        measure_reading(size, num_threads),
        machine.memory_bytes,
        None,
        _describe(machine, num_threads),
    )


def measure_reading(size_bytes: int, num_threads: int) -> float:
    """Returns bytes per second of reading memory on some threads at once: the maximum of an array, which numpy vectorises."""
    parts = np.array_split(np.ones(size_bytes // 4, np.float32), num_threads)
    with ThreadPoolExecutor(num_threads) as pool:
        return size_bytes / _best(lambda: list(pool.map(np.max, parts)))


def measure_product(size: int) -> float:
    """Returns operations per second of a product of two square float32 matrices."""
    left, right = np.ones((2, size, size), np.float32)
    out = np.empty((size, size), np.float32)
    return 2 * size**3 / _best(lambda: np.matmul(left, right, out=out))


def measure_narrow_products(num_threads: int) -> dict[str, float]:
    """Returns operations per second of the native kernels in int8 and bfloat16, by format; empty if there are none."""
    if "native" not in BACKENDS.names():
        return {}
    try:
        return {form: _measure_native(form, num_threads) for form in ("int8", "bfloat16")}
    except ConfigError:  # the kernels were not compiled
        return {}


def _measure_native(form: str, num_threads: int) -> float:
    """The fastest product of a layer with weights of one format, over several forward passes."""
    backend = BACKENDS.get("native")(num_threads=num_threads, device="cpu", dtype="bfloat16")
    weights = HeldWeights({name: _even_tensor(form, name, shape) for name, shape in tensor_shapes(_DECODER)})
    program = backend.build(_DECODER, weights, KVLayout(_ROWS // 16, 16))
    work = Work.prefill(_ROWS, 1)
    batch, rates = make_batch(work, _DECODER.vocab_size, 16), []
    products = [
        op for op in list_operators(_DECODER, work, Numbers()) if op.unit == "matrix" and op.part not in ("attention", "head")
    ]
    for _ in range(REPEATS):
        with program.record() as spans:
            program.step(batch, LOGITS)
        for part, seconds in wall_times(spans).items():
            rates.append(sum(op.num_flops for op in products if op.part == part) / seconds)
    return max(rates)


def _even_tensor(form: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of equal numbers: the speed of a product does not depend on them. `form` of matrices: "int8" or "bfloat16"."""
    if form == "bfloat16" or len(shape) == 1 or name.startswith(("embed", "head")):
        return np.full(shape, 0.03125, ml_dtypes.bfloat16)
    scales = np.full((shape[0], 1), 1e-3, np.float32)
    return GroupedTensor(np.full(shape, 160, np.uint8), scales, None, None, 8, shape[1], "int8")


def _best(run: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs, after a warm-up."""
    run()
    times = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_s)
    return min(times)


def _describe(machine: Machine, num_threads: int) -> str:
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    return f"measured now: {threads}, {machine.num_cpus} CPUs; other programs lower it"
