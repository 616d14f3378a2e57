"""Memory is budgeted once, and refused with the figure that would fit."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import partial

import pytest

from cloister.backends.base import MemoryNeed
from cloister.backends.spec import LayerGroup
from cloister.engine.memory import MIB, MemoryBudget, budget_memory
from cloister.types.errors import MemoryBudgetError
from cloister.types.step import MAX_SCORED_ROWS

NEED = MemoryNeed(weights_bytes=20 * MIB, kv_block_bytes=MIB // 4, activations_bytes=50 * MIB)


def budget(
    available_mib: float,
    *,
    max_model_len: int = 8192,
    max_num_seqs: int = 64,
    kv_memory_mb: float | None = None,
    whole_bytes: int | None = None,
    follows_settings: bool = False,
) -> MemoryBudget:
    return budget_memory(
        NEED,
        available_bytes=int(available_mib * MIB),
        block_size=16,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_memory_mb=kv_memory_mb,
        whole_bytes=whole_bytes,
        follows_settings=follows_settings,
    )


def test_every_item_is_named_and_they_add_up() -> None:
    found = budget(4096)
    assert [what for what, _ in found.items] == ["weights", "KV cache", "activations", "overhead"]
    assert dict(found.items)["KV cache"] == found.num_blocks * NEED.kv_block_bytes
    assert found.total_bytes <= 4096 * MIB


def test_logits_of_every_sequence_and_of_scored_prompts_are_counted() -> None:
    need = replace(NEED, logit_row_bytes=4 * 150_000)
    sizes = {"available_bytes": 4096 * MIB, "block_size": 16, "max_model_len": 8192, "max_num_seqs": 64}
    without, found = (dict(budget_memory(each, **sizes).items) for each in (NEED, need))
    assert found["activations"] - without["activations"] >= (64 + MAX_SCORED_ROWS) * 4 * 150_000


def test_rows_that_drafts_take_are_counted_and_the_drafters_named() -> None:
    need = replace(NEED, logit_row_bytes=4 * 150_000)
    sizes = {"available_bytes": 4096 * MIB, "block_size": 16, "max_model_len": 8192, "max_num_seqs": 64}
    without, found = (budget_memory(need, **sizes, **more) for more in ({}, {"drafters_bytes": MIB, "num_draft_rows": 512}))
    assert dict(found.items)["activations"] - dict(without.items)["activations"] == 512 * 4 * 150_000
    assert dict(found.items)["drafters"] == MIB


def test_drafts_that_layers_with_a_state_keep_are_counted() -> None:
    need = replace(NEED, draft_bytes=3000, draft_state_bytes=700)
    sizes = {"available_bytes": 4096 * MIB, "block_size": 16, "max_model_len": 8192, "max_num_seqs": 64}
    without, found = (budget_memory(need, **sizes, **more) for more in ({}, {"num_drafts": 50, "most_drafts": 9}))
    assert dict(found.items)["activations"] - dict(without.items)["activations"] == 50 * 3000 + 9 * 700


def test_a_large_machine_gives_every_sequence_full_length_and_no_more() -> None:
    assert budget(10**6).num_blocks == 64 * 8192 // 16


def test_a_small_machine_keeps_half_of_what_is_left_free() -> None:
    found = budget(4096)
    left = 4096 * MIB - dict(found.items)["overhead"] - NEED.weights_bytes - NEED.activations_bytes
    assert found.num_blocks == left // 2 // NEED.kv_block_bytes


def test_one_sequence_of_full_length_always_fits() -> None:
    assert budget(600).num_blocks == 8192 // 16


def test_a_kv_cache_that_must_follow_from_the_settings_is_never_cut_to_the_memory_of_a_machine() -> None:
    assert budget(10**6, follows_settings=True).num_blocks == budget(10**6).num_blocks
    with pytest.raises(MemoryBudgetError, match="as large on every machine of its release") as refusal:
        budget(4096, follows_settings=True)
    fits = figure(r"--kv-memory-mb (\d+)", refusal)
    assert budget(4096, follows_settings=True, kv_memory_mb=fits).num_blocks == fits * 4
    most = figure(r"--max-num-seqs (\d+) or less", refusal)
    assert budget(4096, follows_settings=True, max_num_seqs=most).num_blocks == most * 8192 // 16


def test_where_one_sequence_is_too_long_for_it_only_a_shorter_one_is_advised() -> None:
    with pytest.raises(MemoryBudgetError, match=r"left; a smaller --max-model-len, here") as refusal:
        budget(600, follows_settings=True)
    assert "kv-memory-mb" not in str(refusal.value)


def test_a_given_size_is_taken_as_it_is() -> None:
    assert budget(4096, kv_memory_mb=200).num_blocks == 800


def test_weights_that_do_not_fit_are_refused_with_what_is_needed() -> None:
    with pytest.raises(MemoryBudgetError, match=r"smaller model") as refusal:
        budget(100)
    needed = figure(r"give it (\d+) MiB", refusal)
    assert refusal.value.fit == pytest.approx(100 / needed, rel=0.02)
    assert budget(needed + 1, max_model_len=16).num_blocks >= 1


@pytest.mark.parametrize(("whole_mib", "is_enough"), [(600, True), (101, False)])
def test_a_share_that_is_too_small_is_named_where_a_larger_one_is_enough(whole_mib: int, is_enough: bool) -> None:
    with pytest.raises(MemoryBudgetError) as refusal:
        budget(100, whole_bytes=whole_mib * MIB)
    assert ("raise --memory-share, by which an engine may use a part of 600 MiB" in str(refusal.value)) == is_enough
    assert ("give it" in str(refusal.value)) != is_enough


def test_a_window_that_does_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(MemoryBudgetError) as refusal:
        budget(500)
    fits = figure(r"--max-model-len (\d+) or less", refusal)
    assert budget(500, max_model_len=fits).num_blocks >= fits // 16


def test_too_much_kv_is_refused_with_what_fits() -> None:
    with pytest.raises(MemoryBudgetError) as refusal:
        budget(1000, kv_memory_mb=900)
    fits = figure(r"--kv-memory-mb (\d+) or less", refusal)
    assert budget(1000, kv_memory_mb=fits).num_blocks == fits * 4


def test_too_little_kv_is_refused_with_both_ways_out() -> None:
    with pytest.raises(MemoryBudgetError) as refusal:
        budget(4096, kv_memory_mb=10)
    assert budget(4096, kv_memory_mb=figure(r"--kv-memory-mb (\d+) or more", refusal)).num_blocks >= 512
    assert budget(4096, kv_memory_mb=10, max_model_len=figure(r"--max-model-len (\d+)", refusal)).num_blocks == 40


@pytest.mark.parametrize("kv_memory_mb", [None, 200])
@pytest.mark.parametrize("tier_mib", [10**6, 500])
def test_a_tier_that_does_not_fit_is_refused_with_one_that_does(tier_mib: int, kv_memory_mb: float | None) -> None:
    budget_it = partial(
        budget_memory,
        NEED,
        available_bytes=900 * MIB,
        block_size=16,
        max_model_len=8192,
        max_num_seqs=4,
        kv_memory_mb=kv_memory_mb,
    )
    with pytest.raises(MemoryBudgetError) as refusal:
        budget_it(tier_bytes=tier_mib * MIB)
    assert refusal.value.param == "kv_tier"
    fits = figure(r"--kv-tier a size of (\d+)M or less", refusal)
    assert dict(budget_it(tier_bytes=fits * MIB).items)["KV tier"] == fits * MIB
    with pytest.raises(MemoryBudgetError):
        budget_it(tier_bytes=(fits + 1) * MIB)


def test_a_tier_is_not_blamed_for_what_would_not_fit_without_it() -> None:
    sizes = {"available_bytes": 430 * MIB, "block_size": 16, "max_model_len": 8192, "max_num_seqs": 4}
    with pytest.raises(MemoryBudgetError, match="smaller model"):
        budget_memory(NEED, tier_bytes=MIB, **sizes)


def figure(pattern: str, refusal: pytest.ExceptionInfo[MemoryBudgetError]) -> int:
    """Returns the figure that a refusal recommends."""
    found = re.search(pattern, refusal.value.message)
    assert found, refusal.value.message
    return int(found[1])


LAYERED = replace(NEED, kv_layer_bytes=(MIB // 32,) * 8)
SIX_OF_EIGHT = [LayerGroup(frozenset({0, 4})), LayerGroup(frozenset({1, 2, 3, 5, 6, 7}), 512)]


def windowed(available_mib: float, groups, *, max_num_seqs: int = 4, kv_memory_mb: float | None = None) -> MemoryBudget:
    return budget_memory(
        LAYERED,
        available_bytes=int(available_mib * MIB),
        block_size=16,
        max_model_len=32768,
        max_num_seqs=max_num_seqs,
        kv_memory_mb=kv_memory_mb,
        groups=groups,
        max_batched_tokens=1024,
    )


def test_layers_with_a_window_get_what_sequences_see_and_the_ends_of_cached_prefixes() -> None:
    found = windowed(8192, SIX_OF_EIGHT)
    full, window = found.groups
    assert full.num_blocks == 4 * 32768 // 16
    assert window.num_blocks == 4 * (512 // 16 + 1) + 1024 // 16 + 1 + full.num_blocks // 8
    assert dict(found.items)["KV cache"] == (2 * full.num_blocks + 6 * window.num_blocks) * (MIB // 32)
    assert dict(windowed(8192, []).items)["KV cache"] > 2.5 * dict(found.items)["KV cache"]


def test_memory_that_windows_save_holds_more_positions() -> None:
    plain, found = windowed(2000, [], max_num_seqs=64), windowed(2000, SIX_OF_EIGHT, max_num_seqs=64)
    assert found.groups[0].num_blocks > 1.3 * plain.groups[0].num_blocks
    assert dict(found.items)["KV cache"] <= dict(plain.items)["KV cache"] + 8 * MIB


def test_a_cache_of_windows_alone_takes_the_memory_that_it_was_given() -> None:
    found = windowed(4096, [LayerGroup(frozenset(range(8)), 512)], kv_memory_mb=400)
    assert 398 * MIB < dict(found.items)["KV cache"] <= 400 * MIB
    assert found.groups[0].num_blocks == 400 * 4


def test_where_windows_leave_too_little_the_figure_that_would_do_is_said() -> None:
    with pytest.raises(MemoryBudgetError) as refused:
        windowed(4096, SIX_OF_EIGHT, kv_memory_mb=50)
    needed = int(re.search(r"--kv-memory-mb (\d+)", str(refused.value)).group(1))
    assert needed < 32768 // 16 // 4, "less than what a cache of all positions in all layers takes"
    assert windowed(4096, SIX_OF_EIGHT, kv_memory_mb=needed).groups[0].num_blocks >= 32768 // 16


HYBRID = replace(NEED, kv_layer_bytes=(MIB // 8, 0, 0, 0), kv_block_bytes=MIB // 8, state_bytes=8 * MIB)
ONE_OF_FOUR = [LayerGroup(frozenset({0})), LayerGroup(frozenset({1, 2, 3}), is_state=True)]
PURE = replace(NEED, kv_layer_bytes=(0,) * 4, kv_block_bytes=0, state_bytes=8 * MIB)
ALL_STATES = [LayerGroup(frozenset(range(4)), is_state=True)]


def with_states(
    available_mib: float, need=HYBRID, groups=ONE_OF_FOUR, *, max_num_seqs: int = 16, kv_memory_mb: float | None = None
) -> MemoryBudget:
    return budget_memory(
        need,
        available_bytes=int(available_mib * MIB),
        block_size=16,
        max_model_len=8192,
        max_num_seqs=max_num_seqs,
        kv_memory_mb=kv_memory_mb,
        groups=groups,
    )


def test_states_are_an_item_of_their_own_and_every_sequence_has_four() -> None:
    found = with_states(10**6)
    full, states = found.groups
    assert (full.num_blocks, states.num_blocks, states.is_state) == (16 * 512, 4 * 16, True)
    assert dict(found.items)["states"] == 64 * 8 * MIB
    assert dict(found.items)["KV cache"] == 16 * 512 * MIB // 8


def test_little_memory_has_states_for_fewer_sequences() -> None:
    found = with_states(1000)
    full, states = found.groups
    assert full.num_blocks < 16 * 512
    assert 4 <= states.num_blocks < 64
    assert dict(found.items)["KV cache"] + dict(found.items)["states"] <= (1000 - 20 - 50 - 384) * MIB


def test_the_figure_that_holds_one_sequence_and_its_states_is_said() -> None:
    with pytest.raises(MemoryBudgetError) as refused:
        with_states(4096, kv_memory_mb=40)
    needed = figure(r"--kv-memory-mb (\d+) or more", refused)
    assert needed == 512 // 8 + 4 * 8
    assert [group.num_blocks for group in with_states(4096, kv_memory_mb=needed).groups] == [512, 4]


def test_a_model_of_states_alone_takes_no_memory_for_positions() -> None:
    found = with_states(4096, PURE, ALL_STATES)
    assert [group.num_blocks for group in found.groups] == [64]
    assert dict(found.items)["KV cache"] == 0
    assert with_states(4096, PURE, ALL_STATES, kv_memory_mb=40).groups[0].num_blocks == 4
    with pytest.raises(MemoryBudgetError, match="--kv-memory-mb 32 or more"):
        with_states(4096, PURE, ALL_STATES, kv_memory_mb=20)


@pytest.mark.parametrize("groups", [(), SIX_OF_EIGHT], ids=["plain", "windows"])
@pytest.mark.parametrize("kv_memory_mb", [None, 0.01, 0.3, 0.9, 1, 3, 10, 50, 500])
def test_every_advice_works_when_it_is_followed(groups, kv_memory_mb: float | None) -> None:
    """Of small models too, whose cache takes less than a MiB."""
    num_advices = 0
    for layer_bytes, left_mib, max_model_len in itertools.product((700, 9_000, 170_000), (0.7, 3, 40), (64, 1000, 8192)):
        need = replace(NEED, kv_layer_bytes=(layer_bytes,) * 8, kv_block_bytes=8 * layer_bytes)
        settings = {"max_model_len": max_model_len, "kv_memory_mb": kv_memory_mb}
        budget_it = partial(
            budget_memory,
            need,
            available_bytes=int((454 + left_mib) * MIB),
            block_size=16,
            max_num_seqs=4,
            groups=groups,
            max_batched_tokens=64,
        )
        try:
            budget_it(**settings)
        except MemoryBudgetError as refusal:
            message = refusal.message
        else:
            continue
        if found := re.search(r"--kv-memory-mb ([\d.]+) or", message):
            num_advices += 1
            budget_it(**{**settings, "kv_memory_mb": float(found[1])})
        for left_out, length in re.findall(r"(leave --kv-memory-mb out and )?set --max-model-len (\d+)", message):
            num_advices += 1
            budget_it(max_model_len=int(length), kv_memory_mb=None if left_out else kv_memory_mb)
    assert num_advices
