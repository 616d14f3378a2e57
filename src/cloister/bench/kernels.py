"""Measured operator throughput against the roofline."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from cloister.backends.base import LOGITS, Capability, ForwardBatch, Program
from cloister.backends.recording import OperatorSpan
from cloister.backends.spec import DecoderSpec
from cloister.bench.chips import Chip
from cloister.bench.roofline import put_under_roof
from cloister.bench.roofline_operators import Numbers, Operator, Work, list_operators
from cloister.types.errors import ConfigError

REST = "between operators"


@dataclass(frozen=True, slots=True)
class KernelRate:
    """One operator of a program, all its calls in a step.

    Attributes:
        seconds: measured: time in which any thread ran it, median over the repeats.
        num_flops, num_bytes: its operations, and the weights and KV that it moves; activations stay in caches.
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
