"""A decoder that runs: weights, KV cache and the forward pass of one step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cloister.backends.adapters import AdapterWeights
from cloister.backends.base import (
    ByteArray,
    Capability,
    FloatArray,
    ForwardBatch,
    IntArray,
    KVLayout,
    Program,
    StepOutput,
    Wants,
    Weights,
    check_contents,
    plan_cells,
)
from cloister.backends.kv_planes import KVPlane
from cloister.backends.ranges import KVRanges, pad_position
from cloister.backends.recording import OperatorSpan, Watched, watch
from cloister.backends.spec import AnyAttentionSpec, AttentionSpec, DecoderSpec, LatentAttentionSpec, QueryGrowth, kv_size
from cloister.backends.tensors import dequantized
from cloister.backends.torch.adapters import RowAdapters, TorchAdapters
from cloister.backends.torch.attention import attend, attention_tiles, split_widths
from cloister.backends.torch.cache import KVCache, RangedKVCache, export_rows, import_rows, slot_layout
from cloister.backends.torch.decoder import DecoderLayer
from cloister.backends.torch.layers import RopeTable, cap, on_whole_vectors
from cloister.backends.torch.linear import common_tiles, pad_rows
from cloister.backends.torch.packing import StepBlocks, TwoForms, match_blocks
from cloister.backends.torch.reading import WeightReader, to_torch
from cloister.backends.torch.schedule import (
    AttentionShape,
    KeySlots,
    Team,
    UnitBatch,
    of_group,
    schedule_units,
    token_slots,
    use_one_thread_per_operation,
)
from cloister.backends.torch.sparse_index import choose_positions
from cloister.backends.torch.states import States, StateStep
from cloister.backends.torch.streams import Streams, make_layer
from cloister.backends.torch.trees import TreeNode, unfold
from cloister.backends.torch.vision import open_tower
from cloister.types.images import ImageTile

# Operator spans: methods are wrapped only while they are recorded.


def record(program: object, module: ModuleType, layers: Iterable[DecoderLayer]) -> AbstractContextManager[list[OperatorSpan]]:
    """Records a program's calls (`backends.base.Program.record`).

    Args:
        module: where the program finds `attend`; every program of the process finds it there.
    """
    return watch(_list_calls(program, module, layers))


def _list_calls(program: object, module: ModuleType, layers: Iterable[DecoderLayer]) -> Iterator[Watched]:
    yield Watched(program, "_embed", "embed")
    yield Watched(program, "_schedule", "schedule")
    yield Watched(program, "_choose", "index")
    yield Watched(module, "attend", "attention")
    yield Watched(program, "_advance", "state")
    yield Watched(program, "_logits", "head")
    for layer in layers:
        yield Watched(layer, "project", "norm+qkv+rope")
        yield Watched(layer, "finish", "output+mlp_norm+gate_up+down")


_CHUNK = 128  # rows; a multiple of the reference tile


class TorchProgram(Program):
    """Interprets a DecoderSpec.

    The residual stream, norms, rotation, attention and the choice of experts are float32; products with weights, and the KV
    cache, are of `dtype`. Embeddings of tokens and positions stay where `weights` maps them, and a step reads its rows.
    """

    capabilities = (
        Capability.HIDDEN | Capability.HEAD | Capability.TREES | Capability.ADAPTERS | Capability.RECORDING
        | Capability.EVERY_HIDDEN | Capability.KV_TRANSFER | Capability.DOCUMENT_WEIGHTS
    )  # fmt: skip

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        kv: KVLayout,
        *,
        team: Team,
        dtype: torch.dtype,
        device: torch.device,
        beside: TorchProgram | None = None,
    ) -> None:
        use_one_thread_per_operation()
        reader = WeightReader(weights, dtype, device, team)
        self._spec, self._team, self._device = spec, team, device
        self._merge = HiddenMerge(spec, reader) if spec.merges_hidden else None
        self._embedding: npt.NDArray[Any] = dequantized(weights.read("embed.weight")) if beside is None else beside._embedding
        self._learned = dequantized(weights.read("positions.weight")) if spec.position_embeddings else None
        self._streams = None if spec.streams is None else Streams(spec, spec.streams, weights, reader)
        self._layers = [make_layer(spec, number, reader) for number in range(len(spec.layers))]
        self._norm = reader.norm("norm", spec)
        if beside is None:
            self._head = reader.linear("embed" if spec.tied_embeddings else "head", bias=False)
            self._head_bias = reader.vector("head.bias") if spec.head_bias else None
        else:
            self._head, self._head_bias = beside._head, beside._head_bias
        self.linears = [self._head, *(linear for layer in self._layers for linear in layer.linears)]
        if self._merge is not None:
            self.linears.append(self._merge.linear)
        if self._streams is not None:
            self.linears += self._streams.linears
        self._tiles = common_tiles(*(linear.tiles for linear in self.linears))
        ropes = {layer.attention.rope for layer in spec.layers if layer.attention is not None} - {None}
        self._ropes = {rope: RopeTable(rope, device) for rope in ropes if rope is not None}
        attentions = [layer.attention for layer in spec.layers]
        owned = [each is not None and kv_layer(each, number) == number for number, each in enumerate(attentions)]
        sizes = [kv_size(each) if each is not None and own else 0 for each, own in zip(attentions, owned, strict=True)]
        if kv.ranges is not None:
            stride = range_block_bytes(spec, kv.block_size, dtype)
            self.ranges = KVRanges(kv.ranges, kv.num_blocks, stride)
        elif device.type == "cpu":
            self.cells = plan_cells(spec, kv, [kv.block_size * size * dtype.itemsize for size in sizes])
        if self.cells is not None:
            self.capabilities |= Capability.LAYERWISE
        self._cache = (
            KVCache(kv, attentions, dtype, device, self.cells)
            if self.ranges is None
            else RangedKVCache(kv, attentions, dtype, self.ranges)
        )
        specs = {number: layer.state for number, layer in enumerate(spec.layers) if layer.state is not None}
        self._mixers = {number: layer.mixer for number, layer in enumerate(self._layers) if layer.mixer is not None}
        self._states = States(kv, specs, team, device) if specs else None
        self._adapters = TorchAdapters(spec, team, dtype, device)
        self._vision = None if spec.vision is None else open_tower(spec.vision, reader)
        if self._vision is not None:
            self.capabilities |= Capability.IMAGES

    @torch.no_grad()
    def step(self, batch: ForwardBatch, wants: Wants) -> StepOutput:
        """Computes one step (`backends.base.Program.step`)."""
        self._check(wants)
        num_rows, output = len(batch.logit_rows), StepOutput()
        computed = self._compute(batch) if batch.token_ids.size else self._embed(batch, 0)
        normed = self._choose_normed(computed, batch)
        if wants.hidden:
            output.hidden = normed[:num_rows].cpu().numpy()
        if wants.every_hidden:
            output.hidden = self._finish_rows(computed)[: len(batch.token_ids)].cpu().numpy()
        if wants.logits and num_rows:
            output.logits = self._logits(normed)[:num_rows].cpu().numpy()
        elif wants.logits:
            output.logits = np.empty((0, self._spec.vocab_size), np.float32)
        return output

    @torch.no_grad()
    def project(self, hidden: FloatArray) -> FloatArray:
        """Returns logits [num_rows, vocab] of hidden states [num_rows, hidden]."""
        use_one_thread_per_operation()
        if len(hidden) == 0:
            return np.empty((0, self._spec.vocab_size), np.float32)
        rows = torch.zeros(pad_rows(len(hidden), self._tiles), self._spec.hidden_size, device=self._device)
        rows[: len(hidden)] = torch.from_numpy(hidden)
        logits: FloatArray = self._logits(rows)[: len(hidden)].cpu().numpy()
        return logits

    def encode_image(self, image: ImageTile, check: Callable[[], None] = lambda: None) -> FloatArray:
        """Returns the embeddings of an image (`backends.base.Program.encode_image`)."""
        return super().encode_image(image, check) if self._vision is None else self._vision.encode(image, check)

    def move_positions(self, moves: IntArray) -> None:
        """Copies KV of single positions in every layer."""
        self._cache.move(moves)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, target) in every layer."""
        self._cache.copy(pairs)
        if self._states is not None:
            self._states.cache.copy(pairs)

    def wipe_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrites blocks with zeros in every layer."""
        self._cache.wipe(block_ids)
        if self._states is not None:
            self._states.cache.wipe(block_ids)

    def export_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Returns the contents of each block, layer after layer; states after KV."""
        return [export_rows(self._rows(block)) for block in block_ids]

    def list_planes(self, block: int) -> list[KVPlane]:
        """Returns where the numbers of a block lie in its contents; none where they are not all keys and values as they are."""
        return self._cache.list_planes(block)

    def import_blocks(self, block_ids: Sequence[int], contents: Sequence[bytes | memoryview]) -> None:
        """Overwrites blocks with contents that `export_blocks` returned."""
        rows_of = [self._rows(block) for block in block_ids]
        check_contents(block_ids, [sum(row.nbytes for row in rows) for rows in rows_of], contents)
        for rows, content in zip(rows_of, contents, strict=True):
            import_rows(rows, content)

    def read_cells(self, cells: IntArray) -> ByteArray:
        """Returns a copy of what cells hold, [num_cells, bytes of a cell]."""
        return super().read_cells(cells) if self.cells is None else self._cache.read_cells(cells)

    def write_cells(self, cells: IntArray, contents: ByteArray) -> None:
        """Overwrites cells."""
        if self.cells is None:
            raise self._lacks(Capability.LAYERWISE)
        self._cache.write_cells(cells, contents)

    def _rows(self, block: int) -> list[Tensor]:
        return self._cache.rows(block) + ([] if self._states is None else self._states.cache.rows(block))

    def wipe_buffers(self) -> None:
        """Overwrites what is kept of drafts."""
        if self._states is not None:
            self._states.forget_drafts()

    @torch.no_grad()
    def accept_drafts(self, accepted: IntArray) -> None:
        """Lets accepted drafts change states."""
        if self._states is not None:
            self._states.accept_drafts(self._mixers, accepted)

    def load_adapter(self, slot: int, adapter: AdapterWeights) -> None:
        """Puts an adapter in a slot."""
        self._adapters.load(slot, adapter)

    def unload_adapter(self, slot: int) -> None:
        """Empties a slot."""
        self._adapters.unload(slot)

    def record(self) -> AbstractContextManager[list[OperatorSpan]]:
        """Records spans: the parts of a layer on each thread of the team, and the ends."""
        return record(self, sys.modules[__name__], self._layers)

    def _compute(self, batch: ForwardBatch) -> Tensor:
        """Runs every layer, writes K and V, and returns the residual stream [padded tokens, hidden], or the streams [padded
        tokens, num_streams, hidden]."""
        use_one_thread_per_operation()
        num_tokens = len(batch.token_ids)
        num_rows = pad_rows(num_tokens, self._tiles)
        hidden, layer_inputs = self._embed(batch, num_rows), None
        if self._streams is not None:
            layer_inputs, hidden = self._streams.read_inputs(hidden, batch.token_ids), self._streams.widen(hidden)
        positions = self._pad(batch.positions, num_rows)
        turns = positions if batch.rope_positions is None else self._pad(batch.rope_positions, num_rows)
        num_positions = max(int(batch.context_lens.max()), int(turns.max()) + 1)
        angles = {spec: rope.at(turns, num_positions) for spec, rope in self._ropes.items()}
        deepstack = self._deepstack(batch)
        cells = None
        if batch.residual is not None:
            cells = self._check_layer(batch)
            batch = replace(batch, block_tables=self._cache.place_cells(batch.block_tables))
        unfolded, nodes = unfold(batch)
        units, keys_of = self._schedule(unfolded, nodes, num_rows, cells)
        slots_of = self._adapters.of_step(batch)
        adapters = [self._adapters.of_rows(slots_of, rows) for rows in _chunks(num_rows)]
        written, blocks_of = self._written_slots(batch), self._match_blocks(batch)
        state_step = None if self._states is None else self._states.schedule(batch)
        numbers = range(len(self._layers)) if batch.residual is None else range(batch.layer, batch.layer + 1)
        for number in numbers:
            layer, slots = self._layers[number], self._cache.layers[number] if cells is None else cells
            rope = None if layer.attention is None else layer.attention.rope
            cos_sin = None if rope is None else angles[rope]
            queries, new_slots, features, index_features = self._project(layer, hidden, cos_sin, adapters)
            mixed = state_mixed = None
            if layer.attention is not None and queries is not None and new_slots is not None:
                if isinstance(layer.attention, AttentionSpec) and layer.attention.query_growth is not None:
                    queries[:num_tokens].mul_(grow(layer.attention.query_growth, batch.positions).to(self._device))
                if new_slots.shape[1]:
                    rows_written = written[self._written_group(number)]
                    slots.index_copy_(0, rows_written, new_slots[:num_tokens].to(slots.dtype))
                owner, group = kv_layer(layer.attention, number), self._cache.layout.group_of(number)
                if cells is None:
                    slots = self._cache.layers[owner]
                keys, forms = keys_of[group], None
                if group in blocks_of:
                    blocks = blocks_of[group]
                    if new_slots.shape[1]:
                        self._cache.pack(number, blocks.packed, blocks.sources)
                    size = self._cache.layout.block_size
                    forms = TwoForms(self._cache.packed[owner], slots, blocks.recent_of, positions, size)
                chosen = (
                    None if index_features is None else self._choose(layer.attention, index_features, slots, unfolded, keys)
                )
                mixed = self._attend(queries, slots, layer, layer.attention, units[work_shape(layer.attention)], chosen, forms)
            if features is not None and state_step is not None:
                state_mixed = self._advance(number, features, state_step)
            own = None if layer_inputs is None else layer_inputs[:, number]
            tasks = [
                partial(layer.finish, hidden[rows], _rows(mixed, rows), chunk, _rows(state_mixed, rows), _rows(own, rows))
                for rows, chunk in zip(_chunks(num_rows), adapters, strict=True)
            ]
            self._team.run(tasks, num_rows * layer.finish_operations)
            if number < len(deepstack):
                hidden.index_add_(0, *deepstack[number])
        if batch.residual is not None:
            batch.residual[:] = hidden[:num_tokens].numpy()
        return hidden

    def _check_layer(self, batch: ForwardBatch) -> Tensor:
        """Returns the slots of all cells, which a step of one layer reads and writes.

        Raises:
            EngineError: the program cannot compute single layers.
            ValueError: the model has no such layer, or logits are asked of another layer than the last.
        """
        if self._cache.cells is None:
            raise self._lacks(Capability.LAYERWISE)
        if not 0 <= batch.layer < len(self._layers) or (len(batch.logit_rows) and batch.layer + 1 < len(self._layers)):
            raise ValueError("a batch names a layer that the model does not have, or one without logits")
        return self._cache.cells

    def _advance(self, number: int, features: Tensor, step: StateStep) -> Tensor:
        """Advances the states of one layer, and returns what its mixer makes of the tokens [num_rows, num_mixed]."""
        assert self._states is not None
        return self._states.advance(number, self._mixers[number], features, step)

    def _embed(self, batch: ForwardBatch, num_rows: int) -> Tensor:
        """Returns what the first layer reads, or the only one that is computed: [num_rows, hidden]."""
        hidden = torch.zeros(num_rows, self._spec.hidden_size, device=self._device)
        found = hidden[: len(batch.token_ids)]
        if batch.residual is not None and batch.layer:
            found.copy_(torch.from_numpy(batch.residual))
            return hidden
        found.copy_(to_torch(self._embedding[batch.token_ids]))
        if self._spec.embedding_scale != 1.0:
            found.mul_(self._spec.embedding_scale)
        if batch.embeddings is not None and batch.embedding_rows is not None:
            embeddings = batch.embeddings[:, : self._spec.hidden_size]
            found[torch.from_numpy(batch.embedding_rows).long()] = torch.from_numpy(embeddings)
        if self._learned is not None:
            found.add_(to_torch(self._learned[batch.positions]).to(self._device))
        return hidden if self._merge is None else self._merge(hidden, batch.hidden)

    def _deepstack(self, batch: ForwardBatch) -> list[tuple[Tensor, Tensor]]:
        """Returns (rows, what is added to them) for each of the first layers; rows of images are all different."""
        if batch.embeddings is None or batch.embedding_rows is None:
            return []
        rows, parts = torch.from_numpy(batch.embedding_rows).long(), torch.from_numpy(batch.embeddings)
        return [(rows, part) for part in torch.split(parts, self._spec.hidden_size, dim=1)[1:]]

    def _pad(self, positions: IntArray, num_rows: int) -> Tensor:
        """Returns positions [..., num_tokens] as [..., num_rows], followed by zeros."""
        padded = np.zeros((*positions.shape[:-1], num_rows), np.int64)
        padded[..., : positions.shape[-1]] = positions
        return torch.from_numpy(padded).to(self._device)

    def _written_slots(self, batch: ForwardBatch) -> dict[int, Tensor]:
        """Returns the slots that the tokens of a step are written to, for each group of layers with attention."""
        layout = self._cache.layout
        groups = {self._written_group(number) for number, layer in enumerate(self._layers) if layer.attention is not None}
        return {
            group: torch.from_numpy(token_slots(of_group(batch, layout, group), layout.block_size)).to(self._device)
            for group in groups
        }

    def _written_group(self, layer: int) -> int:
        """Returns the number of the group whose blocks a layer writes keys and values to."""
        recent = self._cache.layout.recent_group
        return self._cache.layout.group_of(layer) if recent is None else recent

    def _match_blocks(self, batch: ForwardBatch) -> dict[int, StepBlocks]:
        """Returns the blocks of a step in both forms, for each group of layers that packs its KV."""
        layout = self._cache.layout
        layers = {layout.group_of(number): number for number in self._cache.packed}
        return {group: match_blocks(batch, layout, layer, self._device) for group, layer in layers.items()}

    def _schedule(
        self, batch: ForwardBatch, nodes: Sequence[TreeNode], num_rows: int, cells: Tensor | None = None
    ) -> tuple[dict[AttentionShape, list[UnitBatch]], dict[int, KeySlots]]:
        """Returns the order of work in attention, and the slots of keys of each group of layers.

        Args:
            cells: the slots of keys are among these (`_check_layer`).
        """
        layout = self._cache.layout
        keys_of: dict[int, KeySlots] = {}
        units: dict[AttentionShape, list[UnitBatch]] = {}
        for number, layer in enumerate(self._layers):
            if layer.attention is None:
                continue
            shape, spec, group = work_shape(layer.attention), layer.attention, layout.group_of(number)
            if group not in keys_of:
                tables, window = of_group(batch, layout, group), layout.groups[group].window if layout.groups else None
                zero_slot = len(layout.blocks_of(number)) * layout.block_size if cells is None else len(cells) - 1
                in_rows = self.ranges is not None
                keys_of[group] = KeySlots(tables, layout.block_size, zero_slot, nodes, window, in_rows=in_rows)
            keys = keys_of[group]
            if shape not in units:
                tiles = attention_tiles(slot_layout(spec), self._device)
                widths = split_widths(slot_layout(spec), self._device)
                threads = self._team.num_threads
                units[shape] = schedule_units(batch, keys, shape, tiles, widths, threads, num_rows, self._device)
        return units, keys_of

    def _project(
        self, layer: DecoderLayer, hidden: Tensor, cos_sin: Tensor | None, adapters: Sequence[RowAdapters | None]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Returns queries [num_rows, num_heads, head_dim], slots of the cache [num_rows, size], features of the mixer with a
        state and of the sparse index [num_rows, num_features]; None for what the layer has not."""
        spec, num_rows = layer.attention, len(hidden)
        queries = slots = features = index_features = None
        if spec is not None:
            queries = hidden.new_empty(num_rows, spec.num_heads, spec.head_dim)
            slots = hidden.new_empty(num_rows, kv_size(spec))
        if isinstance(spec, LatentAttentionSpec) and spec.index is not None:
            index_features = hidden.new_empty(num_rows, spec.index.num_features)
        if layer.mixer is not None:
            features = hidden.new_empty(num_rows, layer.mixer.num_features)
        tasks = [
            partial(
                layer.project,
                hidden[rows],
                None if cos_sin is None else cos_sin[:, rows],
                _rows(queries, rows),
                _rows(slots, rows),
                chunk,
                _rows(features, rows),
                _rows(index_features, rows),
            )
            for rows, chunk in zip(_chunks(num_rows), adapters, strict=True)
        ]
        self._team.run(tasks, num_rows * layer.project_operations)
        return queries, slots, features, index_features

    def _choose(
        self, spec: AnyAttentionSpec, features: Tensor, slots: Tensor, batch: ForwardBatch, keys: KeySlots
    ) -> Tensor | None:
        """Returns the positions that tokens see, [num_rows, num_chosen]; None for all."""
        assert isinstance(spec, LatentAttentionSpec)
        assert spec.index is not None
        return choose_positions(spec.index, features, slots[:, spec.head_dim :], batch, keys, self._team)

    def _attend(
        self,
        queries: Tensor,
        slots: Tensor,
        layer: DecoderLayer,
        spec: AnyAttentionSpec,
        units: Sequence[UnitBatch],
        chosen: Tensor | None,
        forms: TwoForms | None,
    ) -> Tensor:
        """Returns [num_rows, num_heads * value_dim]; a batch of units is a task for one thread."""
        layout, rows = slot_layout(spec), queries.view(-1, spec.head_dim)
        out = rows.new_zeros(len(rows) + 1, layout.value_dim)
        tasks = [partial(attend, rows, slots, layout, unit, out, spec.softcap, layer.sinks, chosen, forms) for unit in units]
        self._team.run(tasks, 4.0 * slots.shape[1] / 2 * sum(unit.num_pairs for unit in units))
        return out[:-1].view(-1, spec.num_heads * layout.value_dim)

    def _choose_normed(self, computed: Tensor, batch: ForwardBatch) -> Tensor:
        """Returns what the head reads: the rows that were asked for, after the final norm, padded to whole tiles."""
        if not batch.token_ids.size:
            return computed
        rows = np.zeros(pad_rows(len(batch.logit_rows), self._tiles), np.int64)
        rows[: len(batch.logit_rows)] = batch.logit_rows
        return self._finish_rows(computed.index_select(0, torch.from_numpy(rows).to(self._device)))

    def _finish_rows(self, computed: Tensor) -> Tensor:
        """Returns what `_compute` made of some tokens after the final norm."""
        return self._norm(computed if self._streams is None else self._streams.join(computed))

    def _logits(self, normed: Tensor) -> Tensor:
        return self._finish(self._head(normed))

    def _finish(self, logits: Tensor) -> Tensor:
        """Adds the head's bias, scales, and bends logits [num_rows, vocab]."""
        spec = self._spec
        if self._head_bias is not None:
            logits.add_(self._head_bias)
        if spec.logit_scale != 1.0:
            logits.mul_(spec.logit_scale)
        limit = spec.logit_softcap
        return logits if limit is None else on_whole_vectors(lambda rows: cap(rows, limit), logits)


class HiddenMerge:
    """What the first layer of a module that predicts further tokens reads (`DecoderSpec.merges_hidden`)."""

    def __init__(self, spec: DecoderSpec, reader: WeightReader) -> None:
        self._embedding_norm = reader.norm("merge_embedding_norm", spec)
        self._hidden_norm = reader.norm("merge_hidden_norm", spec)
        self.linear = reader.linear("merge", bias=False)

    def __call__(self, embedded: Tensor, hidden: FloatArray | None) -> Tensor:
        """Returns [num_rows, hidden] for embeddings [num_rows, hidden], padded, and hidden states [num_tokens, hidden].

        Raises:
            ValueError: there is not a hidden state for each token.
        """
        states = torch.zeros_like(embedded)
        if len(embedded):
            if hidden is None:
                raise ValueError("a module that predicts further tokens reads a hidden state for each token; pass them")
            states[: len(hidden)] = torch.from_numpy(hidden)
        return self.linear(torch.cat([self._embedding_norm(embedded), self._hidden_norm(states)], dim=1))


def _chunks(num_rows: int) -> list[slice]:
    """Cuts rows into tasks for the team, small enough that what a layer makes of one stays in a core's own cache."""
    return [slice(start, start + _CHUNK) for start in range(0, num_rows, _CHUNK)]


def _rows(values: Tensor | None, rows: slice) -> Tensor | None:
    return None if values is None else values[rows]


def grow(growth: QueryGrowth, positions: IntArray) -> Tensor:
    """Returns what multiplies the queries of each token, [num_tokens, 1, 1] float32; logarithms are rounded once."""
    steps = (positions.astype(np.int64) + growth.first) // growth.period
    return torch.from_numpy((1 + growth.beta * np.log1p(steps.astype(np.float64))).astype(np.float32)).view(-1, 1, 1)


def range_block_bytes(spec: DecoderSpec, block_size: int, dtype: torch.dtype) -> int:
    """Returns the bytes of a block of all layers where sequences have address ranges (`MemoryNeed.range_block_bytes`)."""
    size = sum(kv_size(layer.attention) for layer in spec.layers if layer.attention is not None)
    return block_size * pad_position(size * dtype.itemsize, block_size)


def kv_layer(spec: AnyAttentionSpec, number: int) -> int:
    """Returns the number of the layer whose KV a layer reads, its own or an earlier one's."""
    return spec.shared_kv if isinstance(spec, AttentionSpec) and spec.shared_kv is not None else number


def work_shape(spec: AnyAttentionSpec) -> AttentionShape:
    """Returns the properties of a layer that decide the order of work in attention."""
    return AttentionShape(spec.num_heads, spec.num_kv_heads, spec.window, isinstance(spec, AttentionSpec) and spec.chunked)
