"""An encoder that runs.

Where a decoder keeps keys and values, an encoder keeps the tokens: a step that brings the last token of a text computes the
whole of it, in both directions. So prompts may come in chunks, and be preempted, as those of decoders.

A row's bits depend on its own text only (batch invariance): products are computed in fixed tiles, and attention text by text in
tiles of queries at absolute positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cloister.backends.base import Capability, ForwardBatch, KVLayout, MemoryNeed, Program, StepOutput, Wants, Weights
from cloister.backends.encoder_spec import ClassifierSpec, EncoderSpec
from cloister.backends.spec import AttentionSpec, MlpSpec, widest_feed_forward
from cloister.backends.tensors import dequantized
from cloister.backends.torch.decoder import GroupedProjections
from cloister.backends.torch.feed_forward import Activate, Mlp
from cloister.backends.torch.layers import ACTIVATIONS, Norm, RopeTable, on_whole_vectors
from cloister.backends.torch.linear import common_tiles, pad_rows
from cloister.backends.torch.reading import WeightReader, to_torch
from cloister.backends.torch.schedule import Team, token_slots, use_one_thread_per_operation

ROWS_AT_ONCE: Final = 2048
"""Tokens that are computed together; a longer text is computed alone."""
TOKEN_BYTES: Final = 8
"""What one position takes where a decoder has its keys and values: a token and its type."""
_CHUNK: Final = 128  # rows of a task; a multiple of the reference tile
_QUERIES: Final = 128  # of one tile of attention


def _gelu(rows: Tensor) -> Tensor:
    return on_whole_vectors(torch.erf, rows * 0.5**0.5).add_(1).mul_(rows).mul_(0.5)


def _gelu_tanh(rows: Tensor) -> Tensor:
    inner = rows.pow(3).mul_(0.044715).add_(rows).mul_((2 / math.pi) ** 0.5)
    return on_whole_vectors(torch.tanh, inner).add_(1).mul_(rows).mul_(0.5)


_ACTIVATIONS: Final[Mapping[str, Activate]] = {**ACTIVATIONS, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "tanh": torch.tanh}
"""Without torch's own GELU, for which oneDNN compiles code when it meets a new shape: a sealed engine may not do that."""

IdArray = npt.NDArray[np.int64]


def encoder_need(spec: EncoderSpec, weights: Weights, dtype: torch.dtype, *, block_size: int, num_threads: int) -> MemoryNeed:
    """Returns the memory that a program needs (`backends.base.Backend.need`)."""
    tables = ("positions.weight", "embed.weight")
    held = sum(math.prod(weights.shape(name)) for name in weights.names() if name not in tables)
    widest = max(3 * widest_feed_forward(layer.mlp) for layer in spec.layers)
    num_heads = max(layer.grouped_attention.num_heads for layer in spec.layers)
    row_bytes = 4 * (8 * spec.hidden_size + widest)
    longest = spec.max_positions
    return MemoryNeed(
        weights_bytes=held * dtype.itemsize,
        kv_block_bytes=TOKEN_BYTES * block_size,
        activations_bytes=max(ROWS_AT_ONCE, longest) * row_bytes
        + num_threads * 4 * num_heads * longest * 2 * _QUERIES,  # scores of a tile, and what the softmax makes of them
        mapped=tables,
    )


class EncoderProgram(Program):
    """Interprets an EncoderSpec on a CPU.

    Hidden states, norms, rotation and attention are float32; products with weights are of `dtype`.
    """

    capabilities = Capability.ENCODER | Capability.HIDDEN

    def __init__(self, spec: EncoderSpec, weights: Weights, kv: KVLayout, *, team: Team, dtype: torch.dtype) -> None:
        use_one_thread_per_operation()
        reader = WeightReader(weights, dtype, torch.device("cpu"), team)
        self._spec, self._team, self._block_size = spec, team, kv.block_size
        self._embedding = dequantized(weights.read("embed.weight"))
        self._learned = dequantized(weights.read("positions.weight")) if spec.position_embeddings else None
        self._types = reader.vector("token_types.weight") if spec.num_token_types else None
        self._embed_norm = reader.norm("embed_norm", spec)
        self._layers = [_EncoderLayer(spec, number, reader) for number in range(len(spec.layers))]
        self._norm = reader.norm("norm", spec) if spec.final_norm else None
        self._classifier = None if spec.classifier is None else _Classifier(spec, spec.classifier, reader)
        linears = [linear for layer in self._layers for linear in layer.linears]
        self._tiles = common_tiles(*(linear.tiles for linear in linears))
        ropes = {layer.grouped_attention.rope for layer in spec.layers} - {None}
        self._ropes = {rope: RopeTable(rope, torch.device("cpu")) for rope in ropes if rope is not None}
        self._tokens = np.zeros((kv.num_blocks * kv.block_size, 2), np.int32)

    @torch.no_grad()
    def step(self, batch: ForwardBatch, wants: Wants) -> StepOutput:
        """Computes one step (`backends.base.Program.step`, `backends.base.Capability.ENCODER`).

        Raises:
            ValueError: the batch has token trees, or classes are wanted of a model that has none.
            EngineError: the program lacks a capability that the step needs.
        """
        self._check(wants)
        if batch.parents is not None:
            raise ValueError("an encoder computes no token trees")
        use_one_thread_per_operation()
        slots = token_slots(batch, self._block_size)
        self._tokens[slots, 0] = batch.token_ids
        self._tokens[slots, 1] = 0 if batch.token_types is None else batch.token_types
        texts = [self._read(batch, number) for number in self._complete(batch)]
        hidden, output = [states for run in _runs(texts) for states in self._encode(run)], StepOutput()
        if wants.logits:
            if self._classifier is None:
                raise ValueError("this encoder has no classes")
            output.logits = self._classifier(hidden).numpy()
        if wants.hidden:
            states = torch.cat(hidden).numpy() if hidden else np.empty((0, self._spec.hidden_size), np.float32)
            output.hidden = states
        return output

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies the tokens of whole blocks (source, target)."""
        for source, target in pairs:
            self._tokens[self._block(target)] = self._tokens[self._block(source)]

    def wipe_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrites the tokens of blocks with zeros."""
        for block in block_ids:
            self._tokens[self._block(block)] = 0

    def _block(self, number: int) -> slice:
        return slice(number * self._block_size, (number + 1) * self._block_size)

    def _complete(self, batch: ForwardBatch) -> list[int]:
        """Returns the numbers of the sequences of which a row is asked for, in the order of those rows."""
        found: list[int] = (np.searchsorted(batch.query_starts, batch.logit_rows, side="right") - 1).tolist()
        return found

    def _read(self, batch: ForwardBatch, number: int) -> IdArray:
        """Returns a sequence's tokens and their types, [num_tokens, 2]."""
        places = np.arange(int(batch.context_lens[number]))
        blocks = batch.block_tables[number, places // self._block_size].astype(np.int64)
        found: IdArray = self._tokens[blocks * self._block_size + places % self._block_size].astype(np.int64)
        return found

    def _encode(self, texts: Sequence[IdArray]) -> list[Tensor]:
        """Returns the hidden states of each text, [num_tokens, hidden]."""
        ends = np.cumsum([len(text) for text in texts]).tolist()
        spans = [slice(end - len(text), end) for end, text in zip(ends, texts, strict=True)]
        num_rows = pad_rows(ends[-1], self._tiles)
        positions = torch.zeros(num_rows, dtype=torch.long)
        positions[: ends[-1]] = torch.cat([torch.arange(len(text)) for text in texts])
        hidden = self._embed(np.concatenate(texts), positions, num_rows)
        longest = max(map(len, texts))
        angles = {spec: rope.at(positions, longest) for spec, rope in self._ropes.items()}
        for layer in self._layers:
            rope = layer.attention.rope
            self._run_layer(layer, hidden, None if rope is None else angles[rope], spans)
        if self._norm is not None:
            hidden = self._norm(hidden)
        return [hidden[span] for span in spans]

    def _embed(self, tokens: IdArray, positions: Tensor, num_rows: int) -> Tensor:
        hidden, count = torch.zeros(num_rows, self._spec.hidden_size), len(tokens)
        found = hidden[:count]
        found.copy_(to_torch(self._embedding[tokens[:, 0]]))
        if self._types is not None:
            kinds = torch.from_numpy(tokens[:, 1]).clamp_(max=len(self._types) - 1)
            found.add_(self._types.index_select(0, kinds))
        if self._learned is not None:
            found.add_(to_torch(self._learned[positions[:count].numpy()]))
        return self._embed_norm(hidden)

    def _run_layer(self, layer: _EncoderLayer, hidden: Tensor, cos_sin: Tensor | None, spans: Sequence[slice]) -> None:
        """Computes one layer, in place."""
        spec, num_rows = layer.attention, len(hidden)
        queries = hidden.new_empty(num_rows, spec.num_heads, spec.head_dim)
        slots = hidden.new_empty(num_rows, 2 * spec.num_kv_heads * spec.head_dim)
        mixed = hidden.new_zeros(num_rows, spec.num_heads * spec.head_dim)
        chunks = [slice(start, start + _CHUNK) for start in range(0, num_rows, _CHUNK)]
        tasks = [
            partial(layer.project, hidden[rows], None if cos_sin is None else cos_sin[:, rows], queries[rows], slots[rows])
            for rows in chunks
        ]
        self._team.run(tasks, num_rows * layer.project_operations)
        tasks = [partial(_attend, queries[span], slots[span], spec, mixed[span], first) for span, first in _tiles(spans)]
        num_pairs = sum((span.stop - span.start) ** 2 for span in spans)
        self._team.run(tasks, 4.0 * num_pairs * spec.num_heads * spec.head_dim)
        tasks = [partial(layer.finish, hidden[rows], mixed[rows]) for rows in chunks]
        self._team.run(tasks, num_rows * layer.finish_operations)


class _EncoderLayer:
    """One block of an encoder, all but attention itself.

    Attributes:
        project_operations, finish_operations: multiplications and additions of products with weights, for one row.
    """

    def __init__(self, spec: EncoderSpec, number: int, reader: WeightReader) -> None:
        prefix, layer = f"layers.{number}", spec.layers[number]
        self.attention = layer.grouped_attention
        self._is_residual_norm = spec.residual_norm
        has_norm = number > 0 or spec.first_norm
        self._attention_norm = reader.norm(f"{prefix}.attention_norm", spec) if has_norm else None
        self._mlp_norm = reader.norm(f"{prefix}.mlp_norm", spec)
        self._projections = GroupedProjections(self.attention, reader, prefix, spec.norm_eps)
        self._o = reader.linear(f"{prefix}.o", bias=self.attention.output_bias)
        if not isinstance(layer.mlp, MlpSpec):
            raise TypeError("encoders have no experts here; the spec must be checked before")
        self._mlp = Mlp(layer.mlp, reader, prefix, _ACTIVATIONS)
        self.linears = (*self._projections.linears, self._o, *self._mlp.linears)
        self.project_operations = self._projections.num_operations
        self.finish_operations = self._o.num_operations + self._mlp.num_operations

    def project(self, hidden: Tensor, cos_sin: Tensor | None, queries: Tensor, slots: Tensor) -> None:
        """Writes queries [num_rows, num_heads, head_dim], scaled, and slots [num_rows, size]: keys, then values."""
        normed = hidden if self._is_residual_norm else _apply(self._attention_norm, hidden)
        self._projections.project(normed, cos_sin, queries, slots, None)

    def finish(self, hidden: Tensor, mixed: Tensor) -> None:
        """Adds the outputs of attention [num_rows, num_heads * head_dim] and of the feed-forward to `hidden`, in place."""
        hidden.add_(self._o(mixed))
        if self._is_residual_norm:
            hidden.copy_(_apply(self._attention_norm, hidden))
            hidden.copy_(self._mlp_norm(hidden.add_(self._mlp(hidden))))
        else:
            hidden.add_(self._mlp(self._mlp_norm(hidden)))


class _Classifier:
    """The layers behind an encoder (`ClassifierSpec`)."""

    def __init__(self, spec: EncoderSpec, classifier: ClassifierSpec, reader: WeightReader) -> None:
        self._spec = classifier
        self._dense = reader.linear("classifier_dense", bias=classifier.dense_bias)
        self._norm = reader.norm("classifier_norm", spec) if classifier.norm else None
        self._out = reader.linear("classifier", bias=True)
        self._activate = _ACTIVATIONS[classifier.activation]
        self._tiles = common_tiles(self._dense.tiles, self._out.tiles)

    def __call__(self, texts: Sequence[Tensor]) -> Tensor:
        """Returns the scores of each text's classes, [num_texts, num_labels], of hidden states [num_tokens, hidden]."""
        if not texts:
            return torch.empty(0, self._spec.num_labels)
        rows = texts[0].new_zeros(pad_rows(len(texts), self._tiles), texts[0].shape[1])
        for row, states in zip(rows, texts, strict=False):
            row.copy_(states[0] if self._spec.pooling == "cls" else states.double().mean(0))
        bent = _apply(self._norm, on_whole_vectors(self._activate, self._dense(rows)))
        return self._out(bent)[: len(texts)]


def _apply(norm: Norm | None, rows: Tensor) -> Tensor:
    return rows if norm is None else norm(rows)


def _runs(texts: Sequence[IdArray]) -> Iterator[list[IdArray]]:
    """Yields texts that are computed together."""
    run: list[IdArray] = []
    for text in texts:
        if run and sum(map(len, run)) + len(text) > ROWS_AT_ONCE:
            yield run
            run = []
        run.append(text)
    if run:
        yield run


def _tiles(spans: Sequence[slice]) -> Iterator[tuple[slice, int]]:
    """Yields (rows of a text, first query of a tile in it)."""
    for span in spans:
        for first in range(0, span.stop - span.start, _QUERIES):
            yield span, first


def _attend(queries: Tensor, slots: Tensor, spec: AttentionSpec, mixed: Tensor, first: int) -> None:
    """Writes the attention of one tile of a text's queries.

    Args:
        queries: [num_tokens, num_heads, head_dim] of the whole text, scaled.
        slots: [num_tokens, size], keys, then values.
        mixed: [num_tokens, num_heads * head_dim].
    """
    num_tokens = len(queries)
    last = min(first + _QUERIES, num_tokens)
    start, end = 0, num_tokens
    if spec.window is not None:
        start, end = max(0, first - spec.window + 1), min(num_tokens, last + spec.window - 1)
    keys, values = slots[start:end].view(end - start, 2, spec.num_kv_heads, spec.head_dim).unbind(1)
    group = spec.num_heads // spec.num_kv_heads
    # copies of their own, so that no product depends on where in memory a text lies
    rows = queries[first:last].transpose(0, 1).clone(memory_format=torch.contiguous_format)
    keys, values = (part.transpose(0, 1).repeat_interleave(group, 0).contiguous() for part in (keys, values))
    scores = torch.bmm(rows, keys.transpose(1, 2))
    if spec.window is not None:
        distance = torch.arange(start, end) - torch.arange(first, last)[:, None]
        scores.masked_fill_(distance.abs() >= spec.window, -torch.inf)
    found = torch.bmm(scores.softmax(-1), values)
    mixed[first:last].view(last - first, spec.num_heads, spec.head_dim).copy_(found.transpose(0, 1))
