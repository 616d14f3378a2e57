"""Drives a program by hand: block tables in a shuffled pool, ragged steps, logits of every token."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.backends import BACKENDS
from cloister.backends.base import LOGITS, FloatArray, ForwardBatch, KVGroup, KVLayout, Program, Weights
from cloister.backends.kivi import KIVI, RECENT_WINDOW
from cloister.backends.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from cloister.backends.tensors import Tensor
from cloister.models import load
from cloister.models.decoder import tensor_shapes


class GivenWeights:
    """Weights from a dict (protocol `backends.base.Weights`)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> Sequence[str]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def form(self, name: str) -> None:
        return None

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())


class RandomWeights(GivenWeights):
    """Weights of a spec, drawn from a seed; from the second time on they are copies, which take a tenth of the time."""

    def __init__(self, spec: DecoderSpec, seed: int = 0) -> None:
        shapes = tuple(tensor_shapes(spec))
        super().__init__({name: array.copy() for name, array in _draw_all(shapes, seed).items()})


@lru_cache(maxsize=32)
def _draw_all(shapes: tuple[tuple[str, tuple[int, ...]], ...], seed: int) -> dict[str, npt.NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return {name: _draw(rng, name, shape) for name, shape in shapes}


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    values = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        return values * np.float32(0.3) + np.float32(not name.endswith("bias"))
    return values if name.startswith("embed") else values * np.float32(shape[1] ** -0.5)


def make_spec(
    *, hidden: int, intermediate: int, heads: tuple[int, int], head_dim: int, num_layers: int = 2, vocab: int = 320,
    window: int | None = None, qk_norm: bool = False,
) -> DecoderSpec:  # fmt: skip
    """A decoder of any size; `heads` are (num_heads, num_kv_heads)."""
    frequencies = tuple(float(10000.0 ** (-2 * i / head_dim)) for i in range(head_dim // 2))
    attention = AttentionSpec(*heads, head_dim, head_dim**-0.5, RopeSpec(frequencies), qk_norm=qk_norm, window=window)
    layer = LayerSpec(attention, MlpSpec(intermediate))
    return DecoderSpec("random", vocab, hidden, (layer,) * num_layers, 1e-5, 4096)


def build(
    spec: DecoderSpec, weights: Weights, *, num_blocks: int = 256, block_size: int = 16, num_threads: int = 1,
    dtype: str = "float32", backend: str = "torch", **options: Any,
) -> Driver:  # fmt: skip
    """Builds a program and a driver for it; `options` are the back end's own."""
    maker = BACKENDS.get(backend)(num_threads=num_threads, device="cpu", dtype=dtype, **options)
    layout = KVLayout(num_blocks, block_size)
    if options.get("kv_dtype") == KIVI:
        layers = frozenset(range(len(spec.layers)))
        groups = KVGroup(num_blocks, layers), KVGroup(num_blocks, layers, RECENT_WINDOW, is_recent=True)
        layout = KVLayout.of_groups(groups, block_size)
    return Driver(maker.build(spec, weights, layout), num_blocks, block_size, len(layout.groups) or 1)


def build_from(path: Path, max_model_len: int | None = None, **settings: Any) -> Driver:
    """`build` for a model directory."""
    model = load(path, max_model_len=max_model_len)
    return build(model.spec, model.weights, **settings)


@cache
def _shuffled(num_blocks: int) -> tuple[int, ...]:
    blocks = list(range(num_blocks))
    random.Random(num_blocks).shuffle(blocks)
    return tuple(blocks)


class Driver:
    """Runs steps of any raggedness; blocks are handed out in a shuffled order, so no table is contiguous."""

    def __init__(self, program: Program, num_blocks: int, block_size: int, num_groups: int = 1) -> None:
        self.program, self.block_size, self._num_groups = program, block_size, num_groups
        self._num_blocks = num_blocks
        self._free = list(_shuffled(num_blocks))
        self._tables: dict[object, list[int]] = {}
        self._lengths: dict[object, int] = {}

    def share(self, source: object, target: object, num_tokens: int) -> None:
        """Gives `target` the first tokens of `source`: whole blocks shared, a partial one copied."""
        whole, rest = divmod(num_tokens, self.block_size)
        self._tables[target] = self._tables[source][:whole]
        self._lengths[target] = num_tokens
        if rest:
            self._tables[target].append(self._free.pop())
            pair = self._tables[source][whole], self._tables[target][whole]
            self.program.copy_blocks(list(zip(*map(self.entry, pair), strict=True)))

    def length(self, seq: object) -> int:
        """Positions of a sequence."""
        return self._lengths[seq]

    def slot(self, seq: object, position: int) -> int:
        """Where a position lies, as `backends.base.Program` counts."""
        return self._tables[seq][position // self.block_size] * self.block_size + position % self.block_size

    def entry(self, block: int) -> list[int]:
        """The blocks of all groups that go with a block of the first one."""
        return [block, *((group + 1) * self._num_blocks - 1 - block for group in range(1, self._num_groups))]

    def slots(self, seq: object, position: int) -> list[int]:
        """`slot` in every group."""
        block, place = divmod(self.slot(seq, position), self.block_size)
        return [other * self.block_size + place for other in self.entry(block)]

    def blocks(self, seq: object) -> list[int]:
        """The block table of a sequence."""
        return list(self._tables[seq])

    def cut(self, seq: object, length: int) -> None:
        """Forgets the positions of a sequence from `length` on; blocks stay."""
        self._lengths[seq] = length

    def free(self, seq: object) -> None:
        """Wipes and gives back the blocks of a sequence that shares none."""
        self.forget(seq, None)

    def forget(self, seq: object, owner: object) -> None:
        """`free` for a sequence that shares blocks with `owner`, which keeps them."""
        kept = self._tables.get(owner, [])
        blocks = [block for block in self._tables.pop(seq) if block not in kept]
        del self._lengths[seq]
        self.program.wipe_blocks([other for block in blocks for other in self.entry(block)])
        self._free += blocks

    def step(self, parts: Mapping[Any, Sequence[int]]) -> dict[Any, FloatArray]:
        """Computes the next tokens of each sequence and returns their logits, [num_tokens, vocab] for each."""
        logits = self.program.step(self.plan(parts), LOGITS).logits
        ends = np.cumsum([len(tokens) for tokens in parts.values()])
        return dict(zip(parts, np.split(logits, ends[:-1]), strict=True))

    def plan(self, parts: Mapping[Any, Sequence[int]], logit_rows: Sequence[int] | None = None) -> ForwardBatch:
        """Places the next tokens of each sequence and returns the batch; without `logit_rows` it asks for all logits."""
        for seq, tokens in parts.items():
            self._tables.setdefault(seq, [])
            start = self._lengths.get(seq, 0)
            self._lengths[seq] = start + len(tokens)
            while len(self._tables[seq]) * self.block_size < self._lengths[seq]:
                self._tables[seq].append(self._free.pop())
        counts = [len(tokens) for tokens in parts.values()]
        ends = [self._lengths[seq] for seq in parts]
        most = self._num_groups * max(len(self._tables[seq]) for seq in parts)
        tables = np.full((len(parts), most), -1, np.int32)
        for row, seq in enumerate(parts):
            blocks = [other for block in self._tables[seq] for other in self.entry(block)]
            tables[row, : len(blocks)] = blocks
        positions = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        return ForwardBatch(
            token_ids=np.concatenate([np.asarray(tokens) for tokens in parts.values()]).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            query_starts=np.cumsum([0, *counts]).astype(np.int32),
            context_lens=np.array(ends, np.int32),
            block_tables=tables,
            logit_rows=np.arange(sum(counts), dtype=np.int32) if logit_rows is None else np.array(logit_rows, np.int32),
        )

    def run(self, seq: object, tokens: Sequence[int], chunk: int | None = None) -> FloatArray:
        """Computes a sequence alone, `chunk` tokens at a time, and returns the logits of all its tokens."""
        size = chunk or len(tokens)
        return np.concatenate([self.step({seq: tokens[i : i + size]})[seq] for i in range(0, len(tokens), size)])
