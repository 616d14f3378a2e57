"""The interface between the runner and whatever computes: arrays in, logits or tokens out.

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
[1, hidden]`; the bias of its choice is `layers.L.router.e_score_correction_bias [num_experts]`, that of its scores
`layers.L.router.bias [num_experts]`. Attention sinks are `layers.L.attention.sinks [num_heads]`.
Latent attention has `layers.L.kv_a.weight [kv_lora_rank + qk_rope_head_dim, hidden]`, `layers.L.kv_a_norm.weight
[kv_lora_rank]` and `layers.L.kv_b.weight [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]` in place of k and v (the
key rows of a head before its value rows), `layers.L.q.weight [num_heads * (qk_nope_head_dim + qk_rope_head_dim), hidden]` or,
where queries have a latent of their own, `layers.L.q_a.weight [q_lora_rank, hidden]`, `layers.L.q_a_norm.weight [q_lora_rank]`
and `layers.L.q_b.weight` (as many rows as q), and `layers.L.o.weight [hidden, num_heads * v_head_dim]`. Its sparse index has
`layers.L.index_q.weight [num_heads * head_dim, q_lora_rank]`, `layers.L.index_k.weight [head_dim, hidden]`,
`layers.L.index_k_norm.weight`, `.bias [head_dim]` and `layers.L.index_weights.weight [num_heads, hidden]`.
Layers that read the KV of an earlier one lack k, v and k_norm. Residual streams (`backends.spec.StreamsSpec`) have
`streams_in.I.weight`, `streams_out.I.weight [hidden, hidden]` (I from 0 for stream 1), `layer_inputs.embed.weight [input_vocab,
num_layers * input_size]`, `layer_inputs.projection.weight [num_layers * input_size, hidden]`, `layer_inputs.norm.weight
[input_size]`, and in each layer `altup.router.weight [num_streams, hidden]`, `altup.norm.weight`, `altup.scale [hidden]`,
`altup.predict.weight [num_streams ** 2, num_streams]`, `altup.correct.weight [num_streams, num_streams]`, `laurel_left.weight
[rank, hidden]`, `laurel_right.weight [hidden, rank]`, `laurel_norm.weight [hidden]`, `layer_input_gate.weight [input_size,
hidden]`, `layer_input_out.weight [hidden, input_size]` and `layer_input_norm.weight [hidden]`.
A module that predicts further tokens has `merge_embedding_norm.weight`, `merge_hidden_norm.weight [hidden]` and `merge.weight
[hidden, 2 * hidden]`, and neither `embed` nor `head`.
Gated attention has `layers.L.q_gate.weight [num_heads * head_dim, hidden]`.
Mixers with a state (`backends.spec.StateSpec`) lie under `layers.L.mixer`, the norm before them is `attention_norm`, and
their convolution is `conv.weight [channels, kernel_size]`, oldest position first. Mamba 2: `in.weight [inner_size + conv_size +
num_heads, hidden]` (rows of z, x, B, C, dt), `conv`, `A_log`, `D`, `dt_bias [num_heads]`, `norm.weight [inner_size]` where
there is a norm, `out.weight [hidden, inner_size]`. Gated delta net: `q.weight`, `k.weight [key_size, hidden]`, `v.weight`,
`z.weight [value_size, hidden]`, `b.weight`, `a.weight [num_value_heads, hidden]`, `conv` (channels of q, k, v), `A_log`,
`dt_bias [num_value_heads]`, `norm.weight [value_head_dim]`, `out.weight [hidden, value_size]`. Short convolution: `in.weight
[3 * hidden, hidden]` (rows of B, C, x), `conv`, `out.weight [hidden, hidden]`.
Norms are as they multiply: a family that stores w for 1 + w (Gemma) is mapped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Flag, auto
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from cloister.backends.adapters import AdapterWeights
from cloister.backends.draft_heads import DraftHeads
from cloister.backends.kv_planes import KVPlane
from cloister.backends.ranges import KVRanges, RangeLayout, has_plain_kv
from cloister.backends.recording import OperatorSpan
from cloister.backends.spec import DecoderSpec
from cloister.backends.tensors import QuantizedTensor, Tensor
from cloister.types.errors import ConfigError, EngineError
from cloister.types.images import ImageTile
from cloister.types.layerwise import CellLayout

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
MaskArray = npt.NDArray[np.uint32]
ByteArray = npt.NDArray[np.uint8]
SamplingMetadata = npt.NDArray[np.void]
_NO_FLOATS: Final[FloatArray] = np.empty((0, 0), np.float32)
_NO_IDS: Final[IntArray] = np.empty(0, np.int32)
_NO_ROWS_OF_IDS: Final[IntArray] = np.empty((0, 0), np.int32)

SAMPLING_METADATA: Final = np.dtype(
    [
        ("temperature", "f4"), ("row", "i4"), ("top_k", "i8"), ("top_p", "f8"), ("min_p", "f8"),
        ("seed", "u8"), ("index", "i8"), ("position", "i8"),
    ]
)  # fmt: skip
"""How one token is sampled: from which row of logits, with which sampling parameters (temperature 0 takes the most likely one;
top_k 0, top_p 1 and min_p 0 are off), and with whose noise (`executor.noise`)."""


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

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.read(name)) for name in self.names())


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A ragged batch: the tokens of all sequences one after another, no padding.

    Attributes:
        token_ids: [num_tokens] int32.
        positions: [num_tokens] int32, absolute; consecutive inside a sequence.
        query_starts: [num_seqs + 1] int32; sequence i owns tokens query_starts[i]:query_starts[i + 1].
        context_lens: [num_seqs] int32; keys of sequence i after this step (its last position + 1).
        block_tables: [num_seqs, max_entries * num_groups] int32; of layers of group g position p of sequence i lives in slot
            p % block_size of block block_tables[i, p // block_size * num_groups + g] (`KVLayout.groups`). Entries past the
            context, and those behind the window of the group, are not read.
        logit_rows: [num_rows] int32 indexes into the tokens; logits are computed for these only, in this order.
        parents: None, or [num_tokens] int32: the token before each, as an index into the tokens; -1 is the end of the context.
            Tokens with one parent are rivals (token trees; SpecInfer, Miao et al. 2024): they have the same position and do not
            see each other. Token i of a sequence lies in slot context_len - num_tokens + i whatever its position, and parents
            stand before their children.
        adapters: None, or [num_seqs] int32: the slot of each sequence's adapter (`Program.load_adapter`); -1 is none.
        token_types: None, or [num_tokens] int32: the type of each token, for encoders (`backends.encoder_spec`); None is 0.
        embeddings: None, or [num_rows, hidden] float32: what some tokens have in place of their embeddings (images, links), as
            the first layer reads it. Where the tower has a `deepstack`, [num_rows, (1 + len(deepstack)) * hidden]: part i > 0
            of a row is added behind layer i - 1.
        embedding_rows: [num_rows] int32 indexes into the tokens, all different, where there are `embeddings`.
        last_seen: None, or [num_tokens] int32: the last position that each token sees; None: its own. A token of an image may
            see the image to its end, which the step computes too; no known token sees less than the one before it.
        rope_positions: None, or [3, num_tokens] int32: time, row and column that each token is turned by (`RopeSpec.axes`);
            none is greater than the token's position. None: `positions` is all three.
        hidden: None, or [num_tokens, hidden] float32: what each token brings beside its embedding, where the decoder merges
            both (`DecoderSpec.merges_hidden`).
        state_spans: for layers with a state, [num_spans, 4] int32: first token, end token, block read, block written. Tokens
            [first, end) of one sequence go on from the state in the one block (zeros before position 0) and leave theirs in the
            other, often the same one. Spans of a sequence are in order, and cover its tokens. The block written is -1 for
            drafts, which change no state before `Program.accept_drafts`. None: a sequence's state is in the block of its first
            position, and there are no drafts.
        residual: None, or [num_tokens, hidden] float32: the step computes one layer, `layer`, which reads this, and leaves what
            the next one reads in its place (LAYERWISE). The first layer reads embeddings instead; logits and hidden states come
            of the last one only. `block_tables` then has cells (`types.layerwise.CellLayout`) in place of blocks.
        layer: the number of that layer.
        document_ranges: None, or [num_seqs, 2] int32: first position and end of the documents that a sequence weighs, all
            before its tokens; equal ones for none (DOCUMENT_WEIGHTS). They have a softmax of their own, whose scores are
            divided by the temperature; the logarithm of what it sums up, times temperature and scale, is their score beside
            all other keys (APE, Yang et al. 2025, arXiv:2502.05431, section 4).
        document_weights: [num_seqs, 2] float32, temperature and scale, both above 0; None where there are no ranges.
    """

    token_ids: IntArray
    positions: IntArray
    query_starts: IntArray
    context_lens: IntArray
    block_tables: IntArray
    logit_rows: IntArray
    parents: IntArray | None = None
    adapters: IntArray | None = None
    token_types: IntArray | None = None
    embeddings: FloatArray | None = None
    embedding_rows: IntArray | None = None
    last_seen: IntArray | None = None
    rope_positions: IntArray | None = None
    state_spans: IntArray | None = None
    hidden: FloatArray | None = None
    residual: FloatArray | None = None
    layer: int = 0
    document_ranges: IntArray | None = None
    document_weights: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share block tables, as their queries see the same positions (decisions/0018).

    Attributes:
        num_blocks: blocks of all sequences together.
        layers: their numbers; empty for all layers of the model.
        window: what lies behind so many positions is never read, and its blocks may be others' by then; None keeps all of them.
        is_state: a block holds the state of the layers at one position of one sequence (`LayerSpec.state`), not KV. A layer
            with attention beside its state is in two groups.
        is_recent: a block holds the newest keys and values unpacked, of layers that pack all others (`backends.kivi`) in the
            blocks of another group.
    """

    num_blocks: int
    layers: frozenset[int] = frozenset()
    window: int | None = None
    is_state: bool = False
    is_recent: bool = False


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How much KV a program holds.

    Attributes:
        num_blocks: blocks of all sequences together, of all groups; they are numbered through, group after group.
        block_size: positions in a block, 1 to 256.
        groups: of layers; empty for one group of all layers.
        ranges: addresses at which sequences see their blocks one after the other; None: only block tables say where they are.
    """

    num_blocks: int
    block_size: int
    groups: tuple[KVGroup, ...] = ()
    ranges: RangeLayout | None = None

    @classmethod
    def of_groups(cls, groups: Sequence[KVGroup], block_size: int) -> KVLayout:
        """Returns the layout of groups that have every layer once."""
        return cls(sum(group.num_blocks for group in groups), block_size, tuple(groups))

    def blocks_of(self, layer: int) -> range:
        """Returns the numbers of the blocks that a layer's positions lie in: KV, where it has a state beside attention."""
        first = 0
        for group in self.groups:
            if not group.layers or layer in group.layers:
                return range(first, first + group.num_blocks)
            first += group.num_blocks
        return range(self.num_blocks)

    def group_of(self, layer: int) -> int:
        """Returns the number of a layer's group, that of its attention where it has a state beside it."""
        return next((i for i, group in enumerate(self.groups) if not group.layers or layer in group.layers), 0)

    @property
    def state_blocks(self) -> range:
        """The numbers of the blocks that hold states; all blocks where layers are not in groups."""
        number = next((i for i, group in enumerate(self.groups) if group.is_state), None)
        if number is None:
            return range(0 if self.groups else self.num_blocks)
        return self.blocks_of_group(number)

    @property
    def recent_group(self) -> int | None:
        """The number of the group of the newest keys and values; None where no layer packs the others."""
        return next((i for i, group in enumerate(self.groups) if group.is_recent), None)

    @property
    def recent_blocks(self) -> range:
        """The numbers of the blocks of that group."""
        return range(0) if self.recent_group is None else self.blocks_of_group(self.recent_group)

    def blocks_of_group(self, number: int) -> range:
        """Returns the numbers of the blocks of a group."""
        first = sum(group.num_blocks for group in self.groups[:number])
        return range(first, first + self.groups[number].num_blocks)


class Capability(Flag):
    """What a program can do beside computing logits; asked of `Program.capabilities`, never of its type.

    Attributes:
        GREEDY: finds the most likely tokens (`Wants.greedy`), so that a greedy step moves no logits.
        SAMPLING: chooses tokens as `executor.sampling` specifies (`Wants.sampling`, `Wants.num_top`, `Program.sample`).
        MASKS: chooses among some of the tokens only, for grammars (`Wants.masks`).
        HIDDEN: shows what its head reads (`Wants.hidden`), for embeddings and drafters.
        EVERY_HIDDEN: shows it of tokens that have no row of logits too (`Wants.every_hidden`).
        HEAD: lends its head (`Program.project`).
        DRAFT_HEADS: computes draft heads (`Program.load_heads`, `Program.guess`).
        TREES: computes token trees (`ForwardBatch.parents`) and keeps one path of them (`Program.move_positions`).
        ADAPTERS: runs sequences with adapters, several in one batch (`ForwardBatch.adapters`, `Program.load_adapter`), and
            takes embeddings of their link tokens (`ForwardBatch.embeddings`).
        RECORDING: says where its time goes (`Program.record`).
        ASYNCHRONOUS: computes on another device, which goes on when `Program.launch` has returned.
        ENCODER: reads in both directions (`backends.encoder_spec`): a step computes the sequences whose last token is one of
            `ForwardBatch.logit_rows`, in the order of those. `Wants.hidden` brings a row for every position of them, one
            sequence after the other, and `Wants.logits` one row of scores of classes, [num_labels], for each. No tokens are
            chosen.
        IMAGES: encodes images (`Program.encode_image`), and takes their embeddings (`ForwardBatch.embeddings`).
        KV_TRANSFER: gives and takes the contents of whole blocks (`Program.export_blocks`, `Program.import_blocks`).
        LAYERWISE: computes single layers (`ForwardBatch.residual`), with KV and residuals in cells (`Program.cells`).
        DOCUMENT_WEIGHTS: weighs keys of documents by a temperature and a scale (`ForwardBatch.document_ranges`).
    """

    GREEDY = auto()
    SAMPLING = auto()
    MASKS = auto()
    HIDDEN = auto()
    HEAD = auto()
    DRAFT_HEADS = auto()
    TREES = auto()
    ADAPTERS = auto()
    RECORDING = auto()
    ASYNCHRONOUS = auto()
    ENCODER = auto()
    IMAGES = auto()
    EVERY_HIDDEN = auto()
    KV_TRANSFER = auto()
    LAYERWISE = auto()
    DOCUMENT_WEIGHTS = auto()


class Wants(msgspec.Struct, frozen=True):
    """The outputs that a step is asked for, beside the KV that it writes. Rows are those of `ForwardBatch.logit_rows`.

    A step brings logits, or chooses tokens and keeps its logits to itself: one of `logits`, `greedy` and `sampling`, or none.

    Attributes:
        logits: the logits of every row.
        greedy: the most likely token of every row.
        sampling: a token for each entry, [num_samples] of `SAMPLING_METADATA`.
        masks: what each of `sampling` may choose from; called once, after the model has computed: [num_samples, num_words]
            uint32; bit i % 32 of word i // 32 says whether token i may be chosen. Words behind the vocabulary are not read.
        num_top: the ids of so many of each row's largest logits, beside logits or sampled tokens.
        hidden: hidden states after the final norm.
        every_hidden: these of every token of the batch, in place of those of the rows.

    Raises:
        ValueError: these exclude each other.
    """

    logits: bool = False
    greedy: bool = False
    sampling: SamplingMetadata | None = None
    masks: Callable[[], MaskArray] | None = None
    num_top: int = 0
    hidden: bool = False
    every_hidden: bool = False

    def __post_init__(self) -> None:
        if self.logits + self.greedy + (self.sampling is not None) > 1:
            raise ValueError("a step brings logits, greedy tokens or sampled ones; want one of them")
        if self.hidden and self.every_hidden:
            raise ValueError("hidden states come of the rows or of every token; want one of them")
        if self.masks is not None and (self.sampling is None or self.num_top):
            raise ValueError("masks go with sampled tokens, and without the ids of the largest logits")
        if self.num_top and not self.logits and self.sampling is None:
            raise ValueError("the ids of the largest logits come with logits or sampled tokens")

    @property
    def needs(self) -> Capability:
        """The capabilities that a program needs for it."""
        needs = Capability.GREEDY if self.greedy else Capability(0)
        needs |= Capability.SAMPLING if self.sampling is not None or self.num_top else Capability(0)
        needs |= Capability.MASKS if self.masks is not None else Capability(0)
        needs |= Capability.EVERY_HIDDEN if self.every_hidden else Capability(0)
        return needs | (Capability.HIDDEN if self.hidden else Capability(0))


LOGITS = Wants(logits=True)
GREEDY = Wants(greedy=True)
HIDDEN = Wants(hidden=True)
KV_ONLY = Wants()
"""A step for the K and V that it writes, such as a part of a prompt."""


class StepOutput(msgspec.Struct):
    """The outputs of a step: arrays without rows for those that were not asked for.

    Attributes:
        logits: [num_rows, vocab] float32.
        tokens: ids int32. Greedy, [num_rows]: the lowest id among equal logits, as `numpy.argmax`. Sampled, [num_samples]: may
            differ from the specification's where two tokens are ahead by less than float32 can tell. -1 where a logit of the
            row is not a finite number, or a mask leaves no token.
        top: [num_rows, num_top] int32, best first, lower ids first among equal logits; -1 in a row that is not finite.
        hidden: [num_rows, hidden] float32, or [num_tokens, hidden] (`Wants.every_hidden`).
    """

    logits: FloatArray = _NO_FLOATS
    tokens: IntArray = _NO_IDS
    top: IntArray = _NO_ROWS_OF_IDS
    hidden: FloatArray = _NO_FLOATS


class Program(ABC):
    """A model ready to run, with its weights and its KV cache.

    A row's bits depend on its own sequence, and its adapter, only (batch invariance). Methods that need a capability raise
    EngineError where the program lacks it.

    Attributes:
        capabilities: what it can do beside computing logits.
        cells: memory of single layers in its blocks (LAYERWISE); None without it.
        ranges: maps blocks to the addresses of sequences, where its layout has those; a block table may then name a block by
            its number there. Every other method takes numbers below `KVLayout.num_blocks`.
    """

    capabilities: Capability = Capability(0)
    cells: CellLayout | None = None
    ranges: KVRanges | None = None

    @abstractmethod
    def step(self, batch: ForwardBatch, wants: Wants) -> StepOutput:
        """Computes one step: writes K and V, and returns what is wanted.

        Raises:
            ValueError: the arrays of the batch do not fit together.
            EngineError: the program lacks a capability that the step needs.
        """

    def launch(self, batch: ForwardBatch, wants: Wants) -> Callable[[], StepOutput]:
        """Begins a step, and returns what waits for it and gives its output (ASYNCHRONOUS).

        It is called before anything else is asked of the program. Errors are raised here or there.
        """
        raise self._lacks(Capability.ASYNCHRONOUS)

    @abstractmethod
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, target) in every layer."""

    @abstractmethod
    def wipe_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrites blocks with zeros in every layer."""

    def export_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Returns the contents of each block: its bytes in every layer that has it, layer after layer (KV_TRANSFER).

        A program with the same weights, numbers and layout continues from them with the same bits, whatever the numbers of
        its blocks.
        """
        raise self._lacks(Capability.KV_TRANSFER)

    def list_planes(self, block: int) -> list[KVPlane]:
        """Returns where the numbers of a block lie in its contents; none where they are not all bfloat16 or float32 keys and
        values."""
        return []

    def import_blocks(self, block_ids: Sequence[int], contents: Sequence[bytes | memoryview]) -> None:
        """Overwrites each block with the contents of another one of its group (KV_TRANSFER).

        Raises:
            ValueError: contents are longer or shorter than their block; nothing was written.
        """
        raise self._lacks(Capability.KV_TRANSFER)

    def read_cells(self, cells: IntArray) -> ByteArray:
        """Returns a copy of what cells hold, [num_cells, bytes of a cell] (LAYERWISE)."""
        raise self._lacks(Capability.LAYERWISE)

    def write_cells(self, cells: IntArray, contents: ByteArray) -> None:
        """Overwrites cells (LAYERWISE)."""
        raise self._lacks(Capability.LAYERWISE)

    def wipe_buffers(self) -> None:  # noqa: B027 - a program whose buffers die with a step has nothing to do
        """Overwrites what steps left outside of the KV cache with zeros; costs nothing if no step was since the last time."""

    def sample(self, logits: FloatArray, sampling: SamplingMetadata) -> IntArray:
        """Chooses tokens from logits [num_rows, vocab] as a step does, in which minus infinity masks a token (SAMPLING).

        Returns:
            ids [num_samples] int32; -1 where all tokens are masked, or a logit is not a number or plus infinity.
        """
        raise self._lacks(Capability.SAMPLING)

    def encode_image(self, image: ImageTile, check: Callable[[], None] = lambda: None) -> FloatArray:
        """Returns the embeddings of an image: what `ForwardBatch.embeddings` has at its positions (IMAGES).

        It computes in the calling thread, with the same bits whatever else runs; several threads may call it, beside steps.

        Args:
            image: of a size that the tower takes (`DecoderSpec.vision`).
            check: called between layers; an exception of it ends the encoding.
        """
        raise self._lacks(Capability.IMAGES)

    def project(self, hidden: FloatArray) -> FloatArray:
        """Returns the logits [num_rows, vocab] of hidden states after the final norm [num_rows, hidden], with the bits that a
        step has for them (HEAD)."""
        raise self._lacks(Capability.HEAD)

    def load_heads(self, heads: DraftHeads) -> int:
        """Takes draft heads, in the numbers that it computes in, and returns what `guess` knows them by (DRAFT_HEADS).

        Raises:
            ValueError: they do not fit the model.
        """
        raise self._lacks(Capability.DRAFT_HEADS)

    def guess(self, loaded: int, hidden: FloatArray, num_heads: int, num_top: int) -> IntArray:
        """Returns the ids that the first heads think likeliest, best first, [num_heads, num_rows, num_top] (DRAFT_HEADS).

        Args:
            hidden: after the final norm, [num_rows, hidden].
            num_top: at most the vocabulary.
        """
        raise self._lacks(Capability.DRAFT_HEADS)

    def move_positions(self, moves: IntArray) -> None:
        """Copies KV of single positions in every layer, bit for bit, in the order given (TREES).

        Args:
            moves: [num_moves, 2] int32: source and target; position p of a block b is b * block_size + p.
        """
        raise self._lacks(Capability.TREES)

    def accept_drafts(self, accepted: IntArray) -> None:  # noqa: B027 - KV of drafts is where it belongs
        """Lets the accepted drafts of the last step change states, and forgets the others; called after every step with drafts
        of a model whose layers have a state.

        Args:
            accepted: [num_accepted, 2] int32: token of that step's batch, parents before children, and block of its state.
        """

    def load_adapter(self, slot: int, adapter: AdapterWeights) -> None:
        """Puts an adapter in a slot; the one that was there is gone. Never called during a step (ADAPTERS)."""
        raise self._lacks(Capability.ADAPTERS)

    def unload_adapter(self, slot: int) -> None:
        """Empties a slot; an empty one changes nothing (ADAPTERS)."""
        raise self._lacks(Capability.ADAPTERS)

    def record(self) -> AbstractContextManager[list[OperatorSpan]]:
        """Records every step inside the context; the list is complete when the context ends (RECORDING).

        Outside of it a program keeps no times at all.
        """
        raise self._lacks(Capability.RECORDING)

    def _check(self, wants: Wants) -> None:
        if lacking := wants.needs & ~self.capabilities:
            raise self._lacks(lacking)

    def _lacks(self, capability: Capability) -> EngineError:
        return EngineError(f"{type(self).__name__} lacks the capability {capability.name}; ask its `capabilities` first")


def plan_cells(spec: DecoderSpec, kv: KVLayout, layer_bytes: Sequence[int]) -> CellLayout | None:
    """Returns the cells of a program; None where it cannot compute single layers: all of them must have KV of their own, in
    blocks of one size and one group, and one residual stream must be all that goes from one to the next.

    Args:
        layer_bytes: bytes of a block of each layer.
    """
    plain = all(layer.attention is not None and layer.state is None for layer in spec.layers)
    one_group = len(kv.groups) <= 1 and all(group.window is None and not group.is_state for group in kv.groups)
    if not (plain and one_group) or len(set(layer_bytes)) != 1 or not layer_bytes[0] or not kv.num_blocks:
        return None
    if spec.streams is not None or spec.merges_hidden or spec.vision is not None:
        return None
    residual_bytes = kv.block_size * spec.hidden_size * 4
    return CellLayout(len(spec.layers), kv.num_blocks, -(-residual_bytes // layer_bytes[0]), spec.hidden_size)


NO_RANGES: Final = (
    "--kv-layout virtual needs the back end native or torch on a CPU, a model whose layers all keep keys and values of every "
    "position (no windows, states or latents), and no --kv-dtype kivi2; leave it out"
)


def check_ranges(spec: DecoderSpec, kv: KVLayout) -> None:
    """Raises ConfigError where a layout has ranges, and KV of a decoder cannot have them."""
    if kv.ranges is None:
        return
    one_group = len(kv.groups) <= 1 and all(group.window is None and not group.is_state for group in kv.groups)
    if not (has_plain_kv(spec) and one_group):
        raise ConfigError(NO_RANGES, param="kv_layout")


def check_contents(block_ids: Sequence[int], sizes: Sequence[int], contents: Sequence[bytes | memoryview]) -> None:
    """Raises ValueError unless there are contents for each block, as many bytes as it has."""
    if len(contents) != len(block_ids) or any(len(each) != size for each, size in zip(contents, sizes, strict=False)):
        raise ValueError(f"blocks of {list(sizes)} bytes cannot hold contents of {[len(each) for each in contents]}")


class ImageEncoder(Protocol):
    """A vision tower with its weights, which a program may borrow from another back end."""

    def encode(self, image: ImageTile, check: Callable[[], None]) -> FloatArray:
        """Returns the embeddings of an image (`Program.encode_image`)."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory that a program needs, in bytes.

    Attributes:
        kv_block_bytes: of one block in every layer.
        kv_layer_bytes: of one block in each layer; empty where the program takes no groups of layers (`KVLayout.groups`).
        logit_row_bytes: of the logits of one position, where `activations_bytes` does not count them.
        available_bytes: free memory of the device that it is taken from; None is the memory of this machine.
        state_bytes: of a block that holds the state of every layer that has one.
        draft_bytes: of what layers with a state keep of one draft until it is accepted or forgotten.
        draft_state_bytes: of the copies of states that one node of the largest token tree of a step reads.
        recent_window: newest positions whose keys and values are kept unpacked too (`KVGroup.is_recent`); 0 for none.
        recent_layer_bytes: of one block of those in each layer.
        range_block_bytes: of one block in every layer, padded to whole pages, where sequences have address ranges
            (`KVLayout.ranges`); 0 where the program has none.
        mapped: names of the tensors that the program leaves mapped if they come as numbers, and `weights_bytes` does not count:
            tables of which it reads the rows of its tokens (`backends.lookup_tables`).
    """

    weights_bytes: int
    kv_block_bytes: int
    activations_bytes: int
    available_bytes: int | None = None
    logit_row_bytes: int = 0
    kv_layer_bytes: tuple[int, ...] = ()
    state_bytes: int = 0
    draft_bytes: int = 0
    draft_state_bytes: int = 0
    recent_window: int = 0
    recent_layer_bytes: tuple[int, ...] = ()
    range_block_bytes: int = 0
    mapped: tuple[str, ...] = ()

    @property
    def unpacked_block_bytes(self) -> int:
        """Bytes of one block in every layer of a cache without groups, where nothing is packed: that of a drafter."""
        return sum(self.recent_layer_bytes) or self.kv_block_bytes


class Backend(Protocol):
    """Builds programs.

    Attributes:
        fingerprint: back end, version, instruction set and number of the numerics, for `system_fingerprint`.
    """

    fingerprint: str

    def need(self, spec: DecoderSpec, weights: Weights, *, block_size: int, max_batched_tokens: int) -> MemoryNeed:
        """Says what `build` and `Program.step` will take, before anything is allocated."""
        ...

    def build(
        self, spec: DecoderSpec, weights: Weights, kv: KVLayout, *, identity: str | None = None, beside: Program | None = None
    ) -> Program:
        """Builds a program.

        Args:
            identity: names the very weights, for a back end that keeps what it made of them; None keeps nothing.
            beside: a program of this back end that lends its embedding and its head to a module without them
                (`DecoderSpec.merges_hidden`); None for any other decoder.
        """
        ...
