"""Runs parts of steps that compute a prompt layer by layer (`types.layerwise`): chunks of rows, one layer at a time.

Activations are those of one chunk whatever the length of the prompt. Between chunks the residual stream lies in cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from cloister.backends.base import KV_ONLY, IntArray, Program
from cloister.executor.inputs import LayerRows, ScheduledSequence, TableLayout, forward_batch, schedule_sequence
from cloister.types.errors import EngineError
from cloister.types.layerwise import CellLayout
from cloister.types.step import MAX_SCORED_ROWS, SequencePlan, StepResult

MAX_ROWS: Final = MAX_SCORED_ROWS
"""Positions of one layer that are computed at once: enough to read weights seldom, and few rows of logits."""

Generate = Callable[[ScheduledSequence, StepResult], None]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Positions [start, end) in one layer."""

    layer: int
    start: int
    end: int


class LayerwisePrefill:
    """Computes such parts, one after the other.

    Args:
        generate: computes the last layer of a chunk, and adds what the prompt is for to a result.
    """

    def __init__(self, program: Program, tables: TableLayout, generate: Generate) -> None:
        self._program, self._tables, self._generate = program, tables, generate

    def run(self, part: ScheduledSequence, result: StepResult) -> None:
        """Advances a prompt, and adds its outputs, as far as the last layer has them, to `result`.

        Raises:
            EngineError: the program computes no single layers.
        """
        if self._program.cells is None:
            raise EngineError("the step plan computes a prompt layer by layer, which the program cannot")
        cells = PromptCells(part, self._program.cells, self._tables.block_size)
        for chunk in _cut(part):
            if part.state.failure is not None:
                return
            self._compute(part, chunk, cells, result)

    def _compute(self, part: ScheduledSequence, chunk: _Chunk, cells: PromptCells, result: StepResult) -> None:
        layout, size = cells.layout, self._tables.block_size
        entries = range(chunk.start // size, -(-chunk.end // size))
        residuals = cells.residuals(entries)
        contents = self._program.read_cells(residuals)
        numbers = contents.reshape(len(entries), -1).view(np.float32)[:, : size * layout.hidden_size]
        stream = np.ascontiguousarray(numbers).reshape(-1, layout.hidden_size)
        rows = stream[chunk.start - entries.start * size : chunk.end - entries.start * size]
        is_last = chunk.layer == layout.num_layers - 1
        own = schedule_sequence(_plan_of(part, chunk, is_last=is_last), part.state)
        own.layer_rows = LayerRows(chunk.layer, rows, cells.keys(chunk.layer, entries.stop))
        try:
            if is_last:
                self._generate(own, result)
                return
            own.num_prompt_rows = own.num_rows = 0
            self._program.step(forward_batch([own], self._tables), KV_ONLY)
            numbers[:] = stream.reshape(numbers.shape)
            self._program.write_cells(residuals, contents)
        finally:
            stream.fill(0)  # what a text has become must not stay in free memory
            contents.fill(0)


class PromptCells:
    """Where KV and residuals of one prompt lie: leading entries in blocks of their own, which are KV of all layers; KV of one
    layer of the others in cells of scratch memory, and behind it residuals of all that is computed.

    Attributes:
        layout: of the cells.
    """

    def __init__(self, part: ScheduledSequence, layout: CellLayout, block_size: int) -> None:
        plan = part.plan.layerwise
        assert plan is not None
        self.layout = layout
        blocks = np.array(part.state.blocks, np.int32)
        self._kept, scratch = blocks[: plan.num_kept], blocks[plan.num_kept :]
        layers = np.arange(layout.num_layers, dtype=np.int32) * layout.num_blocks
        self._scratch: IntArray = (scratch[:, None] + layers).reshape(-1)
        self._first_entry = plan.first // block_size
        self._first_residual = -(-part.state.num_prompt_tokens // block_size) - plan.num_kept

    def keys(self, layer: int, num_entries: int) -> IntArray:
        """Returns the cells with KV of a layer of the first entries, [1, num_entries]."""
        kept = self._kept[:num_entries] + layer * self.layout.num_blocks
        return np.concatenate([kept, self._scratch[: num_entries - len(kept)]])[None].astype(np.int32)

    def residuals(self, entries: range) -> IntArray:
        """Returns the cells of the residual stream, [len(entries) * num_residual]."""
        first, each = self._first_residual, self.layout.num_residual
        return self._scratch[
            first + (entries.start - self._first_entry) * each : first + (entries.stop - self._first_entry) * each
        ]


def _cut(part: ScheduledSequence) -> Iterator[_Chunk]:
    """Returns the chunks of a part, layer after layer (`LayerwisePlan`)."""
    plan = part.plan.layerwise
    assert plan is not None
    done = (part.plan.start - plan.first) * plan.num_layers
    end = done + part.plan.num_tokens * plan.num_layers
    while done < end:
        layer, position = divmod(done, plan.num_positions)
        num_rows = min(end - done, plan.num_positions - position, MAX_ROWS)
        yield _Chunk(layer, plan.first + position, plan.first + position + num_rows)
        done += num_rows


def _plan_of(part: ScheduledSequence, chunk: _Chunk, *, is_last: bool) -> SequencePlan:
    """Returns the plan of a chunk as if its layer was the model."""
    samples = is_last and chunk.end == part.state.num_prompt_tokens
    return SequencePlan(
        seq_id=part.plan.seq_id,
        start=chunk.start,
        num_tokens=chunk.end - chunk.start,
        table_start=0,
        new_block_ids=[],
        num_samples=part.plan.num_samples if samples else 0,
        layerwise=part.plan.layerwise,
    )
