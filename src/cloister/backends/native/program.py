"""A decoder that runs on the native kernels: a step is one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np

from cloister.backends.adapters import AdapterWeights
from cloister.backends.base import (
    Capability,
    FloatArray,
    ForwardBatch,
    ImageEncoder,
    IntArray,
    KVGroup,
    KVLayout,
    MaskArray,
    Program,
    SamplingMetadata,
    StepOutput,
    Wants,
    plan_cells,
)
from cloister.backends.draft_heads import DraftHeads, HeadBlock
from cloister.backends.kivi import KIVI
from cloister.backends.kv_planes import KVPlane
from cloister.backends.native import _native
from cloister.backends.native.kv_planes import list_head_planes
from cloister.backends.native.memory import ByteArray, reserve
from cloister.backends.native.model import BESIDE, MERGE_NORMS, PackedModel, qk_norm_length
from cloister.backends.native.packing import PackedMatrix, Packer
from cloister.backends.native.rotation import row_orders
from cloister.backends.native.states import StateStore
from cloister.backends.native.streams import InputTable, bind_stream_layer, bind_streams
from cloister.backends.ranges import KVRanges, pad_block
from cloister.backends.recording import OperatorSpan
from cloister.backends.spec import (
    AnyAttentionSpec,
    AttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MlpSpec,
    MoeSpec,
    RopeSpec,
    ShortConvSpec,
    StateSpec,
)
from cloister.types.errors import ModelError
from cloister.types.images import ImageTile

# LoRA adapters for the native kernels, packed once when loaded, in the type of unquantized weights.


_SITES: Final = ("q", "k", "v", "o", "gate", "up", "down", "q_a", "q_b", "kv_a", "q_gate")  # cpp/lora.hpp


class NativeAdapters:
    """The adapters of one program, by slot; the kernels hold pointers into their arrays.

    Args:
        orders: as `rotation.row_orders` returns.
    """

    def __init__(self, program: _native.Program, packer: Packer, orders: Mapping[str, IntArray]) -> None:
        self._program, self._packer, self._orders = program, packer, orders
        self._held: dict[int, list[PackedMatrix]] = {}

    def load(self, slot: int, adapter: AdapterWeights) -> None:
        """Packs an adapter and puts it in a slot.

        Raises:
            ValueError: it does not fit the products of the program.
        """
        held: list[PackedMatrix] = []
        updates = []
        for product, pair in adapter.updates.items():
            _, layer, name = product.split(".")
            order = self._orders.get(f"{product}.weight")
            outputs = pair[1] if order is None else pair[1][order]
            a, b = (self._packer.join([matrix], [None]) for matrix in (pair[0], outputs))
            held += (a, b)
            updates.append((int(layer), _SITES.index(name), a.bind(), b.bind()))
        self._program.load_adapter(slot, updates)
        self._held[slot] = held

    def unload(self, slot: int) -> None:
        """Empties a slot."""
        self._program.unload_adapter(slot)
        self._held.pop(slot, None)


# Draft heads for the native kernels, packed once in the type of unquantized weights and computed in one call.


_HEAD_ACTIVATIONS: Final = {"silu": 0, "relu": 3}  # cpp/kernels.hpp


class DraftHeadStore:
    """The draft heads of one program; the kernels hold pointers into their arrays."""

    def __init__(self, program: _native.Program, packer: Packer) -> None:
        self._program, self._packer = program, packer
        self._held: list[PackedMatrix] = []

    def load(self, heads: DraftHeads) -> int:
        """Packs heads (`backends.base.Program.load_heads`)."""
        blocks = [self._pack(block, _HEAD_ACTIVATIONS[heads.activation]) for block in heads.blocks]
        return self._program.load_heads([list(of_one_head) for of_one_head in zip(*blocks, strict=True)])

    def _pack(self, block: HeadBlock, activation: int) -> list[_native.FeedForward]:
        ups = [self._join(up, bias) for up, bias in zip(block.up, block.up_bias, strict=True)]
        biases = [None] * len(block.down) if block.down_bias is None else list(block.down_bias)
        downs = [self._join(down, bias) for down, bias in zip(block.down, biases, strict=True)]
        if len(ups) == 1:
            ups *= len(downs)
        return [
            _native.FeedForward(up=up, down=down, activation=activation, gated=False)
            for up, down in zip(ups, downs, strict=True)
        ]

    def _join(self, matrix: FloatArray, bias: FloatArray | None) -> _native.Matrix:
        packed = self._packer.join([matrix], [bias])
        self._held.append(packed)
        return packed.bind()

    def guess(self, loaded: int, hidden: FloatArray, num_heads: int, num_top: int) -> IntArray:
        """Computes heads (`backends.base.Program.guess`)."""
        top = np.empty((num_heads * len(hidden), num_top), np.int32)
        self._program.guess(loaded, hidden, num_heads, top)
        return top.reshape(num_heads, len(hidden), num_top)


KV_KINDS: Final[Mapping[str, int]] = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3, KIVI: 4}
_ACTIVATIONS: Final[Mapping[str, int]] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}


def kv_block_bytes(attention: AnyAttentionSpec, kv_dtype: str, block_size: int) -> int:
    """Returns the bytes of a block of one layer's cache; none where it reads an earlier layer's."""
    if isinstance(attention, AttentionSpec) and attention.shared_kv is not None:
        return 0
    shape = attention.num_kv_heads, attention.head_dim, _value_dim(attention)
    return _native.kv_block_bytes(KV_KINDS[kv_dtype], *shape, block_size)


def range_block_bytes(spec: DecoderSpec, kv_dtype: str, block_size: int) -> int:
    """Returns the bytes of a block of all layers where sequences have address ranges (`MemoryNeed.range_block_bytes`)."""
    attentions = [layer.attention for layer in spec.layers if layer.attention is not None]
    return pad_block(sum(kv_block_bytes(attention, kv_dtype, block_size) for attention in attentions))


def _shape(attention: AnyAttentionSpec) -> tuple[int, int, int, int, int]:
    heads = attention.num_heads, attention.num_kv_heads, attention.head_dim
    return *heads, _value_dim(attention), attention.window or 0


def _growth(attention: AnyAttentionSpec | None) -> tuple[float, int, int]:
    growth = attention.query_growth if isinstance(attention, AttentionSpec) else None
    return (0.0, 0, 0) if growth is None else (growth.beta, growth.period, growth.first)


def _value_dim(attention: AnyAttentionSpec) -> int:
    """Returns how many first numbers of a key are its value; 0 where keys and values are apart."""
    return attention.kv_lora_rank if isinstance(attention, LatentAttentionSpec) else 0


def _scales(layer: LayerSpec) -> tuple[float, float]:
    """Returns what multiplies the inputs and the outputs of a layer's mixer, attention or state."""
    mixer = layer.state if layer.attention is None else layer.attention
    return (mixer.input_scale, mixer.output_scale) if isinstance(mixer, AttentionSpec | Mamba2Spec) else (1.0, 1.0)


class LayerCache(NamedTuple):
    """KV or states of a layer.

    Attributes:
        layer: its number; a layer with both has two caches.
        cache: [num_blocks, bytes of a block].
        blocks: their numbers.
        attention: what reads it, if it holds KV of all positions.
    """

    layer: int
    cache: ByteArray
    blocks: range
    attention: AnyAttentionSpec | None = None


class NativeProgram(Program):
    """A packed model with its KV cache; has every capability but ASYNCHRONOUS and ENCODER, IMAGES only with a tower, and
    LAYERWISE only where `plan_cells` finds cells.

    Args:
        kernels: the instruction set, one of `_native.kernel_names()`.
        kv_dtype: one of `KV_KINDS`.
        packer: packs adapters and draft heads.
        encoder: encodes images; None for a model that takes none.
        table: inputs of layers by token, of a model with several residual streams.
        beside: lends its embedding and head to a module without them; None for any other decoder.

    Raises:
        ModelError: experts of one layer are in several number formats.
    """

    capabilities = ~(Capability.ASYNCHRONOUS | Capability.ENCODER | Capability.IMAGES | Capability.LAYERWISE)

    def __init__(
        self,
        spec: DecoderSpec,
        model: PackedModel,
        kv: KVLayout,
        *,
        kernels: str,
        pool: _native.Pool,
        kv_dtype: str,
        packer: Packer,
        encoder: ImageEncoder | None = None,
        table: InputTable | None = None,
        beside: NativeProgram | None = None,
    ) -> None:
        self._encoder = encoder
        if encoder is not None:
            self.capabilities |= Capability.IMAGES
        self._model: PackedModel = model if beside is None else model.borrow_ends(beside._model)
        self._table = table  # the kernels hold pointers into their arrays
        self._streams = spec.streams
        self._program = _native.Program(kernels, pool, spec.vocab_size, spec.hidden_size, spec.norm_eps)
        self._vocab_size, self._hidden_size = spec.vocab_size, spec.hidden_size
        self._adapters = NativeAdapters(self._program, packer, row_orders(spec))
        self._heads = DraftHeadStore(self._program, packer)
        self._set_ends(spec)
        self._num_layers = len(spec.layers)
        self._kv_dtype, self._block_size = kv_dtype, kv.block_size
        self._caches: list[LayerCache] = []
        self._recent: dict[int, ByteArray] = {}  # by layer, the cache of its newest keys
        self._shared_kv: dict[int, int] = {}  # by layer, the one whose cache it reads
        self._ones: list[FloatArray] = []  # weights of norms that have none
        if kv.ranges is not None:
            self.ranges = KVRanges(kv.ranges, kv.num_blocks, range_block_bytes(spec, kv_dtype, kv.block_size))
        self._num_range_bytes = 0  # of a block, in the layers so far
        self._range_starts: dict[int, int] = {}  # by layer, where it begins in a block
        self._cells = None if self.ranges else self._make_cells(spec, kv, kv_dtype)
        self._states = StateStore(kv)
        self._has_states = any(layer.state is not None for layer in spec.layers)
        if spec.streams is not None and table is not None:
            bind_streams(self._program, spec.streams, model.matrices, model.vectors, table)
        first = 0
        groups = (KVGroup(self.ranges.num_addresses),) if self.ranges else kv.groups or (KVGroup(kv.num_blocks),)
        for group in groups:
            self._program.add_group(
                first_block=first,
                num_blocks=group.num_blocks,
                window=group.window or 0,
                is_state=group.is_state,
                is_recent=group.is_recent,
            )
            first += group.num_blocks
        ropes: dict[RopeSpec, int] = {}
        for number, layer in enumerate(spec.layers):
            rope = None if layer.attention is None else layer.attention.rope
            if rope is not None and rope not in ropes:
                ropes[rope] = len(ropes)
                self._program.add_rope(list(rope.inv_freq), rope.attention_scale, list(rope.axes))
            self._add_layer(layer, number, -1 if rope is None else ropes[rope], kv, kv_dtype)
        caches = [(each.cache, each.blocks.start, each.blocks.stop) for each in self._caches]
        self._copies = _native.KVCopies(caches)

    def _set_ends(self, spec: DecoderSpec) -> None:
        matrices, vectors = self._model.matrices, self._model.vectors
        head = matrices.get("head", matrices["embedding"])
        if "head.bias" in vectors:
            head = replace(head, parts={**head.parts, "bias": vectors["head.bias"]})
        self._program.set_ends(
            embedding=matrices["embedding"].bind(),
            head=head.bind(),
            norm=_native.Norm(weight=vectors["norm.weight"], bias=vectors.get("norm.bias")),
            positions=matrices["positions"].bind() if spec.position_embeddings else None,
            centres=spec.norm == "layer",
            embedding_scale=spec.embedding_scale,
            logit_scale=spec.logit_scale,
            logit_softcap=spec.logit_softcap or 0.0,
        )
        if spec.merges_hidden:
            norms = [_native.Norm(weight=vectors[f"{name}.weight"], bias=vectors.get(f"{name}.bias")) for name in MERGE_NORMS]
            self._program.set_merge(merge=matrices["merge"].bind(), embedding_norm=norms[0], hidden_norm=norms[1])

    def _add_layer(self, layer: LayerSpec, number: int, rope: int, kv: KVLayout, kv_dtype: str) -> None:
        """Adds a layer; a state beside attention is a layer of its own there, which has no other part."""
        if layer.attention is not None and layer.state is not None:
            self._add_parts(replace(layer, state=None), number, rope, kv, kv_dtype)
            self._add_parts(replace(layer, attention=None, mlp=None), number, -1, kv, kv_dtype, beside=True)
        else:
            self._add_parts(layer, number, rope, kv, kv_dtype)

    def _add_parts(
        self, layer: LayerSpec, number: int, rope: int, kv: KVLayout, kv_dtype: str, *, beside: bool = False
    ) -> None:
        attention, matrices, vectors = layer.attention, self._model.matrices, self._model.vectors
        prefix = f"layers.{number}."
        mixer = prefix + BESIDE if beside else prefix
        cache: ByteArray | None = None
        recent: ByteArray | None = None
        shared = attention.shared_kv if isinstance(attention, AttentionSpec) else None
        if attention is not None:
            if shared is None:
                cache = self._make_cache(attention, number, kv, kv_dtype)
                self._caches.append(LayerCache(number, cache, kv.blocks_of(number), attention))
                if kv_dtype == KIVI:
                    recent = self._recent[number] = self._make_recent_cache(attention, kv)
                    self._caches.append(LayerCache(number, recent, kv.recent_blocks))
            else:
                cache = next(each.cache for each in self._caches if each.layer == shared)
                recent = self._recent.get(shared)
                self._shared_kv[number] = shared
        elif layer.state is not None:
            cache = self._states.add_layer(layer.state)
            self._caches.append(LayerCache(number, cache, kv.state_blocks))
        self._program.add_layer(
            shape=(0, 0, 0, 0, 0) if attention is None else _shape(attention),
            scale=1.0 if attention is None else attention.scale,
            softcap=(attention and attention.softcap) or 0.0,
            rope=rope,
            qkv=matrices[f"{mixer}qkv"].bind() if layer.mixes else None,
            latent=self._latent(attention, prefix) if isinstance(attention, LatentAttentionSpec) else None,
            short_conv=self._convolution(layer.state, prefix),
            mamba2=self._mamba2(layer.state, prefix) if isinstance(layer.state, Mamba2Spec) else None,
            delta_net=self._delta_net(layer.state, prefix, mixer) if isinstance(layer.state, GatedDeltaNetSpec) else None,
            gated=isinstance(attention, AttentionSpec) and attention.gated,
            output=matrices[f"{mixer}output"].bind() if layer.mixes else None,
            scales=_scales(layer),
            mlp=self._feed_forward(layer.mlp, prefix) if isinstance(layer.mlp, MlpSpec) else None,
            mixture=self._mixture(layer.mlp, prefix) if isinstance(layer.mlp, MoeSpec) else None,
            attention_norm=self._norm(f"{prefix}attention_norm"),
            mlp_norm=self._norm(f"{prefix}mlp_norm"),
            attention_post_norm=self._norm(f"{prefix}attention_post_norm"),
            mlp_post_norm=self._norm(f"{prefix}mlp_post_norm"),
            q_norm=self._qk_norm(attention, f"{prefix}q_norm", attention.num_heads if attention else 0),
            k_norm=self._qk_norm(attention, f"{prefix}k_norm", attention.num_kv_heads if attention else 0),
            v_norm=self._make_ones(attention.head_dim) if isinstance(attention, AttentionSpec) and attention.v_norm else None,
            shares_kv=isinstance(attention, AttentionSpec) and attention.shared_kv is not None,
            stream=self._stream_layer(prefix),
            norms_projection=isinstance(attention, AttentionSpec) and attention.qk_norm_over == "projection",
            sinks=vectors.get(f"{prefix}attention.sinks"),
            chunked=isinstance(attention, AttentionSpec) and attention.chunked,
            growth=_growth(attention),
            parallel=layer.parallel,
            residual_scale=layer.residual_scale,
            cache=None if cache is None else self._bind_cache(cache, number if shared is None else shared),
            block_stride=0 if self.ranges is None else self.ranges.stride,
            recent_cache=None if recent is None else recent.reshape(-1),
            kv_kind=KV_KINDS[kv_dtype],
            block_size=kv.block_size,
            group=kv.group_of(number),
            beside=beside,
        )

    def _make_cells(self, spec: DecoderSpec, kv: KVLayout, kv_dtype: str) -> ByteArray | None:
        """Returns the caches of all layers one after the other, if single layers can use them: [num_cells, bytes of one]."""
        attentions = [layer.attention for layer in spec.layers]
        sizes = [0 if each is None else kv_block_bytes(each, kv_dtype, kv.block_size) for each in attentions]
        self.cells = plan_cells(spec, kv, sizes)
        if self.cells is None:
            return None
        self.capabilities |= Capability.LAYERWISE
        num_cells = self.cells.num_layers * self.cells.num_blocks
        return reserve(sizes[0] * num_cells, streamed=False).reshape(num_cells, sizes[0])

    def _make_cache(self, attention: AnyAttentionSpec, number: int, kv: KVLayout, kv_dtype: str) -> ByteArray:
        if self._cells is not None:
            return self._cells[number * kv.num_blocks : (number + 1) * kv.num_blocks]
        if self.ranges is not None:
            first = self._range_starts[number] = self._num_range_bytes
            self._num_range_bytes += kv_block_bytes(attention, kv_dtype, kv.block_size)
            return self.ranges.memory[: kv.num_blocks, first : self._num_range_bytes]
        num_empty = 1 if kv.groups and kv.groups[kv.group_of(number)].window else 0  # stands for what is behind the window
        num_blocks = len(kv.blocks_of(number)) + num_empty
        block_bytes = kv_block_bytes(attention, kv_dtype, kv.block_size)
        return reserve(block_bytes * num_blocks, streamed=False).reshape(num_blocks, block_bytes)

    def _bind_cache(self, cache: ByteArray, layer: int) -> ByteArray:
        """Returns the memory that the kernels read as a layer's cache: with ranges all addresses, from the layer's first on."""
        return cache.reshape(-1) if self.ranges is None else self.ranges.memory.reshape(-1)[self._range_starts[layer] :]

    def _make_recent_cache(self, attention: AnyAttentionSpec, kv: KVLayout) -> ByteArray:
        num_blocks, block_bytes = len(kv.recent_blocks) + 1, kv_block_bytes(attention, "bfloat16", kv.block_size)
        return reserve(block_bytes * num_blocks, streamed=False).reshape(num_blocks, block_bytes)

    def _convolution(self, state: StateSpec | None, prefix: str) -> _native.ShortConv | None:
        if state is None:
            return None
        vectors, blocks = self._model.vectors, self._states.blocks
        return _native.ShortConv(
            filters=vectors[f"{prefix}mixer.conv.weight"],
            bias=vectors.get(f"{prefix}mixer.conv.bias"),
            shape=(state.kernel_size, state.size if isinstance(state, ShortConvSpec) else state.conv_size),
            blocks=(blocks.start, len(blocks)),
        )

    def _mamba2(self, mamba: Mamba2Spec, prefix: str) -> _native.Mamba2:
        vectors = self._model.vectors
        return _native.Mamba2(
            shape=(mamba.num_heads, mamba.head_dim, mamba.num_groups, mamba.d_state),
            dt_limits=mamba.time_step_limit,
            a_log=vectors[f"{prefix}mixer.A_log"],
            skip=vectors[f"{prefix}mixer.D"],
            dt_bias=vectors[f"{prefix}mixer.dt_bias"],
            norm=vectors.get(f"{prefix}mixer.norm.weight"),
            norms_before_gate=mamba.norm == "before_gate",
            activation=_ACTIVATIONS[mamba.activation],
            scales=mamba.section_scales,
        )

    def _qk_norm(self, attention: AnyAttentionSpec | None, name: str, num_heads: int) -> FloatArray | None:
        if isinstance(attention, AttentionSpec) and attention.qk_norm and not attention.qk_norm_weighted:
            return self._make_ones(qk_norm_length(attention, num_heads))
        return self._model.vectors.get(f"{name}.weight")

    def _make_ones(self, length: int) -> FloatArray:
        self._ones.append(np.ones(length, np.float32))
        return self._ones[-1]

    def _stream_layer(self, prefix: str) -> _native.StreamLayer | None:
        if self._streams is None:
            return None
        return bind_stream_layer(self._streams, self._hidden_size, prefix, self._model.matrices, self._model.vectors)

    def _delta_net(self, net: GatedDeltaNetSpec, prefix: str, mixer: str) -> _native.DeltaNet:
        vectors = self._model.vectors
        return _native.DeltaNet(
            steps=self._model.matrices[f"{mixer}steps"].bind(),
            shape=(net.num_key_heads, net.num_value_heads, net.key_head_dim, net.value_head_dim),
            a_log=vectors[f"{prefix}mixer.A_log"],
            dt_bias=vectors[f"{prefix}mixer.dt_bias"],
            norm=vectors[f"{prefix}mixer.norm.weight"],
            activation=_ACTIVATIONS[net.activation],
        )

    def _norm(self, name: str) -> _native.Norm | None:
        weight = self._model.vectors.get(f"{name}.weight")
        return None if weight is None else _native.Norm(weight=weight, bias=self._model.vectors.get(f"{name}.bias"))

    def _latent(self, attention: LatentAttentionSpec, prefix: str) -> _native.Latent:
        matrices, vectors = self._model.matrices, self._model.vectors
        return _native.Latent(
            queries=None if attention.q_lora_rank is None else matrices[f"{prefix}queries"].bind(),
            absorb=matrices[f"{prefix}absorb"].bind(),
            expand=matrices[f"{prefix}expand"].bind(),
            query_norm=vectors.get(f"{prefix}q_a_norm.weight"),
            key_norm=vectors[f"{prefix}kv_a_norm.weight"],
            eps=attention.latent_norm_eps,
            sizes=(
                attention.num_heads,
                attention.qk_nope_head_dim,
                attention.qk_rope_head_dim,
                attention.kv_lora_rank,
                attention.v_head_dim,
            ),
        )

    def _feed_forward(self, mlp: MlpSpec, prefix: str) -> _native.FeedForward:
        matrices = self._model.matrices
        return _native.FeedForward(
            up=matrices[f"{prefix}up"].bind(),
            down=matrices[f"{prefix}down"].bind(),
            activation=_ACTIVATIONS[mlp.activation],
            gated=mlp.gated,
            scales=(mlp.gate_scale, mlp.output_scale),
            clipping=(0.0, 0.0) if mlp.clipped is None else (mlp.clipped.alpha, mlp.clipped.limit),
            sparse=NormalDist().inv_cdf(mlp.sparsity) if mlp.sparsity else None,
        )

    def _mixture(self, mlp: MoeSpec, prefix: str) -> _native.Mixture:
        prefixes = [f"{prefix}experts.{number}." for number in range(mlp.num_experts)]
        for name in ("up", "down"):
            if len({self._model.matrices[f"{each}{name}"].kind for each in prefixes}) > 1:
                raise ModelError(
                    f"{prefix}experts are in several number formats; write the checkpoint with one for all of them"
                )
        return _native.Mixture(
            router=self._model.matrices[f"{prefix}router"].bind(),
            experts=[self._feed_forward(mlp.expert, each) for each in prefixes],
            routing=_native.Routing(
                num_experts=mlp.num_experts,
                num_chosen=mlp.num_chosen,
                renormalize=mlp.renormalize,
                sigmoid=mlp.scoring == "sigmoid",
                correction=self._model.vectors.get(f"{prefix}router.e_score_correction_bias"),
                groups=(mlp.num_groups, mlp.num_chosen_groups, mlp.num_group_scores),
                scale=mlp.routed_scale,
            ),
            shared=self._feed_forward(mlp.shared, f"{prefix}shared.") if mlp.shared else None,
            shared_gate=mlp.shared_gate,
            weighs_inputs=mlp.weigh_inputs,
        )

    def step(self, batch: ForwardBatch, wants: Wants) -> StepOutput:
        """Computes one step in one native call, masks apart: they are asked for between its forward and its choice.

        Programs of one back end take turns, whole steps, whichever thread they are called from; a step with masks is not for
        several callers of one program at once.

        Raises:
            ValueError: the arrays do not fit together, or a number in them leads out of another; nothing was written.
        """
        arrays, num_rows = _arrays(batch, self._states if self._has_states else None), len(batch.logit_rows)
        if wants.sampling is not None:
            output = StepOutput(tokens=np.empty(len(wants.sampling), np.int32))
            entries = wants.sampling.view(np.uint8)
            if wants.masks is not None:
                self._program.forward_keep(*arrays)  # the logits stay in the program's own buffers
                self._program.draw_kept(entries, wants.masks(), output.tokens)
            elif wants.num_top:
                output.top = np.empty((num_rows, wants.num_top), np.int32)
                self._program.forward_watched(*arrays, entries, output.tokens, output.top)
            else:
                self._program.forward_draw(*arrays, entries, output.tokens)
        elif wants.greedy:
            output = StepOutput(tokens=np.empty(num_rows, np.int32))
            self._program.forward_best(*arrays, output.tokens)
        elif wants.logits:
            output = StepOutput(logits=np.empty((num_rows, self._vocab_size), np.float32))
            self._program.forward(*arrays, output.logits)
            if wants.num_top:
                output.top = self.find_top(output.logits, wants.num_top)
        else:
            output = StepOutput(hidden=np.empty((num_rows, self._hidden_size), np.float32))
            self._program.forward_hidden(*arrays, output.hidden)
            if not wants.hidden:
                output = StepOutput()
        if wants.every_hidden:
            output.hidden = np.empty((len(batch.token_ids), self._hidden_size), np.float32)
            self._program.read_every_hidden(output.hidden)
        elif wants.hidden and not len(output.hidden):
            output.hidden = np.empty((num_rows, self._hidden_size), np.float32)
            self._program.read_hidden(output.hidden)
        return output

    def find_top(self, logits: FloatArray, num_top: int) -> IntArray:
        """Returns the ids of each row's largest logits, [num_rows, num_top], best first; -1 in a row that is not finite.

        Raises:
            ValueError: `num_top` is more than the vocabulary has.
        """
        top = np.empty((len(logits), num_top), np.int32)
        self._program.find_top(logits, top)
        return top

    def project(self, hidden: FloatArray) -> FloatArray:
        """Returns logits [num_rows, vocab] of hidden states after the final norm, [num_rows, hidden]."""
        logits = np.empty((len(hidden), self._vocab_size), np.float32)
        self._program.project(hidden, logits)
        return logits

    def load_heads(self, heads: DraftHeads) -> int:
        """Packs draft heads."""
        return self._heads.load(heads)

    def guess(self, loaded: int, hidden: FloatArray, num_heads: int, num_top: int) -> IntArray:
        """Returns the likeliest ids of each head, [num_heads, num_rows, num_top]."""
        return self._heads.guess(loaded, hidden, num_heads, num_top)

    def sample(self, logits: FloatArray, sampling: SamplingMetadata) -> IntArray:
        """Chooses tokens from logits [num_rows, vocab]; -1 where there is none to choose."""
        tokens = np.empty(len(sampling), np.int32)
        self._program.draw(logits, sampling.view(np.uint8), tokens)
        return tokens

    def sample_masked(self, logits: FloatArray, sampling: SamplingMetadata, masks: MaskArray) -> IntArray:
        """As a step with masks, from logits; -1 where a mask leaves no token or a logit of the row is not a finite number."""
        tokens = np.empty(len(sampling), np.int32)
        self._program.draw_masked(logits, sampling.view(np.uint8), masks, tokens)
        return tokens

    def encode_image(self, image: ImageTile, check: Callable[[], None] = lambda: None) -> FloatArray:
        """Returns the embeddings of an image (`backends.base.Program.encode_image`)."""
        return super().encode_image(image, check) if self._encoder is None else self._encoder.encode(image, check)

    def load_adapter(self, slot: int, adapter: AdapterWeights) -> None:
        """Packs an adapter and puts it in a slot."""
        self._adapters.load(slot, adapter)

    def unload_adapter(self, slot: int) -> None:
        """Empties a slot."""
        self._adapters.unload(slot)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, target) in every layer."""
        for _, cache, blocks, _ in self._caches:
            for source, target in pairs:
                if source in blocks:
                    cache[target - blocks.start] = cache[source - blocks.start]

    def wipe_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrites blocks with zeros in every layer."""
        self._copies.wipe(list(block_ids))

    def export_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Returns the contents of each block, layer after layer."""
        return self._copies.export(list(block_ids))

    def list_planes(self, block: int) -> list[KVPlane]:
        """Returns where the numbers of a block lie in its contents; none where they are not all keys and values as they are."""
        if self._kv_dtype not in ("float32", "bfloat16"):
            return []
        planes: list[KVPlane] = []
        offset, number_bytes = 0, 4 if self._kv_dtype == "float32" else 2
        for _, _, blocks, attention in self._caches:
            if block not in blocks:
                continue
            if attention is None:
                return []
            has_values = not _value_dim(attention)
            for _ in range(attention.num_kv_heads):
                planes += list_head_planes(
                    -(-attention.head_dim // 32) * 32,
                    self._block_size,
                    number_bytes,
                    has_values=has_values,
                    offset=offset,
                )
                offset = sum(plane.num_bytes for plane in planes)
        return planes

    def import_blocks(self, block_ids: Sequence[int], contents: Sequence[bytes | memoryview]) -> None:
        """Overwrites blocks with contents that `export_blocks` returned."""
        self._copies.import_(list(block_ids), contents)

    def read_cells(self, cells: IntArray) -> ByteArray:
        """Returns a copy of what cells hold, [num_cells, bytes of a cell]."""
        return super().read_cells(cells) if self._cells is None else self._cells[cells]

    def write_cells(self, cells: IntArray, contents: ByteArray) -> None:
        """Overwrites cells."""
        if self._cells is None:
            raise self._lacks(Capability.LAYERWISE)
        self._cells[cells] = contents

    def move_positions(self, moves: IntArray) -> None:
        """Copies KV of single positions in every layer, bit for bit.

        Raises:
            ValueError: the cache does not have a position; nothing was copied.
        """
        self._program.move_positions(moves)

    def accept_drafts(self, accepted: IntArray) -> None:
        """Lets accepted drafts change states."""
        self._program.accept_drafts(accepted)

    @property
    def num_layers(self) -> int:
        return self._num_layers

    def read_block(self, layer: int, block: int) -> bytes:
        """Returns the bytes of one block that a layer reads, for who checks what blocks hold; none where it has none."""
        owner = self._shared_kv.get(layer, layer)
        return b"".join(
            bytes(cache[block - blocks.start])
            for number, cache, blocks, _ in self._caches
            if number == owner and block in blocks
        )

    def wipe_buffers(self) -> None:
        """Overwrites activations, logits and scratch of all steps so far with zeros; as quick as what there is to overwrite."""
        self._program.wipe()

    @contextmanager
    def record(self) -> Iterator[list[OperatorSpan]]:
        """Records every step inside the context; the list is complete when the context ends."""
        spans: list[OperatorSpan] = []
        self._program.record(True)
        try:
            yield spans
        finally:
            spans.extend(OperatorSpan(*span) for span in self._program.spans())
            self._program.record(False)

    @property
    def num_phases(self) -> int:
        """Lists of tasks that the team was given so far."""
        return self._program.num_phases

    @property
    def buffer_bytes(self) -> int:
        """Bytes of activations and scratch, as of the largest step so far."""
        return self._program.buffer_bytes


_Arrays = tuple[
    IntArray, IntArray, IntArray, IntArray, IntArray, IntArray, IntArray | None, IntArray | None, IntArray | None,
    FloatArray | None, IntArray | None, IntArray | None, IntArray | None, FloatArray | None, int, FloatArray | None,
    IntArray | None, FloatArray | None,
]  # fmt: skip


def _arrays(batch: ForwardBatch, states: StateStore | None) -> _Arrays:
    tables = batch.block_tables
    return (
        batch.token_ids,
        batch.positions,
        batch.query_starts,
        batch.context_lens,
        tables if tables.flags.c_contiguous else np.ascontiguousarray(tables),
        batch.logit_rows,
        batch.parents,
        batch.adapters,
        batch.state_spans if states is None or batch.state_spans is not None else states.spans(batch),
        batch.embeddings,
        batch.embedding_rows,
        batch.rope_positions,
        batch.last_seen,
        batch.hidden,
        batch.layer,
        batch.residual,
        batch.document_ranges,
        batch.document_weights,
    )
