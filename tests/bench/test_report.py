from itertools import product

import numpy as np
import pytest

from cloister.bench.measure import Objectives
from cloister.bench.recorder import RequestRecord
from cloister.bench.report import AloneModel, AloneObjective, LatencyObjective, fit_costs, list_figures, summarise
from cloister.types.errors import EngineError


def record(number=0, due_s=0.0, times=(1.0, 2.0, 4.0), num_input=10, failure=None, cached=0):
    deliveries = tuple((t, 1) for t in times)
    return RequestRecord(number, due_s, times[-1] if times else due_s, num_input, len(times), deliveries, cached, failure)


def test_latencies_count_from_when_the_request_was_due():
    one = record(due_s=0.5)
    assert one.ttft_s == 0.5
    assert one.e2e_s == 3.5
    assert one.tpot_s == 1.5
    assert one.gaps_s == [1.0, 2.0]


def test_a_run_is_summed_up_in_tokens_and_seconds():
    summary = summarise("run", [record(), record(1, due_s=1.0, times=(3.0, 10.0), cached=4)])
    assert summary.duration_s == 10
    assert summary.num_output_tokens == 5
    assert summary.output_tokens_per_s == 0.5
    assert summary.requests_per_s == 0.2
    assert summary.num_cached_tokens == 4
    assert summary.ttft.max == 2
    assert summary.tbt.p50 == 2


def test_failures_are_counted_by_kind_and_are_never_good():
    records = [record(), record(1, times=(), failure="http_429"), record(2, times=(1.0,), failure="timeout")]
    summary = summarise("run", records, LatencyObjective(ttft_s=100))
    assert summary.failures == {"http_429": 1, "timeout": 1}
    assert summary.num_ok == 1
    assert summary.slo_share == pytest.approx(1 / 3)
    assert summary.slo_met is False
    assert summary.num_output_tokens == 3
    assert ("failed: http_429", "1") in list_figures(summary)


def test_goodput_counts_only_requests_inside_both_limits():
    records = [record(), record(1, due_s=-9.0), record(2, times=(1.0, 9.0))]
    summary = summarise("run", records, LatencyObjective(ttft_s=2, tbt_s=3))
    assert summary.goodput_rps == pytest.approx(1 / 18)


def test_time_alone_is_fitted_without_negative_costs():
    records = [
        RequestRecord(i, 0, t, n_in, n_out, ((t, n_out),))
        for i, (n_in, n_out) in enumerate([(10, 5), (100, 5), (50, 40), (500, 1)])
        for t in [0.01 + 0.002 * n_in + 0.03 * n_out]
    ]
    alone = AloneModel.fit(records)
    assert (alone.base_s, alone.input_s, alone.output_s) == pytest.approx((0.01, 0.002, 0.03))


def test_costs_that_shrink_with_length_are_held_at_zero():
    records = [RequestRecord(i, 0, t, n, 1, ((t, 1),)) for i, (n, t) in enumerate([(10, 3.0), (20, 2.0), (30, 1.0)])]
    assert AloneModel.fit(records).input_s == 0


def test_the_default_objective_is_half_as_long_again_as_alone():
    objective = AloneObjective(AloneModel(base_s=2.0, input_s=0.0, output_s=0.0))
    assert objective.met_by(record(times=(1.0, 3.0)))
    assert not objective.met_by(record(times=(1.0, 3.1)))


def test_a_server_that_answers_nothing_alone_is_one_line_that_says_why():
    objectives = Objectives()
    with pytest.raises(EngineError, match=r"sent alone \(http_404\); .*--api-model"):
        objectives.settle([record(times=(), failure="http_404")])
    with pytest.raises(EngineError, match=r"sent alone \(http_429, timeout\); look at the server's log first$"):
        objectives.settle([record(times=(), failure="timeout"), record(times=(), failure="http_429")])


def test_an_objective_is_met_by_nine_tenths():
    good, slow = record(), record(times=(5.0, 6.0))
    objective = LatencyObjective(ttft_s=1.0)
    assert summarise("run", [good] * 9 + [slow], objective).slo_met is True
    assert summarise("run", [good] * 8 + [slow] * 2, objective).slo_met is False


def test_a_run_without_requests_is_refused():
    with pytest.raises(ValueError, match="without requests"):
        summarise("run", [])


def test_costs_are_the_best_of_those_that_are_not_negative() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        features = draw.random((12, 4)) * 10.0 ** draw.uniform(-6, 3, 4)
        costs = features @ (draw.normal(size=4) / features.mean(axis=0)) + draw.normal(size=12)
        fitted = np.array(fit_costs(features, costs))
        assert (fitted >= 0).all()
        best = float(np.square(costs).sum())
        for chosen in product((False, True), repeat=4):
            if any(chosen):
                part = features[:, list(chosen)]
                found = np.linalg.lstsq(part, costs, rcond=None)[0]
                if (found >= 0).all():
                    best = min(best, float(np.square(part @ found - costs).sum()))
        assert np.square(features @ fitted - costs).sum() == pytest.approx(best, rel=1e-6)


def test_a_cost_that_others_explain_better_is_given_up() -> None:
    features = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [0.1, 0.1, 0.5]])
    fitted = fit_costs(features, np.array([1.0, 1.0, 0.1]))  # the third column is used first, and would become negative
    assert fitted == pytest.approx([2.02 / 2.04, 2.02 / 2.04, 0.0])


def test_a_cost_without_any_number_is_zero() -> None:
    features = np.array([[1.0, 0.0], [2.0, 0.0], [4.0, 0.0]])
    assert fit_costs(features, np.array([3.0, 6.0, 12.0])) == pytest.approx([3.0, 0.0])
