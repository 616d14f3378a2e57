"""The protocol between the runner and whatever computes: arrays in, logits out.

Canonical weight names, which `models` maps a checkpoint onto (L is the layer number from 0):
`embed.weight [vocab, hidden]`, `layers.L.attention_norm.weight [hidden]`, `layers.L.q.weight [num_heads * head_dim, hidden]`,
`layers.L.k.weight`, `layers.L.v.weight [num_kv_heads * head_dim, hidden]`, `layers.L.o.weight [hidden, num_heads * head_dim]`,
`layers.L.q_norm.weight`, `layers.L.k_norm.weight [head_dim]` (or as long as the projection's rows), `layers.L.mlp_norm.weight
[hidden]`, `layers.L.gate.weight`, `layers.L.up.weight [intermediate, hidden]`, `layers.L.down.weight [hidden, intermediate]`,
`norm.weight [hidden]`, `head.weight [vocab, hidden]` (absent when tied), and `.bias` beside a projection or norm that has one.
Where the spec asks for them: `positions.weight [max_positions, hidden]`, `layers.L.attention_post_norm.weight`,
`layers.L.mlp_post_norm.weight [hidden]`; `gate` only where the feed-forward is gated; no pre-norms where there are none.
A mixture has `layers.L.router.weight [num_experts, hidden]`, `layers.L.experts.E.gate.weight`, `.up.weight`, `.down.weight` (E
is the expert's number from 0), `layers.L.shared.gate.weight`, `.up.weight`, `.down.weight`, and `layers.L.shared_router.weight
[1, hidden]`. Norms are as they multiply: a family that stores w for 1 + w (Gemma) is mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from cloister.backends.spec import DecoderSpec
from cloister.backends.tensors import QuantizedTensor, Tensor
from cloister.types.registry import Registry

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
DrawArray = npt.NDArray[np.void]
MaskArray = npt.NDArray[np.uint32]

DRAW = np.dtype(
    [
        ("temperature", "f4"), ("row", "i4"), ("top_k", "i8"), ("top_p", "f8"), ("min_p", "f8"),
        ("seed", "u8"), ("index", "i8"), ("position", "i8"),
    ]
)  # fmt: skip
"""How one token is chosen: from which row of logits, with which sampling parameters (temperature 0 takes the most likely token;
top_k 0, top_p 1 and min_p 0 are off), and with whose noise (`runner.noise`)."""


class Weights(Protocol):
    """Weights under canonical names, read tensor by tensor so that no second copy of the model is ever held."""

    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def form(self, name: str) -> QuantizedTensor | None:
        """Returns a row [1, in] of the kind that `read` returns, not its values, unread; None for what comes as numbers."""
        ...

    def read(self, name: str) -> Tensor:
        """Returns one tensor, memory-mapped where possible; a matrix may be quantised (`backends.tensors`)."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A ragged batch: the tokens of all sequences one after another, no padding.

    Attributes:
        token_ids: [num_tokens] int32.
        positions: [num_tokens] int32, absolute; consecutive inside a sequence.
        query_starts: [num_seqs + 1] int32; sequence i owns tokens query_starts[i]:query_starts[i + 1].
        context_lens: [num_seqs] int32; keys of sequence i after this step (its last position + 1).
        block_tables: [num_seqs, max_blocks] int32; position p of sequence i lives in slot p % block_size of block
            block_tables[i, p // block_size]. Entries past the context are not read.
        logit_rows: [num_rows] int32 indexes into the tokens; logits are computed for these only, in this order.
        parents: None, or [num_tokens] int32: the token before each, as an index into the tokens; -1 is the end of the context.
            Tokens with one parent are rivals (token trees; SpecInfer, Miao et al. 2024): they have the same position and do not
            see each other. Token i of a sequence lies in slot context_len - num_tokens + i whatever its position, and parents
            stand before their children.
        adapters: None, or [num_seqs] int32: the slot of each sequence's adapter (`AdapterProgram`); -1 is none.
    """

    token_ids: IntArray
    positions: IntArray
    query_starts: IntArray
    context_lens: IntArray
    block_tables: IntArray
    logit_rows: IntArray
    parents: IntArray | None = None
    adapters: IntArray | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How much KV a program holds.

    Attributes:
        num_blocks: blocks of all sequences together.
        block_size: positions in a block, 1 to 256.
    """

    num_blocks: int
    block_size: int


class Program(Protocol):
    """A model ready to run, with its weights and its KV cache."""

    def forward(self, batch: ForwardBatch) -> FloatArray:
        """Computes one step, writes K and V, and returns logits [num_rows, vocab] (float32).

        A row's bits depend on its own sequence only (rule 6).
        """
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, target) in every layer."""
        ...

    def wipe_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrites blocks with zeros in every layer."""
        ...


@dataclass(frozen=True, slots=True)
class OperatorSpan:
    """Time that one thread spent on one operator; nothing of what was computed.

    Attributes:
        name: the operator, whichever layer it belongs to: embed, norm, qkv, rope, attention, output, mlp_norm, gate_up, down,
            head, quantize; joined by `+` where a program computes several as one (`norm+qkv`). Other work has other names.
        thread: 0 is the thread that called `forward`; helpers count from 1.
        start_s: on the clock of `time.perf_counter`.
    """

    name: str
    thread: int
    start_s: float
    duration_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@runtime_checkable
class Recording(Protocol):
    """What a program offers beside `Program` when it can say where its time goes."""

    def record(self) -> AbstractContextManager[list[OperatorSpan]]:
        """Records every `forward` inside the context; the list is complete when the context ends.

        Outside of it a program keeps no times at all.
        """
        ...


@runtime_checkable
class GreedyProgram(Program, Protocol):
    """A program that can find the most likely tokens itself, so that a greedy step moves no logits (optional)."""

    def forward_best(self, batch: ForwardBatch) -> IntArray:
        """As `forward`, but returns for each row the id of its largest logit, [num_rows] int32.

        The lowest id among equal ones, as `numpy.argmax`; -1 where a logit of the row is not a finite number.
        """
        ...


@runtime_checkable
class DrawingProgram(Program, Protocol):
    """A program that can choose tokens itself as `runner.sampling` specifies, so that a step moves no logits (optional).

    Both methods are one definition, bit for bit: the token of a draw is the same whichever chose it. It may differ from the
    specification's where two tokens are ahead by less than float32 can tell.
    """

    def forward_draw(self, batch: ForwardBatch, draws: DrawArray) -> IntArray:
        """As `forward`, but chooses a token for each of `draws`, [num_draws] of `DRAW`; returns ids [num_draws] int32.

        -1 where a logit of the row is not a finite number.
        """
        ...

    def draw(self, logits: FloatArray, draws: DrawArray) -> IntArray:
        """Chooses tokens from logits [num_rows, vocab], in which minus infinity bars a token; returns ids [num_draws] int32.

        -1 where all tokens are barred, or a logit is not a number or plus infinity.
        """
        ...


@runtime_checkable
class MaskingProgram(DrawingProgram, Protocol):
    """A program that can choose among some of the tokens, for grammars (optional)."""

    def forward_masked(self, batch: ForwardBatch, draws: DrawArray, masks: Callable[[], MaskArray]) -> IntArray:
        """As `forward_draw`, but chooses among the tokens of each draw's mask.

        Args:
            masks: called once, after the model has computed: [num_draws, num_words] uint32; bit i % 32 of word i // 32 says
                whether token i may be chosen. Words behind the vocabulary are not read.

        Returns:
            ids [num_draws] int32; -1 where the mask leaves none, or a logit of the row is not a finite number.
        """
        ...


@runtime_checkable
class HiddenProgram(Program, Protocol):
    """A program that can say what its head reads, for embeddings (optional)."""

    def forward_hidden(self, batch: ForwardBatch) -> FloatArray:
        """As `forward`, but returns for each row the hidden state after the final norm, [num_rows, hidden] (float32)."""
        ...


@runtime_checkable
class TreeProgram(Program, Protocol):
    """A program that can compute token trees and keep one path of them (optional)."""

    def move_positions(self, moves: IntArray) -> None:
        """Copies KV of single positions in every layer, bit for bit, in the order given.

        Args:
            moves: [num_moves, 2] int32: source and target; position p of a block b is b * block_size + p.
        """
        ...


@runtime_checkable
class WatchedProgram(DrawingProgram, Protocol):
    """A program that can say the likeliest tokens of a step beside those that it chooses, for drafters (optional)."""

    def forward_watched(self, batch: ForwardBatch, draws: DrawArray, num_top: int) -> tuple[IntArray, IntArray]:
        """As `forward_draw`; also returns the ids of each row's `num_top` largest logits, best first, lower ids first among
        equal ones, [num_rows, num_top] int32 (-1 in a row that is not finite)."""
        ...

    def find_top(self, logits: FloatArray, num_top: int) -> IntArray:
        """Returns the same of logits [num_rows, vocab]."""
        ...


@runtime_checkable
class HeadProgram(Program, Protocol):
    """A program that can show what its head reads, and lend it, for drafters (optional)."""

    def read_hidden(self) -> FloatArray:
        """Returns what the head read in the last forward of whatever kind: hidden states after the final norm, a row for each
        of its `logit_rows`, [num_rows, hidden]. Right after that forward; no row after buffers were wiped."""
        ...

    def project(self, hidden: FloatArray) -> FloatArray:
        """Returns the logits [num_rows, vocab] of hidden states after the final norm [num_rows, hidden], with the
        bits that a forward has for them. `read_hidden` goes on to say what it said."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A low-rank adapter (LoRA, Hu et al. 2021, equation 3): y = W x + B A x in the products that it changes.

    Attributes:
        updates: product, such as "layers.0.q" -> (A [rank, inputs], B [outputs, rank]), float32; the scale is in B.
    """

    updates: Mapping[str, tuple[FloatArray, FloatArray]]

    @property
    def rank(self) -> int:
        """The largest of its updates'."""
        return max((a.shape[0] for a, _ in self.updates.values()), default=0)


@runtime_checkable
class AdapterProgram(Program, Protocol):
    """A program that can run sequences with adapters, several in one batch (optional).

    A row's bits depend on its own sequence and adapter only; rows without one have the bits that they would have in a batch
    without any.
    """

    def load_adapter(self, slot: int, adapter: AdapterWeights) -> None:
        """Puts an adapter in a slot; the one that was there is gone. Never called during a step."""
        ...

    def unload_adapter(self, slot: int) -> None:
        """Empties a slot; an empty one changes nothing."""
        ...


@runtime_checkable
class BufferedProgram(Program, Protocol):
    """A program whose buffers outlive a step, with what they held (optional)."""

    def wipe_buffers(self) -> None:
        """Overwrites what steps left outside of the KV cache with zeros; costs nothing if no step was since the last time."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a program will take, in bytes.

    Attributes:
        logit_row_bytes: of the logits of one position, where `activations_bytes` does not count them.
        available_bytes: free memory of the device that it is taken from; None is the memory of this machine.
    """

    weights_bytes: int
    kv_block_bytes: int
    activations_bytes: int
    available_bytes: int | None = None
    logit_row_bytes: int = 0


class Backend(Protocol):
    """Builds programs.

    Attributes:
        fingerprint: back end, version, instruction set and number of the numerics, for `system_fingerprint`.
    """

    fingerprint: str

    def need(self, spec: DecoderSpec, weights: Weights, *, block_size: int, max_batched_tokens: int) -> MemoryNeed:
        """Says what `build` and `forward` will take, before anything is allocated."""
        ...

    def build(self, spec: DecoderSpec, weights: Weights, kv: KVLayout, *, identity: str | None = None) -> Program:
        """Builds a program.

        Args:
            identity: names the very weights, for a back end that keeps what it made of them; None keeps nothing.
        """
        ...


class BackendFactory(Protocol):
    """Makes a back end; called once, after its name was chosen.

    Args:
        num_threads: threads for arithmetic.
        device: "cpu" or "cuda".
        dtype: "float32" or "bfloat16", of weights that come as numbers, and of activations; None for what suits it best.
        kv_dtype: of KV, one of "float32", "bfloat16", "int8", "int4"; None for `dtype`.
        store: directory in which it may keep what it made of weights; None keeps nothing.
        store_bytes: what that may take.
    """

    def __call__(
        self,
        *,
        num_threads: int,
        device: str,
        dtype: str | None = None,
        kv_dtype: str | None = None,
        numerics: str = "exact",
        store: Path | None = None,
        store_bytes: int | None = None,
    ) -> Backend: ...


BACKENDS: Registry[BackendFactory] = Registry("back end")
