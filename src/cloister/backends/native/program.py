"""A decoder that runs on the native kernels: a step is one call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np

from cloister.backends.base import DrawArray, FloatArray, ForwardBatch, IntArray, KVLayout, Span
from cloister.backends.native import _native
from cloister.backends.native.memory import reserve
from cloister.backends.native.model import PackedModel
from cloister.backends.spec import DecoderSpec, RopeSpec

KV_KINDS: Final[Mapping[str, int]] = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
_ACTIVATIONS: Final[Mapping[str, int]] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


class NativeProgram:
    """A packed model with its KV cache (protocols `GreedyProgram`, `DrawingProgram`, `BufferedProgram` and `Recording`).

    Args:
        kernels: the instruction set, one of `_native.kernel_names()`.
        kv_dtype: one of `KV_KINDS`.
    """

    def __init__(
        self, spec: DecoderSpec, model: PackedModel, kv: KVLayout, *, kernels: str, pool: _native.Pool, kv_dtype: str
    ) -> None:
        self._model = model  # the kernels hold pointers into its arrays
        self._program = _native.Program(kernels, pool, spec.vocab_size, spec.hidden_size, spec.norm_eps)
        self._vocab_size = spec.vocab_size
        embedding = model.embedding.bind()
        self._program.set_ends(embedding, embedding if model.head is None else model.head.bind(), model.norm)
        ropes: dict[RopeSpec, int] = {}
        self._caches = []
        for layer, packed in zip(spec.layers, model.layers, strict=True):
            attention = layer.attention
            if attention.rope not in ropes:
                ropes[attention.rope] = len(ropes)
                self._program.add_rope(list(attention.rope.inv_freq), attention.rope.attention_scale)
            kind = KV_KINDS[kv_dtype]
            block_bytes = _native.kv_block_bytes(kind, attention.num_kv_heads, attention.head_dim, kv.block_size)
            cache = reserve(block_bytes * kv.num_blocks, streamed=False)
            self._caches.append(cache.reshape(kv.num_blocks, block_bytes))
            self._program.add_layer(
                shape=(attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.window or 0),
                scale=attention.scale,
                rope=ropes[attention.rope],
                activation=_ACTIVATIONS[layer.mlp.activation],
                qkv=packed.qkv.bind(),
                output=packed.output.bind(),
                gate_up=packed.gate_up.bind(),
                down=packed.down.bind(),
                attention_norm=packed.attention_norm,
                mlp_norm=packed.mlp_norm,
                q_norm=packed.q_norm,
                k_norm=packed.k_norm,
                cache=cache,
                kv_kind=kind,
                block_size=kv.block_size,
            )

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """Computes one step, writes K and V, and returns logits [num_rows, vocab].

        Programs of one back end take turns, whole steps, whichever thread they are called from.

        Raises:
            ValueError: the arrays do not fit together, or a number in them leads out of another; nothing was written.
        """
        logits = np.empty((len(batch.logit_rows), self._vocab_size), np.float32)
        self._program.forward(*_arrays(batch), logits)
        return logits

    def forward_best(self, batch: ForwardBatch) -> IntArray:
        """As `forward`, but returns the id of each row's largest logit; -1 where one is not a finite number."""
        best = np.empty(len(batch.logit_rows), np.int32)
        self._program.forward_best(*_arrays(batch), best)
        return best

    def forward_draw(self, batch: ForwardBatch, draws: DrawArray) -> IntArray:
        """As `forward`, but chooses a token for each draw; -1 where a logit of its row is not a finite number."""
        tokens = np.empty(len(draws), np.int32)
        self._program.forward_draw(*_arrays(batch), draws.view(np.uint8), tokens)
        return tokens

    def draw(self, logits: FloatArray, draws: DrawArray) -> IntArray:
        """Chooses tokens from logits [num_rows, vocab]; -1 where there is none to choose."""
        tokens = np.empty(len(draws), np.int32)
        self._program.draw(logits, draws.view(np.uint8), tokens)
        return tokens

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, target) in every layer."""
        for blocks in self._caches:
            for source, target in pairs:
                blocks[target] = blocks[source]

    def wipe_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrites blocks with zeros in every layer."""
        for blocks in self._caches:
            blocks[list(block_ids)] = 0

    def wipe_buffers(self) -> None:
        """Overwrites activations, logits and scratch of all steps so far with zeros; as quick as what there is to overwrite."""
        self._program.wipe()

    @contextmanager
    def record(self) -> Iterator[list[Span]]:
        """Records every `forward` inside the context; the list is complete when the context ends."""
        spans: list[Span] = []
        self._program.record(True)
        try:
            yield spans
        finally:
            spans.extend(Span(*span) for span in self._program.spans())
            self._program.record(False)

    @property
    def num_phases(self) -> int:
        """Lists of tasks that the team was given so far."""
        return self._program.num_phases

    @property
    def buffer_bytes(self) -> int:
        """Bytes of activations and scratch, as of the largest step so far."""
        return self._program.buffer_bytes


def _arrays(batch: ForwardBatch) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray, IntArray, IntArray | None]:
    tables = batch.block_tables
    return (
        batch.token_ids,
        batch.positions,
        batch.query_starts,
        batch.context_lens,
        tables if tables.flags.c_contiguous else np.ascontiguousarray(tables),
        batch.logit_rows,
        batch.parents,
    )
