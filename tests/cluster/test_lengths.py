"""Lengths of answers are learned from counts, and whatever is predicted, requests are answered."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.cluster import ROUTERS, ReplicaSnapshot
from cloister.cluster.lengths import EDGES, LengthCurves, LengthForecasts, groups_of
from cloister.cluster.routers import RouterContext
from cloister.cluster.virtual import fuzz
from cloister.cluster.virtual.drawing import LENGTH_ERRORS
from cloister.cluster.virtual.scenario import Job, LengthError, Scenario
from cloister.engine.replica_snapshot import RequestSnapshot
from cloister.kv import PrefixKeys
from cloister.types.errors import QueueFullError
from cloister.types.events import Ended
from cloister.types.request import FinishReason, Grammar, GrammarKind, PoolingParams, Request, SamplingParams
from cloister.types.scope import Scope, ScopeKind

ROOM = 100_000


def ask(num_tokens: int = 10, name: str = "r", **sampling: object) -> Request:
    chosen = msgspec.structs.replace(SamplingParams(), **sampling)
    return Request(request_id=name, token_ids=[1] * num_tokens, sampling=chosen)


def learned(lengths: list[int], request: Request | None = None) -> LengthCurves:
    curves = LengthCurves(ROOM)
    for length in lengths:
        curves.learn(request or ask(), length, is_whole=True)
    return curves


def end(name: str, num_tokens: int, reason: FinishReason = FinishReason.STOP, *, last: bool = True) -> Ended:
    return Ended(
        request_id=name, seq_id=0, index=0, now_s=1.0, reason=reason, num_prompt_tokens=10, num_output_tokens=num_tokens,
        num_cached_tokens=0, arrival_s=0.0, first_token_s=0.5, last=last,
    )  # fmt: skip


def test_mean_and_quantiles_become_those_of_the_answers() -> None:
    draw = random.Random(1)
    lengths = [1 + int(draw.expovariate(1 / 120)) for _ in range(3000)]
    curves = learned(lengths)
    assert curves.expect(ask()) == pytest.approx(statistics.fmean(lengths), rel=0.1)
    for share in (0.5, 0.9):
        below = statistics.fmean(length <= curves.quantile(ask(), share) for length in lengths)
        assert below == pytest.approx(share, abs=0.03)


def test_no_answer_exceeds_the_percentile_of_answers_that_all_have_one_length() -> None:
    assert learned([6] * 300).quantile(ask(), 0.9) == 6


def test_prompts_of_other_lengths_are_told_apart() -> None:
    curves = LengthCurves(ROOM)
    for _ in range(200):
        curves.learn(ask(100), 20, is_whole=True)
        curves.learn(ask(1000), 400, is_whole=True)
    assert curves.quantile(ask(100), 0.5) == pytest.approx(20, rel=0.2)
    assert curves.quantile(ask(1000), 0.5) == pytest.approx(400, rel=0.2)


def test_a_kind_of_request_that_is_new_is_expected_to_be_like_all() -> None:
    curves = learned([50] * 200)
    grammar = Grammar(GrammarKind.JSON_OBJECT)
    assert curves.expect(ask(5000, grammar=grammar)) == pytest.approx(curves.expect(ask()), rel=0.1)


def test_the_longer_an_answer_with_a_heavy_tail_is_the_more_is_expected_of_it() -> None:
    draw = random.Random(2)
    curves = learned([int(10 * draw.paretovariate(1.2)) for _ in range(3000)])
    expected = [curves.expect(ask(), num_done) for num_done in (0, 40, 160, 640)]
    assert expected == sorted(expected)
    assert expected[-1] > 4 * expected[0]


def test_answers_that_were_cut_off_count_as_longer_ones() -> None:
    naive, curves = LengthCurves(ROOM), LengthCurves(ROOM)
    draw = random.Random(3)
    for _ in range(2000):
        length, limit = 1 + int(draw.expovariate(1 / 200)), draw.choice((50, 1000))
        naive.learn(ask(), min(length, limit), is_whole=True)
        curves.learn(ask(), min(length, limit), is_whole=length <= limit)
    assert curves.expect(ask()) == pytest.approx(200, rel=0.15)
    assert naive.expect(ask()) < 150


def test_no_more_is_expected_than_a_request_allows() -> None:
    curves = learned([500] * 100)
    assert curves.expect(ask(max_tokens=40)) <= 40
    assert curves.expect(ask(max_tokens=40), num_done=39) == 1.0
    assert curves.expect(ask(max_tokens=40), num_done=40) == 0.0
    assert curves.expect(ask(ROOM - 3)) <= 3
    assert curves.expect(ask(min_tokens=900)) >= 900
    assert curves.expect(Request(request_id="r", token_ids=[1], sampling=SamplingParams(), pooling=PoolingParams())) == 0.0


def test_an_answer_that_only_its_limit_ends_is_known_exactly_and_teaches_nothing() -> None:
    curves = learned([5] * 100)
    fixed = ask(max_tokens=300, ignore_eos=True)
    assert (curves.expect(fixed), curves.expect(fixed, 100), curves.quantile(fixed, 0.9)) == (300, 200, 300)
    before = curves.expect(ask())
    for _ in range(100):
        curves.learn(fixed, 300, is_whole=False)
    assert curves.expect(ask()) == before


def test_a_workload_that_changes_is_followed() -> None:
    curves = learned([400] * 3000 + [20] * 6000)
    assert curves.quantile(ask(), 0.5) == pytest.approx(20, rel=0.2)


def test_neither_text_nor_tenant_nor_adapter_is_a_feature() -> None:
    plain = ask(20)
    other = msgspec.structs.replace(
        plain, request_id="q", token_ids=list(range(20)), tenant="somebody", adapter="ab" * 32, priority=3,
        scope=Scope(ScopeKind.TENANT, b"other"), sampling=SamplingParams(seed=4, logit_bias={1: 2.0}),
    )  # fmt: skip
    assert groups_of(plain) == groups_of(other)
    assert groups_of(plain) != groups_of(ask(20, temperature=0.0))


@given(
    lengths=st.lists(st.tuples(st.integers(0, 3_000_000), st.booleans()), max_size=40),
    num_prompt=st.integers(1, 4000),
    num_done=st.integers(0, 4000),
)
def test_what_is_expected_is_finite_and_within_bounds(lengths: list[tuple[int, bool]], num_prompt: int, num_done: int) -> None:
    curves = LengthCurves(4096)
    for length, is_whole in lengths:
        curves.learn(ask(num_prompt), length, is_whole=is_whole)
    room = 4096 - num_prompt
    assert 0.0 <= curves.expect(ask(num_prompt), num_done) <= max(0, room - num_done)
    p50, p90 = curves.quantile(ask(num_prompt), 0.5), curves.quantile(ask(num_prompt), 0.9)
    assert 0.0 <= p50 <= p90 <= room


def test_weights_stay_in_bounds_over_many_answers() -> None:
    curves = learned([30] * 70_000)
    assert curves.quantile(ask(), 0.5) == pytest.approx(30, rel=0.15)
    assert EDGES[-1] == 1 << 20


def test_errors_are_counted_for_answers_that_the_model_ended() -> None:
    forecasts = LengthForecasts(learned([100] * 50))
    for name, num_tokens, reason in (
        ("a", 100, FinishReason.STOP),
        ("b", 10, FinishReason.ABORT),
        ("c", 500, FinishReason.STOP),
        ("d", 50, FinishReason.LENGTH),
    ):
        forecasts.add(ask(name=name))
        forecasts.end(end(name, num_tokens, reason))
    assert len(forecasts) == 0
    assert (forecasts.errors.num_answers, forecasts.errors.num_tokens, forecasts.errors.num_above_p90) == (2, 600, 1)
    assert 390 < forecasts.errors.num_error_tokens < 420


def test_a_request_of_several_answers_is_forgotten_with_the_last_one() -> None:
    forecasts = LengthForecasts(learned([100] * 50))
    forecasts.add(ask(n=2))
    forecasts.end(end("r", 60, last=False))
    assert forecasts.remaining(RequestSnapshot("r", 10, 40, num_sequences=1)) > 30
    forecasts.end(end("r", 110))
    assert forecasts.remaining(RequestSnapshot("r", 10, 40, num_sequences=1)) == 0.0
    assert forecasts.errors.num_answers == 2


# Routers

COST = (0.01, 0.001, 0.0, 0.0)


def pick(name: str, replicas: list[ReplicaSnapshot], seed: int = 0) -> int:
    return ROUTERS.get(name)(RouterContext(PrefixKeys("fp", 16), random.Random(seed))).pick(ask(), replicas)


def full(index: int, num_requests: int, num_expected: float, **others: object) -> ReplicaSnapshot:
    plain = ReplicaSnapshot(
        index, num_requests=num_requests, num_sequences=num_requests, num_slots=4, num_expected_tokens=num_expected
    )
    return replace(plain, **others)  # type: ignore[arg-type]


def test_where_slots_are_taken_the_one_that_is_free_soonest_counts() -> None:
    assert pick("least_work", [full(0, 4, 4000.0), full(1, 5, 50.0)]) == 1
    assert pick("least_load", [full(0, 4, 4000.0), full(1, 5, 50.0)]) == 0


def test_while_slots_are_free_the_number_of_requests_counts() -> None:
    assert pick("least_work", [full(0, 3, 10.0), full(1, 2, 9000.0)]) == 1
    assert pick("least_work", [full(0, 4, 4.0), full(1, 3, 9000.0)]) == 1


@given(st.lists(st.tuples(st.integers(0, 60), st.floats(0.0, 1e9)), min_size=1, max_size=6), st.integers(0, 3))
def test_no_prediction_fills_one_replica_beside_others_that_are_idle(loads: list[tuple[int, float]], seed: int) -> None:
    replicas = [full(index, number, expected, cost=COST) for index, (number, expected) in enumerate(loads)]
    for name in ("least_work", "conductor"):
        chosen = pick(name, replicas, seed)
        assert loads[chosen][0] <= 2 * min(number for number, _ in loads) + 4


def admit(replicas: list[ReplicaSnapshot], max_ttft_s: float) -> None:
    ROUTERS.get("conductor")(RouterContext(PrefixKeys("fp", 16), random.Random(0), max_ttft_s)).admit(ask(), replicas)


def test_a_request_that_would_wait_too_long_for_a_slot_is_refused_early() -> None:
    waiting = full(0, 12, 12 * 200.0, cost=COST)  # nine must end first, each by 200 steps of 14 ms, four at a time
    with pytest.raises(QueueFullError, match=r"first token would come in 6\.3 s, after 2\.0 s"):
        admit([waiting], 2.0)
    admit([waiting], 7.0)
    admit([waiting, full(1, 3, 600.0, cost=COST)], 2.0)


@given(st.floats(0.0, 1e12))
def test_no_prediction_refuses_a_request_while_a_slot_is_free(expected: float) -> None:
    admit([full(0, 9, expected, cost=COST), full(1, 3, expected, cost=COST)], 0.1)
    few = full(1, 2, expected, cost=COST, num_slots=1)  # its memory is short
    admit([few, full(0, 20, expected, cost=COST, num_slots=64)], 0.1)


def test_a_client_is_told_to_come_back_within_a_minute_however_much_is_predicted() -> None:
    with pytest.raises(QueueFullError) as refusal:
        admit([full(0, 12, 1e9, cost=COST)], 2.0)
    assert refusal.value.retry_after_s == 60.0


def test_memory_of_answers_that_end_before_the_prompt_is_computed_counts_as_free() -> None:
    prefill = ReplicaSnapshot(0, role="prefill", num_pending_tokens=1000, cost=COST)
    for num_expected, is_refused in ((40.0, False), (40_000.0, True)):
        decode = full(1, 4, num_expected, role="decode", cost=COST, num_used_blocks=80, num_total_blocks=100)
        if is_refused:
            with pytest.raises(QueueFullError, match="memory for the answer"):
                admit([prefill, decode], 60.0)
        else:
            admit([prefill, decode], 60.0)


@pytest.mark.parametrize("router", ["least_work", "conductor"])
@pytest.mark.parametrize("error", LENGTH_ERRORS)
def test_wrong_predictions_change_no_answer_and_end_no_request(router: str, error: LengthError) -> None:
    draw = random.Random(4)
    jobs = tuple(
        Job(
            at_s=round(0.02 * number, 2),
            prompt="".join(draw.choice("abcdef ") for _ in range(draw.choice((2, 30)))),
            max_tokens=draw.choice((2, 4, 60)),
            num_stop_ids=draw.choice((0, 8)),
            n=draw.choice((1, 1, 2)),
            ignores_eos=False,
        )
        for number in range(12)
    )
    outcome = fuzz.replay(Scenario(seed=1, router=router, length_error=error, max_num_seqs=2, max_waiting=64, jobs=jobs))
    assert outcome.violations == ()
    assert outcome.num_requests == len(jobs)
