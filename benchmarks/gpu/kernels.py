"""Cases of the stages `kernels` and `hybrids`: each kernel with what it must move and compute, and torch doing the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.float8 import float8_matmul, pack_float8
from cloister.backends.base import ForwardBatch
from cloister.backends.tensors import GroupedTensor
from cloister.backends.torch.cuda.attention import PagedAttention
from cloister.backends.torch.cuda.inputs import DeviceWork, StepInputs, StepUploader, step_arrays, unpack
from cloister.backends.torch.cuda.matrices import DenseMatrix, QuantizedMatrix
from cloister.backends.torch.cuda.tiles import CODE_TILES, TileBook
from cloister.backends.torch.triton.attention import Heads
from cloister.backends.torch.triton.elementwise import add_and_norm, find_largest
from cloister.backends.torch.triton.grouped import pack

BLOCK_SIZE = 16
DTYPE = torch.bfloat16
Work = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel on one problem.

    Attributes:
        num_bytes, num_operations: what must be moved and computed at least.
        peak: which of the device's measured peaks bounds the operations.
        torch_work: the same problem in torch, or None.
    """

    kind: str
    problem: str
    work: Work
    num_bytes: float
    num_operations: float
    peak: str = "bfloat16"
    torch_work: Work | None = None


@dataclass(frozen=True, slots=True)
class Hybrid:
    """A step that prefills one chunk beside decodes, at once and one kind after the other (row B4)."""

    problem: str
    fused: Work
    interleaved: Work
    in_sequence: Work


class Attending:
    """One layer's attention with random keys, for sequences of given (queries, context)."""

    def __init__(self, heads: Heads, lengths: Sequence[tuple[int, int]], device: torch.device, num_places: int) -> None:
        self.heads, self.lengths, self._device = heads, lengths, device
        batch = _batch(lengths)
        num_blocks = int(batch.block_tables.max()) + 1
        self._slots = torch.randn(num_blocks * BLOCK_SIZE + 1, 2 * heads.num_kv_heads * heads.head_dim, device=device).to(DTYPE)
        self._queries = torch.randn(len(batch.token_ids), heads.num_heads, heads.head_dim, device=device).to(DTYPE)
        self.attention = PagedAttention([heads], DTYPE, device, num_places)
        arrays = step_arrays(batch, self.attention.cut(batch), BLOCK_SIZE)
        self.step = unpack(StepUploader(device).send(arrays), self.attention.layers, BLOCK_SIZE)

    def attend(self, step: StepInputs | None = None) -> Tensor:
        self.attention.begin()
        return self.attention.attend(0, self.heads, self._queries, self._slots, step or self.step)

    def bind(self, binding: str) -> Work:
        """Returns the launch with its kinds bound in another way."""

        def work() -> None:
            before = self.attention._binding
            self.attention._binding = binding  # type: ignore[assignment]
            self.attend()
            self.attention._binding = before

        return work

    def in_sequence(self) -> None:
        """Prefill in one launch, then decode in another."""
        work = self.step.works[self.heads]
        none = work.small[:0]
        for part in (DeviceWork(work.large, none, work.joins[:0]), DeviceWork(none, work.small, work.joins)):
            self.attend(replace(self.step, works={self.heads: part}))

    @property
    def num_bytes(self) -> float:
        """Keys and values once, queries and outputs once."""
        heads = self.heads
        keys = sum(context for _, context in self.lengths) * 2 * heads.num_kv_heads * heads.head_dim
        return 2.0 * (keys + 2 * self._queries.numel())

    @property
    def num_operations(self) -> float:
        """Two products over the keys that each query sees."""
        pairs = sum(queries * (context - (queries - 1) / 2) for queries, context in self.lengths)
        return 4.0 * pairs * self.heads.num_heads * self.heads.head_dim

    def torch_work(self) -> Work:
        """Torch's attention on keys that lie in one piece, for sequences of equal lengths."""
        (num_queries, context), num_seqs, heads = self.lengths[0], len(self.lengths), self.heads
        query = torch.randn(num_seqs, heads.num_heads, num_queries, heads.head_dim, device=self._device).to(DTYPE)
        keys = torch.randn(2, num_seqs, heads.num_kv_heads, context, heads.head_dim, device=self._device).to(DTYPE)
        is_causal = num_queries == context
        mask = None
        if not is_causal and num_queries > 1:
            mask = torch.ones(num_queries, context, dtype=torch.bool, device=self._device).tril(context - num_queries)
        return lambda: F.scaled_dot_product_attention(
            query, keys[0], keys[1], attn_mask=mask, is_causal=is_causal and num_queries > 1, enable_gqa=True
        )


def attention_cases(
    heads: Heads, device: torch.device, num_places: int, decodes: Sequence[tuple[int, int]], prefills: Sequence[tuple[int, int]]
) -> Iterator[Case]:
    """Yields decode for (sequences, context) and prefill for (chunk, context)."""
    problems = [("decode", f"{count} x {context}", [(1, context)] * count) for count, context in decodes]
    problems += [("prefill", f"{chunk} of {context}", [(chunk, context)]) for chunk, context in prefills]
    for kind, problem, lengths in problems:
        one = Attending(heads, lengths, device, num_places)
        yield Case(kind, problem, one.attend, one.num_bytes, one.num_operations, torch_work=one.torch_work())


def hybrid_cases(
    heads: Heads, device: torch.device, num_places: int, problems: Sequence[tuple[int, int, int]]
) -> Iterator[Hybrid]:
    """Yields steps for (chunk, decodes, context of all)."""
    for chunk, num_decodes, context in problems:
        one = Attending(heads, [(chunk, context), *[(1, context)] * num_decodes], device, num_places)
        at_once = "multiprocessor" if device.type == "cuda" else "virtual"
        yield Hybrid(f"{chunk} + {num_decodes} x {context}", one.bind(at_once), one.bind("interleaved"), one.in_sequence)


def product_cases(
    device: torch.device, num_places: int, shapes: Sequence[tuple[int, int]], rows: Sequence[int], *, has_fp8: bool
) -> Iterator[Case]:
    """Yields products of (outputs, inputs) with each number of rows, in every format."""
    book = TileBook(num_places)
    for num_outputs, num_inputs in shapes:
        weight = torch.randn(num_outputs, num_inputs, device=device).to(DTYPE)
        dense = DenseMatrix(weight, None, book)
        four = QuantizedMatrix(pack(_random_codes(num_outputs, num_inputs, 4), device), None, DTYPE, book)
        eight = QuantizedMatrix(pack(_random_codes(num_outputs, num_inputs, 8), device), None, DTYPE, book)
        eighth = pack_float8(weight) if has_fp8 else None
        for num_rows in rows:
            inputs = torch.randn(num_rows, num_inputs, device=device).to(DTYPE)
            problem, moved = f"{num_rows} x {num_inputs} x {num_outputs}", 2.0 * num_rows * (num_inputs + num_outputs)
            operations = 2.0 * num_rows * num_inputs * num_outputs

            for kind, matrix, peak in (("bf16", dense, "bfloat16"), ("W4A16", four, "bfloat16"), ("W8A8", eight, "int8")):
                work, library = partial(matrix.multiply, inputs, DTYPE), partial(F.linear, inputs, weight)
                yield Case(kind, problem, work, moved + matrix.nbytes, operations, peak, library)
            if eighth is not None:
                multiply = partial(float8_matmul, inputs, eighth, None)
                tiles = book.measure(("float8", num_inputs), multiply, CODE_TILES, DTYPE)
                work = partial(multiply, DTYPE, book.choose(tiles, num_rows, num_outputs))
                yield Case("FP8", problem, work, moved + eighth.nbytes, operations, "float8", library)


def row_cases(device: torch.device, num_rows: Sequence[int], width: int, vocab: int) -> Iterator[Case]:
    """Yields the norm of the residual stream, and the search for the largest logit."""
    weight = torch.ones(width, device=device)
    for count in num_rows:
        hidden, added = torch.randn(count, width, device=device), torch.randn(count, width, device=device).to(DTYPE)
        norm = partial(add_and_norm, hidden, added, weight, torch.empty_like(added), 1e-5)
        theirs = partial(_norm, hidden, added, weight)
        yield Case("add and norm", f"{count} x {width}", norm, 12.0 * count * width, 5.0 * count * width, torch_work=theirs)
        logits = torch.randn(count, vocab, device=device)
        search, size = partial(find_largest, logits), 1.0 * logits.numel()
        yield Case("largest logit", f"{count} x {vocab}", search, 4 * size, size, torch_work=partial(torch.argmax, logits, 1))


def _norm(hidden: Tensor, added: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(hidden.add_(added), (len(weight),), weight).to(DTYPE)


def _batch(lengths: Sequence[tuple[int, int]]) -> ForwardBatch:
    """A step of these (queries, context), with blocks in a shuffled order."""
    counts = [-(-context // BLOCK_SIZE) for _, context in lengths]
    order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    tables = np.zeros((len(lengths), max(counts)), np.int32)
    for row, part in zip(tables, np.split(order, np.cumsum(counts)[:-1]), strict=True):
        row[: len(part)] = part
    positions = np.concatenate([np.arange(context - queries, context) for queries, context in lengths]).astype(np.int32)
    starts = np.cumsum([0, *(queries for queries, _ in lengths)]).astype(np.int32)
    contexts = np.array([context for _, context in lengths], np.int32)
    return ForwardBatch(np.zeros_like(positions), positions, starts, contexts, tables, starts[1:] - np.int32(1))


def _random_codes(num_outputs: int, num_inputs: int, bits: int) -> GroupedTensor:
    """4 bits in groups of 128 for inputs as they are, or 8 bits with one scale per output for inputs in int8."""
    rng, group = np.random.default_rng(0), 128 if bits == 4 else num_inputs
    return GroupedTensor(
        codes=rng.integers(0, 2**bits, (num_outputs, num_inputs), dtype=np.uint8),
        scales=np.full((num_outputs, num_inputs // group), 0.01, np.float32),
        zeros=None,
        offsets=None,
        bits=bits,
        group_size=group,
        activations="bfloat16" if bits == 4 else "int8",
    )
