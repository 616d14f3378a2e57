"""Attention over the paged cache: online softmax, split by split (Milakov and Gimelshein 2018; Dao et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from cloister.backends.torch.cache import SlotLayout
from cloister.backends.torch.layers import cap
from cloister.backends.torch.linear import FEWEST_COLUMNS, measure_tiles
from cloister.backends.torch.packing import TwoForms
from cloister.backends.torch.schedule import SPLIT, Run, UnitBatch, UnitDocuments

_NOTHING_YET = -1e30  # a running maximum that is finite, so that a hidden split leaves exp(0) = 1 and no NaN
_WIDTHS = (64, 128, 192, SPLIT)
_VECTOR = 32  # exp is taken on whole vectors: torch rounds the scalar tail of a vector otherwise


def attend(
    queries: Tensor,
    slots: Tensor,
    layout: SlotLayout,
    batch: UnitBatch,
    out: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chosen: Tensor | None = None,
    forms: TwoForms | None = None,
) -> None:
    """Writes the attention outputs of one batch of units.

    Args:
        queries: [num_tokens * num_heads, key_dim] float32, rotated and scaled.
        slots: [num_slots + 1, size], one layer of the cache.
        out: [num_tokens * num_heads + 1, value_dim] float32.
        softcap: bends scores (`backends.spec.AttentionSpec`).
        sinks: [num_heads] float32, the logit of each head that takes part in the softmax without a value; None for none.
        chosen: [num_tokens, num_chosen] int64, the only positions that each token sees of those before it; None for all.
        forms: where `slots` has the newest positions only and all others are packed; None where `slots` has all.
    """
    shape = (layout.num_kv_heads, batch.num_units, batch.num_rows)
    rows = queries.index_select(0, batch.sources).view(*shape, layout.key_dim)
    if sinks is None:
        highest, total = queries.new_full((*shape, 1), _NOTHING_YET), queries.new_zeros(*shape, 1)
    else:  # the sink is the first score, so it joins in the same order whatever follows
        highest = sinks[batch.sources % len(sinks)].view(*shape, 1)
        total = torch.ones_like(highest)
    state = _State(highest, total, mixed=queries.new_zeros(*shape, layout.value_dim))
    documents, apart = batch.documents, state
    if documents is not None:
        nothing = torch.full_like(highest, _NOTHING_YET)
        apart = _State(nothing, torch.zeros_like(nothing), torch.zeros_like(state.mixed))
    for run in batch.runs:
        newest = None
        if run.first_slot is not None:
            found = slots[run.first_slot : run.first_slot + run.num_splits * run.width].float()
        elif forms is None:
            pages = slots if run.page_size == 1 else slots[:-1].view(-1, run.page_size * slots.shape[1])
            found = pages.index_select(0, run.pages).float()
        else:
            found, numbers = forms.read(run)
            num_heads = len(queries) // len(forms.positions)
            is_recent = forms.is_recent(batch, run, layout.num_kv_heads, num_heads)
            newest = _Newest(numbers.view(-1, run.width, layout.size), is_recent)
        found = found.view(-1, run.width, layout.size)
        hidden = run.hidden
        if chosen is not None:
            tokens = (batch.sources // (len(queries) // len(chosen))).view(shape)[0, : run.num_units]
            hidden = _hide_unchosen(chosen[tokens], run)
        if documents is not None:
            outside = _find_outside(documents, run)
            inverse = documents.inverse_temperature[: run.num_units].view(-1, 1, 1)
            both = outside if hidden is None else outside | hidden
            _attend_run(rows[:, : run.num_units], found, newest, layout, run, both, apart, softcap, inverse)
            hidden = ~outside if hidden is None else ~outside | hidden
        _attend_run(rows[:, : run.num_units], found, newest, layout, run, hidden, state, softcap)
    if documents is not None:
        _join_documents(state, apart, documents)
    out.index_copy_(0, batch.targets, state.mixed.div_(state.total).view(-1, layout.value_dim))


@dataclass(frozen=True, slots=True)
class _Newest:
    """What rows read unpacked of a run: numbers [num_splits * num_units, width, size], and which rows read which of them
    [num_splits * num_units, num_rows, width]."""

    numbers: Tensor
    is_recent: Tensor


@dataclass(frozen=True, slots=True)
class _State:
    """Online softmax of a batch: the highest score so far, the sum of weights below it, and the weighted values."""

    highest: Tensor
    total: Tensor
    mixed: Tensor


def _hide_unchosen(chosen: Tensor, run: Run) -> Tensor:
    """Returns where a row must not see a key, [num_splits * num_units, num_rows, width].

    Args:
        chosen: [num_units, num_rows, num_chosen] positions.
    """
    num_keys = run.num_splits * run.width
    places = chosen - run.first_split * SPLIT
    hidden = torch.ones(*chosen.shape[:2], num_keys + 1, dtype=torch.bool, device=chosen.device)
    hidden.scatter_(-1, places.masked_fill((places < 0) | (places > num_keys), num_keys), False)
    num_units, num_rows, _ = chosen.shape
    hidden = hidden[..., :num_keys].reshape(num_units, num_rows, run.num_splits, run.width).permute(2, 0, 1, 3).flatten(0, 1)
    return hidden if run.hidden is None else hidden | run.hidden


def _find_outside(documents: UnitDocuments, run: Run) -> Tensor:
    """Returns where a key is not one of the documents that a unit weighs, [num_splits * num_units, 1, width]."""
    device = documents.first.device
    begins = SPLIT * (run.first_split + torch.arange(run.num_splits, device=device))
    places = begins.view(-1, 1, 1) + torch.arange(run.width, device=device)
    first, end = (bound[: run.num_units].view(1, -1, 1) for bound in (documents.first, documents.end))
    return ((places < first) | (places >= end)).flatten(0, 1).unsqueeze(1)


def _join_documents(state: _State, apart: _State, documents: UnitDocuments) -> None:
    """Joins the softmax of documents with that of all other keys, as one key whose score is weighed."""
    logarithm = _spread(apart.total).log_()[..., :1]
    score = documents.power.view(1, -1, 1, 1) * (apart.highest + logarithm)
    highest = torch.maximum(state.highest, score)
    fade, rise = (_spread(each - highest).exp_()[..., :1] for each in (state.highest, score))
    state.mixed.mul_(fade).add_(apart.mixed.div_(apart.total).mul_(rise))
    state.total.mul_(fade).add_(rise)


def _spread(numbers: Tensor) -> Tensor:
    """Returns numbers [..., 1] as whole vectors."""
    return numbers.expand(*numbers.shape[:-1], _VECTOR).contiguous()


def _attend_run(
    rows: Tensor,
    found: Tensor,
    newest: _Newest | None,
    layout: SlotLayout,
    run: Run,
    hidden: Tensor | None,
    state: _State,
    softcap: float | None,
    inverse_temperature: Tensor | None = None,
) -> None:
    """Computes every split of a run against the running maximum at that split, then joins them in order.

    Args:
        rows: [num_kv_heads, num_units, num_rows, key_dim].
        found: [num_splits * num_units, width, size].
        hidden: [num_splits * num_units, num_rows, width], True where a row must not see a key; None where it sees all.
        inverse_temperature: [num_units, 1, 1], multiplies scores; None for 1.
    """
    num_kv_heads, num_units, num_rows, _ = rows.shape
    rows = rows if run.num_splits == 1 else rows.repeat(1, run.num_splits, 1, 1)
    scores = rows.new_empty(num_kv_heads, run.num_splits * num_units, num_rows, run.width)
    for head in range(num_kv_heads):
        torch.bmm(rows[head], _keys(found, layout, head).transpose(1, 2), out=scores[head])
        if newest is not None:
            others = torch.bmm(rows[head], _keys(newest.numbers, layout, head).transpose(1, 2))
            scores[head] = torch.where(newest.is_recent, others, scores[head])
    if softcap is not None:
        cap(scores, softcap)
    if inverse_temperature is not None:
        scores.mul_(inverse_temperature.repeat(run.num_splits, 1, 1))
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    scores = scores.view(num_kv_heads, run.num_splits, num_units, num_rows, run.width)
    highest = state.highest[:, :num_units]
    peaks = torch.cat((highest.unsqueeze(1), scores.amax(-1, keepdim=True)), 1).cummax(1).values
    fading = _spread(peaks[:, :-1] - peaks[:, 1:]).exp_()[..., :1]
    weights = scores.sub_(peaks[:, 1:]).exp_()
    sums = weights.sum(-1, keepdim=True)
    values = rows.new_empty(num_kv_heads, run.num_splits * num_units, num_rows, layout.value_dim)
    for head in range(num_kv_heads):
        of_keys = weights[head].flatten(0, 1)
        if newest is None:
            _mix(of_keys, _values(found, layout, head), values[head])
            continue
        _mix(of_keys.masked_fill(newest.is_recent, 0), _values(found, layout, head), values[head])
        others = torch.empty_like(values[head])
        _mix(of_keys.masked_fill(~newest.is_recent, 0), _values(newest.numbers, layout, head), others)
        values[head] += others
    values = values.view(num_kv_heads, run.num_splits, num_units, num_rows, layout.value_dim)
    total, mixed = state.total[:, :num_units], state.mixed[:, :num_units]
    for split in range(run.num_splits):
        total.mul_(fading[:, split]).add_(sums[:, split])
        mixed.mul_(fading[:, split]).add_(values[:, split])
    highest.copy_(peaks[:, -1])


def _keys(found: Tensor, layout: SlotLayout, head: int) -> Tensor:
    return found[..., head * layout.key_dim : (head + 1) * layout.key_dim]


def _values(found: Tensor, layout: SlotLayout, head: int) -> Tensor:
    return found[..., layout.value_start + head * layout.value_dim :][..., : layout.value_dim]


def _mix(weights: Tensor, values: Tensor, out: Tensor) -> None:
    """Writes weights [num_units, num_rows, width] times values [num_units, width, head_dim]."""
    head_dim = values.shape[-1]
    if head_dim >= FEWEST_COLUMNS:
        torch.bmm(weights, values, out=out)
    else:
        out.copy_(torch.bmm(weights, F.pad(values, (0, FEWEST_COLUMNS - head_dim)))[..., :head_dim])


@cache
def attention_tiles(layout: SlotLayout, device: torch.device) -> tuple[int, ...]:
    """Returns how many query rows a unit may have (`tiles.measure_tiles`), for both products of attention."""
    generator = torch.Generator().manual_seed(layout.key_dim)
    found = torch.randn(3, SPLIT, layout.size, generator=generator).to(device)
    keys, values = (part(found, layout, layout.num_kv_heads - 1) for part in (_keys, _values))
    keys = keys.transpose(1, 2)

    def score(rows: Tensor) -> Tensor:
        return torch.bmm(rows.expand(3, -1, -1).contiguous(), keys).transpose(0, 1)

    def mix(rows: Tensor) -> Tensor:
        mixed = rows.new_empty(3, len(rows), layout.value_dim)
        _mix(rows.expand(3, -1, -1).contiguous(), values, mixed)
        return mixed.transpose(0, 1)

    scoring = measure_tiles(score, layout.key_dim, torch.float32, device)
    return tuple(size for size in measure_tiles(mix, SPLIT, torch.float32, device) if size in scoring)


@cache
def split_widths(layout: SlotLayout, device: torch.device) -> tuple[int, ...]:
    """Returns how many keys of a split may be computed when all the others are hidden, measured to change no bit."""
    generator = torch.Generator().manual_seed(layout.key_dim)
    found = torch.randn(3, SPLIT, layout.size, generator=generator).to(device)
    keys, values = (part(found, layout, layout.num_kv_heads - 1) for part in (_keys, _values))

    def mixed(weights: Tensor, values: Tensor) -> Tensor:
        out = weights.new_empty(*weights.shape[:2], layout.value_dim)
        _mix(weights, values, out)
        return out

    def agrees(width: int, size: int) -> bool:
        rows = torch.randn(3, size, layout.key_dim, generator=torch.Generator().manual_seed(width)).to(device)
        weights = torch.bmm(rows, keys.transpose(1, 2)).abs_()
        weights[..., width:] = 0
        part = weights[..., :width].contiguous()
        return (
            torch.equal(torch.bmm(rows, keys[:, :width].transpose(1, 2)).abs_(), part)
            and torch.equal(mixed(part, values[:, :width]), mixed(weights, values))
            and torch.equal(part.sum(-1), weights.sum(-1))
        )

    sizes = attention_tiles(layout, device)
    return tuple(width for width in _WIDTHS if width == SPLIT or all(agrees(width, size) for size in sizes))
