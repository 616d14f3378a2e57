from fractions import Fraction

import numpy as np
import pytest

from benchmarks.orca import heavy_tailed_lengths
from cloister.bench.settings import ArrivalsConfig, WorkloadConfig
from cloister.bench.traces import Trace, TraceRow
from cloister.bench.workloads import Recipe, WorkItem, Workload, build_workload, load_workload, parse_scale
from cloister.types.errors import ConfigError


def trace_of(*rows):
    return Trace("t", rows)


PLAIN = trace_of(TraceRow(0.0, 100, 10), TraceRow(2.0, 50, 300), TraceRow(6.0, 7, 1))
SHARED = trace_of(TraceRow(0.0, 1100, 5, None, (0, 1, 2)), TraceRow(1.0, 1300, 5, None, (0, 1, 9)))


def test_equal_hash_ids_give_equal_prefixes_and_only_those():
    first, second = (item.prompt for item in build_workload(SHARED, Recipe()).items)
    assert first[:1024] == second[:1024]
    assert first[1024:1100] != second[1024:1100]
    assert (len(first), len(second)) == (1100, 1300)


def test_shared_prefixes_survive_scaling():
    first, second = (item.prompt for item in build_workload(SHARED, Recipe(scale=Fraction(1, 16))).items)
    assert (len(first), len(second)) == (69, 82)
    assert first[:64] == second[:64]
    assert first[64:69] != second[64:69]


def test_the_share_of_prompts_that_are_repeated_is_counted():
    rows = [[1] * 64, [2] * 64, [1] * 32 + [3] * 32, [2] * 64]
    items = tuple(WorkItem(0.0, tokens, 64, 1) for tokens in rows)
    assert Workload("some", items[:2]).count_repeated() == 0
    assert Workload("some", items).count_repeated() == (32 + 64) / 256
    texts = tuple(WorkItem(0.0, text, 0, 1) for text in ("a" * 32, "a" * 32 + "b" * 32))
    assert Workload("text", texts).count_repeated() == 32 / 96
    assert Workload("none", ()).count_repeated() == 0


def test_lengths_are_scaled_up_to_whole_tokens():
    items = build_workload(PLAIN, Recipe(scale=Fraction(1, 16))).items
    assert [(i.num_input_tokens, i.num_output_tokens) for i in items] == [(7, 1), (4, 19), (1, 1)]


def test_a_seed_repeats_the_workload_and_another_one_does_not():
    recipe = Recipe(arrivals="poisson", rate=3.0, seed=5)
    assert build_workload(PLAIN, recipe) == build_workload(PLAIN, recipe)
    assert build_workload(PLAIN, recipe) != build_workload(PLAIN, Recipe(arrivals="poisson", rate=3.0, seed=6))


def test_recorded_arrivals_keep_their_shape_at_another_rate():
    assert [i.arrival_s for i in build_workload(PLAIN, Recipe()).items] == [0, 2, 6]
    assert [i.arrival_s for i in build_workload(PLAIN, Recipe(rate=1.0)).items] == pytest.approx([0, 2 / 3, 2])


def test_poisson_arrivals_have_the_rate_and_the_spread():
    trace = trace_of(*[TraceRow(None, 1, 1)] * 4000)
    times = [i.arrival_s for i in build_workload(trace, Recipe(arrivals="poisson", rate=20.0)).items]
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.06)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.06)


def test_a_burst_arrives_at_once():
    assert {i.arrival_s for i in build_workload(PLAIN, Recipe(arrivals="burst")).items} == {0.0}


def test_requests_that_do_not_fit_are_left_out_and_counted():
    workload = build_workload(PLAIN, Recipe(max_model_len=120))
    assert [i.num_input_tokens for i in workload.items] == [100, 7]
    assert workload.num_skipped == 1


def test_made_up_tokens_stay_inside_the_vocabulary():
    prompt = build_workload(PLAIN, Recipe(vocab_size=40)).items[0].prompt
    assert min(prompt) >= 32
    assert max(prompt) < 40


@pytest.mark.parametrize(("given", "times"), [({}, [0.0] * 5), ({"rate": 1000.0}, None)])
def test_requests_without_times_and_without_a_rate_leave_at_once(given, times):
    workload = load_workload(WorkloadConfig(num_requests=5), ArrivalsConfig(**given))
    due = [item.arrival_s for item in workload.items]
    assert due == times if times else len(set(due)) == 5


@pytest.mark.parametrize(
    ("trace", "recipe", "words"),
    [
        (trace_of(TraceRow(None, 1, 1)), {}, "no arrival times"),
        (PLAIN, {"arrivals": "poisson"}, "need a rate"),
        (PLAIN, {"arrivals": "burst", "rate": 1.0}, "burst has no rate"),
        (PLAIN, {"rate": 0.0}, "above 0"),
        (PLAIN, {"num_requests": 0}, "at least 1"),
        (PLAIN, {"max_model_len": 2}, "no request of t fits"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(trace, recipe, words):
    with pytest.raises(ConfigError, match=words):
        build_workload(trace, Recipe(**recipe))


@pytest.mark.parametrize("text", ["", "0", "-1/2", "a", "1/0"])
def test_a_scale_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="length scale"):
        parse_scale(text)


def test_heavy_tailed_lengths_have_many_short_and_some_long_ones():
    lengths = heavy_tailed_lengths(8, 1024, 5000, seed=1)
    assert min(lengths) >= 8
    assert max(lengths) <= 1024
    assert np.median(lengths) < 20
    assert sum(length > 500 for length in lengths) > 20
