"""Builds the arrays of one forward pass from the parts of a plan: token ids, positions, block tables, rows of logits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter

import msgspec
import numpy as np

from cloister.backends.base import FloatArray, ForwardBatch, IntArray
from cloister.backends.ranges import KVRanges
from cloister.executor.arrays import as_ints, block_tables
from cloister.executor.drafters import NOTHING, Draft
from cloister.executor.images import find_last_seen, gather
from cloister.executor.links import cut_at_links
from cloister.executor.state import SequenceState
from cloister.types.documents import Documents
from cloister.types.errors import EngineError
from cloister.types.step import MAX_SCORED_ROWS, SequencePlan

_blocks_of = attrgetter("state.blocks")  # a comprehension would be another call in every step


class LayerRows(msgspec.Struct, frozen=True):
    """What one layer of a prompt reads that is computed layer by layer.

    Attributes:
        layer: its number.
        residual: [num_tokens, hidden] float32, which the step overwrites (`ForwardBatch.residual`).
        cells: [1, num_entries] int32, with its KV.
    """

    layer: int
    residual: FloatArray
    cells: IntArray


class ScheduledSequence(msgspec.Struct):
    """One sequence's part of a step, with its state.

    Attributes:
        end: one past the last position computed whose token is known; those of drafts follow.
        num_prompt_rows: positions whose logits score the next prompt token; 0 unless prompt logprobs were requested.
        num_rows: rows of logits that this part needs: those of the prompt, the one to sample from, one for each draft.
        draft: the draft to verify.
        layer_rows: set for one layer of a prompt, which is then alone in its batch.
        num_cut: last positions of the plan's part that are left to a later step.
    """

    plan: SequencePlan
    state: SequenceState
    end: int
    num_prompt_rows: int
    num_rows: int
    draft: Draft = NOTHING
    layer_rows: LayerRows | None = None
    num_cut: int = 0


class TableLayout(msgspec.Struct, frozen=True):
    """How block tables are laid out.

    Attributes:
        block_size: positions of an entry.
        num_groups: of layers, each with a block of every entry.
        state_group: which of them has states; None where none has.
        ranges: sequences read their blocks at these addresses; None: their tables name the blocks themselves.
    """

    block_size: int
    num_groups: int = 1
    state_group: int | None = None
    ranges: KVRanges | None = None

    def running_state(self, part: ScheduledSequence) -> int:
        """Returns the block of a sequence's running state, that of the last entry that its plan names."""
        assert self.state_group is not None
        last = (part.plan.start + part.plan.num_tokens + part.num_cut - 1) // self.block_size
        return part.state.blocks[last * self.num_groups + self.state_group]

    def snapshot_at_end(self, part: ScheduledSequence) -> int | None:
        """Returns the block that shall have a copy of the state with which a part ends that was cut short; None for none."""
        if self.state_group is None or not part.num_cut or part.end % self.block_size:
            return None
        block = part.state.blocks[(part.end // self.block_size - 1) * self.num_groups + self.state_group]
        return block if block >= 0 else None


def schedule_sequence(plan: SequencePlan, state: SequenceState, draft: Draft = NOTHING) -> ScheduledSequence:
    """Combines a plan's part with its sequence and draft."""
    end = plan.start + plan.num_tokens - plan.num_drafts
    num_prompt_rows = 0
    if state.sampling.prompt_logprobs is not None:
        num_prompt_rows = max(0, min(end, state.num_prompt_tokens - 1) - plan.start)
    num_samples = plan.num_samples if draft is NOTHING else 1 + len(draft.token_ids)
    return ScheduledSequence(plan, state, end, num_prompt_rows, num_prompt_rows + num_samples, draft)


def cut_last(part: ScheduledSequence) -> ScheduledSequence | None:
    """Returns a part without its last position, and so without a sample; None if it has no other."""
    plan = part.plan
    if part.end - plan.start == 1:
        return None
    shorter = msgspec.structs.replace(plan, num_tokens=plan.num_tokens - 1, num_samples=0, is_watched=False)
    cut = schedule_sequence(shorter, part.state)
    cut.num_cut = 1
    return cut


def row_slices(parts: Sequence[ScheduledSequence]) -> dict[int, slice]:
    """Returns the rows of logits of each sequence."""
    ends = accumulate([part.num_rows for part in parts])
    return {part.plan.seq_id: slice(end - part.num_rows, end) for part, end in zip(parts, ends, strict=True)}


def split_scored(parts: list[ScheduledSequence]) -> list[list[ScheduledSequence]]:
    """Splits the parts of a step into runs that are computed one after another, each with few prompt positions to score.

    A row of logits is as wide as the vocabulary: 2,048 of them can be a gigabyte.
    """
    runs: list[list[ScheduledSequence]] = [[]]
    num_rows = 0
    for part in parts:
        if num_rows and num_rows + part.num_prompt_rows > MAX_SCORED_ROWS:
            runs.append([])
            num_rows = 0
        runs[-1].append(part)
        num_rows += part.num_prompt_rows
    return runs


def forward_batch(parts: Sequence[ScheduledSequence], tables: TableLayout) -> ForwardBatch:
    """Builds the arrays for `parts`, at least one.

    Raises:
        EngineError: a part is inconsistent with the runner's state of its sequence.
    """
    # Growable C arrays: for the few numbers of a decode step a numpy call costs more than a loop.
    token_ids, positions, context_lens, logit_rows = array("i"), array("i"), array("i"), array("i")
    query_starts = array("i", (0,))
    has_adapter = has_tree = has_images = has_links = has_grids = has_documents = has_weights = False
    block_size, num_groups = tables.block_size, tables.num_groups
    block_positions = block_size if num_groups == 1 else block_size / num_groups  # positions for each number in a block table
    for part in parts:
        start, end, draft = part.plan.start, part.end, part.draft
        known = part.state.tokens
        if start == end - 1 == len(known) - 1 and part.num_rows == 1 and len(part.state.blocks) * block_positions >= end:
            # Fast path: one sampled token without drafts satisfies `_check`, as nearly every decode does.
            token_ids.append(known[start])
            positions.append(start)
            context_lens.append(end)
            logit_rows.append(query_starts[-1])
            query_starts.append(query_starts[-1] + 1)
            has_adapter = has_adapter or part.state.adapter >= 0
            has_images = has_images or part.state.images is not None
            has_grids = has_grids or part.state.grids is not None
            has_weights = has_weights or part.state.documents is not None
            continue
        _check(part, block_positions)
        shift = 0
        if part.state.documents is not None:
            if len(part.state.documents.cut_links(start, end)) > 1:
                return forward_batch(cut_at_links(parts), tables)
            first_hidden, end_hidden = part.state.documents.find_hidden(start)
            shift = end_hidden - first_hidden
        has_documents = has_documents or shift > 0
        has_links = has_links or part.state.links is not None
        has_weights = has_weights or part.state.documents is not None
        token_ids += known[start:end]
        positions.extend(range(start - shift, end - shift))
        if draft is NOTHING:
            context_lens.append(end - shift)
        else:
            token_ids.extend(draft.token_ids)
            positions.extend([end - 1 + depth for depth in draft.depths[1:]])
            context_lens.append(end + len(draft.token_ids))
            has_tree = has_tree or draft.parents is not None
        if part.num_prompt_rows:
            logit_rows.extend(range(query_starts[-1], query_starts[-1] + part.num_prompt_rows))
        query_starts.append(len(token_ids))
        if part.plan.num_samples and draft is NOTHING:
            logit_rows.append(len(token_ids) - 1)
        elif part.plan.num_samples:
            logit_rows.extend(range(len(token_ids) - 1 - len(draft.token_ids), len(token_ids)))
        has_adapter = has_adapter or part.state.adapter >= 0
        has_images = has_images or part.state.images is not None
        has_grids = has_grids or part.state.grids is not None
    layer_rows = parts[0].layer_rows
    embeddings = embedding_rows = last_seen = None
    ranges, weights = _document_weights(parts) if has_weights else (None, None)
    has_turns = has_grids or (has_weights and any(_turned_documents(part) is not None for part in parts))
    if has_images or has_links:
        embeddings, embedding_rows, last_seen = _embeddings(parts, query_starts, as_ints(positions))
    width = -(-max(context_lens) // block_size) * num_groups
    if layer_rows is not None:
        found_tables = layer_rows.cells
    elif tables.ranges is not None:
        found_tables = _range_tables(parts, tables.ranges, width, block_size)
    else:  # not in a function: it would be another call in every step
        seen = [_seen_blocks(part, block_size) for part in parts] if has_documents else [*map(_blocks_of, parts)]
        found_tables = block_tables(seen, width)
    return ForwardBatch(
        token_ids=as_ints(token_ids),
        positions=as_ints(positions),
        query_starts=as_ints(query_starts),
        context_lens=as_ints(context_lens),
        block_tables=found_tables,
        logit_rows=as_ints(logit_rows),
        parents=_parents(parts) if has_tree else None,
        adapters=as_ints(array("i", [part.state.adapter for part in parts])) if has_adapter else None,
        embeddings=embeddings,
        embedding_rows=embedding_rows,
        last_seen=last_seen,
        rope_positions=_rope_positions(parts, query_starts, as_ints(positions)) if has_turns else None,
        state_spans=None if tables.state_group is None else _state_spans(parts, tables),
        residual=None if layer_rows is None else layer_rows.residual,
        layer=0 if layer_rows is None else layer_rows.layer,
        document_ranges=ranges,
        document_weights=weights,
    )


def _range_tables(parts: Sequence[ScheduledSequence], ranges: KVRanges, width: int, block_size: int) -> IntArray:
    """Returns block tables that name blocks by their numbers in the ranges of sequences, [num_parts, width]."""
    firsts = as_ints(array("i", [ranges.first_block(part.state.slot) for part in parts]))
    found: IntArray = (firsts[:, None] + np.arange(width)).astype(np.int32)
    for row, part in zip(found, parts, strict=True):
        documents = part.state.documents
        if documents is not None:  # as `_seen_blocks`
            first, end = documents.find_hidden(part.plan.start)
            row[first // block_size :] += (end - first) // block_size
    return found


def _seen_blocks(part: ScheduledSequence, block_size: int) -> array[int]:
    """Returns the block table of a part: a document sees the prefix and itself, as if there were nothing in between, and links
    do not see later documents."""
    blocks, documents = part.state.blocks, part.state.documents
    first, end = (0, 0) if documents is None else documents.find_hidden(part.plan.start)
    return blocks if first == end else blocks[: first // block_size] + blocks[end // block_size :]


def _document_weights(parts: Sequence[ScheduledSequence]) -> tuple[IntArray, FloatArray] | tuple[None, None]:
    """Returns the documents that each part weighs, and how (`ForwardBatch.document_ranges`); None where no part weighs any."""
    ranges, weights = np.zeros((len(parts), 2), np.int32), np.ones((len(parts), 2), np.float32)
    for number, part in enumerate(parts):
        documents = part.state.documents
        if documents is not None and documents.has_weights and part.plan.start >= documents.end:
            first, end = documents.find_hidden(part.plan.start)
            seen = documents.starts[0], documents.end - (end - first)
            ranges[number], weights[number] = seen, (documents.temperature, documents.scale)
    return (ranges, weights) if ranges.any() else (None, None)


def _embeddings(
    parts: Sequence[ScheduledSequence], query_starts: Sequence[int], positions: IntArray
) -> tuple[FloatArray | None, IntArray | None, IntArray | None]:
    """Returns what stands at the positions of images and links, where these are, and the last position that each token sees."""
    images, links = [], []
    for part, first in zip(parts, query_starts, strict=False):
        if part.state.images is not None:
            images.append((part.state.images, part.plan.start, part.end, first))
        if part.state.links is not None:
            links.append((part.state.links, part.plan.start, part.end, first))
    return *(gather([*images, *links]) or (None, None)), find_last_seen(images, positions)


def _rope_positions(parts: Sequence[ScheduledSequence], query_starts: Sequence[int], positions: IntArray) -> IntArray:
    """Returns what each token turns by (`ForwardBatch.rope_positions`)."""
    turns = np.tile(positions, (3, 1))
    for number, part in enumerate(parts):
        own = slice(query_starts[number], query_starts[number + 1])
        if part.state.grids is not None:
            turns[:, own] = part.state.grids.turn(positions[own])
        elif (documents := _turned_documents(part)) is not None:
            known = documents.turns(part.plan.start, part.end)
            turns[:, own] += known[-1] - positions[own][len(known) - 1]  # so far for drafts, which follow
            turns[:, own.start : own.start + len(known)] = known
    return turns


def _turned_documents(part: ScheduledSequence) -> Documents | None:
    """Returns the documents of a part whose tokens have positions of their own; None where they stand as they are computed."""
    documents = part.state.documents
    return documents if documents is not None and documents.positions else None


def _state_spans(parts: Sequence[ScheduledSequence], tables: TableLayout) -> IntArray:
    """Returns how the parts advance their states (`ForwardBatch.state_spans`): in place, and by way of the block of a snapshot
    where the table has one."""
    spans, offset, size = array("i"), 0, tables.block_size
    for part in parts:
        start, running, first = part.plan.start, tables.running_state(part), offset
        read = running
        for entry in range(start // size, (part.end - 1) // size):
            snapshot = part.state.blocks[entry * tables.num_groups + (tables.state_group or 0)]
            if snapshot >= 0:
                end = offset + (entry + 1) * size - start
                spans.extend((first, end, read, snapshot))
                first, read = end, snapshot
        offset += part.end - start
        spans.extend((first, offset, read, running))
        if part.draft.token_ids:
            spans.extend((offset, offset + len(part.draft.token_ids), running, -1))
            offset += len(part.draft.token_ids)
    return as_ints(spans).reshape(-1, 4)


def _parents(parts: Sequence[ScheduledSequence]) -> IntArray:
    """Returns the parent of each token in a step with token trees (`ForwardBatch.parents`)."""
    parents = array("i")
    for part in parts:
        first, num_known = len(parents), part.end - part.plan.start
        parents.append(-1)
        if part.draft.parents is None:
            parents.extend(range(first, first + num_known + len(part.draft.token_ids) - 1))
        else:
            parents.extend(range(first, first + num_known - 1))
            parents.extend([first + num_known + parent for parent in part.draft.parents])
    return as_ints(parents)


def _check(part: ScheduledSequence, block_positions: float) -> None:
    plan, num_known, end = part.plan, len(part.state.tokens), part.end
    num_drafts = 0 if part.draft is NOTHING else len(part.draft.token_ids)
    documents = part.state.documents
    if documents is not None and end > (documents.find_piece_end(plan.start) or end):
        raise EngineError(f"the step plan computes two documents of sequence {plan.seq_id} at once")
    if end <= plan.start or plan.start < 0 or end > num_known:
        raise EngineError(f"the step plan asks for positions of sequence {plan.seq_id} that have no token yet")
    if plan.num_samples:
        if plan.num_samples != 1:
            raise EngineError(f"the step plan samples sequence {plan.seq_id} more than once")
        if end != num_known:
            raise EngineError(f"the step plan samples sequence {plan.seq_id} before its last token")
    elif plan.num_drafts:
        raise EngineError(f"the step plan drafts for sequence {plan.seq_id}, which does not sample")
    if num_drafts > plan.num_drafts:
        raise EngineError(f"sequence {plan.seq_id} has {num_drafts} drafts where the step plan has room for {plan.num_drafts}")
    if part.layer_rows is None and len(part.state.blocks) * block_positions < end + num_drafts:
        raise EngineError(f"the block table of sequence {plan.seq_id} ends before its tokens do")
