"""A decoder that runs: weights, KV cache and the forward pass of one step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cloister.backends.base import FloatArray, ForwardBatch, KVLayout, Span, Weights
from cloister.backends.spec import AttentionSpec, DecoderSpec
from cloister.backends.tensors import dequantized
from cloister.backends.torch.attention import attend, attention_tiles, split_widths
from cloister.backends.torch.cache import KVCache
from cloister.backends.torch.decoder import Layer, WeightReader, to_torch
from cloister.backends.torch.layers import RopeTable, rms_norm
from cloister.backends.torch.linear import common_tiles
from cloister.backends.torch.recording import record
from cloister.backends.torch.schedule import KeySlots, Shape, UnitBatch, schedule_units, token_slots
from cloister.backends.torch.team import Team, use_one_thread_per_operation
from cloister.backends.torch.tiles import pad_rows
from cloister.backends.torch.trees import Node, unfold

_CHUNK = 128  # rows; a multiple of the reference tile


class TorchProgram:
    """Interprets a DecoderSpec (protocol `backends.base.Program`).

    The residual stream, norms, rotation and attention are float32; products with weights, and the KV cache, are of `dtype`.
    The embedding stays where `weights` maps it, and a step reads the rows of its tokens.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        kv: KVLayout,
        *,
        team: Team,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        use_one_thread_per_operation()
        reader = WeightReader(weights, dtype, device, team)
        self._spec, self._team, self._device = spec, team, device
        self._embedding = dequantized(weights.read("embed.weight"))
        self._layers = [Layer(layer, reader, f"layers.{number}", spec.norm_eps) for number, layer in enumerate(spec.layers)]
        self._norm = reader.norm("norm")
        self._head = reader.linear("embed" if spec.tied_embeddings else "head", bias=False)
        self.linears = [self._head, *(linear for layer in self._layers for linear in layer.linears)]
        self._tiles = common_tiles(*(linear.tiles for linear in self.linears))
        self._ropes = {layer.attention.rope: RopeTable(layer.attention.rope, device) for layer in spec.layers}
        self._cache = KVCache(kv, [layer.attention for layer in spec.layers], dtype, device)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch) -> FloatArray:
        """Computes one step (`backends.base.Program.forward`)."""
        if batch.logit_rows.size == 0 and batch.token_ids.size == 0:
            return np.empty((0, self._spec.vocab_size), np.float32)
        use_one_thread_per_operation()
        num_tokens = len(batch.token_ids)
        num_rows = pad_rows(num_tokens, self._tiles)
        hidden = self._embed(batch.token_ids, num_rows)
        positions = self._positions(batch, num_rows)
        angles = {spec: rope.at(positions, int(batch.context_lens.max())) for spec, rope in self._ropes.items()}
        units = self._schedule(*unfold(batch), num_rows)
        written = torch.from_numpy(token_slots(batch, self._cache.layout.block_size)).to(self._device)
        for layer, slots in zip(self._layers, self._cache.layers, strict=True):
            queries, keys_values = self._project(layer, hidden, angles[layer.attention.rope])
            slots.index_copy_(0, written, keys_values.view(num_rows, -1)[:num_tokens].to(slots.dtype))
            mixed = self._attend(queries, slots, layer.attention, units[work_shape(layer.attention)])
            tasks = [partial(layer.finish, hidden[rows], mixed[rows]) for rows in _chunks(num_rows)]
            self._team.run(tasks, num_rows * layer.finish_operations)
        return self._logits(hidden, batch)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, target) in every layer."""
        self._cache.copy(pairs)

    def wipe_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrites blocks with zeros in every layer."""
        self._cache.wipe(block_ids)

    def record(self) -> AbstractContextManager[list[Span]]:
        """Records spans (`backends.base.Recording`): the parts of a layer on each thread of the team, and the ends."""
        return record(self, sys.modules[__name__], self._layers)

    def _embed(self, token_ids: np.ndarray, num_rows: int) -> Tensor:
        hidden = torch.zeros(num_rows, self._spec.hidden_size, device=self._device)
        hidden[: len(token_ids)] = to_torch(self._embedding[token_ids]).to(self._device)
        return hidden

    def _positions(self, batch: ForwardBatch, num_rows: int) -> Tensor:
        positions = np.zeros(num_rows, np.int64)
        positions[: len(batch.positions)] = batch.positions
        return torch.from_numpy(positions).to(self._device)

    def _schedule(self, batch: ForwardBatch, nodes: Sequence[Node], num_rows: int) -> dict[Shape, list[UnitBatch]]:
        keys = KeySlots(batch, self._cache.layout.block_size, self._cache.zero_slot, nodes)
        units: dict[Shape, list[UnitBatch]] = {}
        for layer in self._layers:
            shape, spec = work_shape(layer.attention), layer.attention
            if shape not in units:
                tiles = attention_tiles(spec.num_kv_heads, spec.head_dim, self._device)
                widths = split_widths(spec.num_kv_heads, spec.head_dim, self._device)
                threads = self._team.num_threads
                units[shape] = schedule_units(batch, keys, shape, tiles, widths, threads, num_rows, self._device)
        return units

    def _project(self, layer: Layer, hidden: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Returns queries [num_rows, num_heads, head_dim] and keys and values [num_rows, 2, num_kv_heads, head_dim]."""
        spec, num_rows = layer.attention, len(hidden)
        queries = hidden.new_empty(num_rows, spec.num_heads, spec.head_dim)
        keys_values = hidden.new_empty(num_rows, 2, spec.num_kv_heads, spec.head_dim)
        tasks = [
            partial(layer.project, hidden[rows], cos_sin[:, rows], queries[rows], keys_values[rows])
            for rows in _chunks(num_rows)
        ]
        self._team.run(tasks, num_rows * layer.project_operations)
        return queries, keys_values

    def _attend(self, queries: Tensor, slots: Tensor, spec: AttentionSpec, units: Sequence[UnitBatch]) -> Tensor:
        """Returns [num_rows, num_heads * head_dim]; a batch of units is a task for one thread."""
        rows = queries.view(-1, spec.head_dim)
        out = rows.new_zeros(len(rows) + 1, spec.head_dim)
        tasks = [partial(attend, rows, slots, spec.num_kv_heads, unit, out) for unit in units]
        self._team.run(tasks, 4.0 * slots.shape[1] / 2 * sum(unit.num_pairs for unit in units))
        return out[:-1].view(-1, spec.num_heads * spec.head_dim)

    def _logits(self, hidden: Tensor, batch: ForwardBatch) -> FloatArray:
        num_logits = len(batch.logit_rows)
        if num_logits == 0:
            return np.empty((0, self._spec.vocab_size), np.float32)
        rows = np.zeros(pad_rows(num_logits, self._tiles), np.int64)
        rows[:num_logits] = batch.logit_rows
        chosen = hidden.index_select(0, torch.from_numpy(rows).to(self._device))
        logits: FloatArray = self._head(rms_norm(chosen, self._norm, self._spec.norm_eps))[:num_logits].cpu().numpy()
        return logits


def _chunks(num_rows: int) -> list[slice]:
    """Cuts rows into tasks for the team, small enough that what a layer makes of one stays in a core's own cache."""
    return [slice(start, start + _CHUNK) for start in range(0, num_rows, _CHUNK)]


def work_shape(spec: AttentionSpec) -> Shape:
    """Returns what of a layer decides the order of work in attention."""
    return Shape(spec.num_heads, spec.num_kv_heads, spec.window)
