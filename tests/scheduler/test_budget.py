import random

import pytest

from cloister.scheduler import BudgetConfig, StepBudget, StepCost, StepSize

TRUTH = (5e-3, 1e-4, 1e-8, 1e-7)


def true_cost(size, truth=TRUTH):
    return truth[0] + sum(per * count for per, count in zip(truth[1:], size, strict=True))


def random_size(chance):
    return StepSize(chance.randint(1, 2000), chance.randint(1, 4_000_000), chance.randint(1, 20_000))


def taught(num_steps=300, noise=0.0, spike=None):
    cost, chance = StepCost(), random.Random(1)
    for i in range(num_steps):
        size = random_size(chance)
        seconds = true_cost(size) * (1 + noise * chance.uniform(-1, 1))
        cost.learn(size, seconds * (50 if spike and i % spike == 0 and i > 50 else 1))
    return cost


def test_the_cost_of_a_step_is_learned():
    assert taught().coefficients == pytest.approx(TRUTH, rel=0.01)


def test_noise_and_lone_slow_steps_do_not_mislead():
    size = StepSize(500, 1_000_000, 10_000)
    assert taught(noise=0.1, spike=25).predict(size) == pytest.approx(true_cost(size), rel=0.25)


def test_a_change_of_speed_is_followed():
    cost, chance = taught(), random.Random(2)
    slower = tuple(2 * value for value in TRUTH)
    for _ in range(2000):
        size = random_size(chance)
        cost.learn(size, true_cost(size, slower))
    size = StepSize(1000, 100_000, 5_000)
    assert cost.predict(size) == pytest.approx(true_cost(size, slower), rel=0.1)


def test_the_cost_of_prefill_is_learned_at_once_after_many_decodes():
    cost, chance = StepCost(), random.Random(3)
    for _ in range(2000):
        decodes = StepSize(8, 8 * 300, 8 * 300)
        cost.learn(decodes, true_cost(decodes) * (1 + 0.02 * chance.uniform(-1, 1)))
    for start in range(0, 64, 8):
        size = decodes.plus(start, 8)
        cost.learn(size, true_cost(size))
    size = decodes.plus(64, 64)
    assert cost.predict(size) == pytest.approx(true_cost(size), rel=0.2)


def test_many_equal_steps_do_not_unlearn_what_they_do_not_show():
    cost = taught()
    decodes = StepSize(16, 16 * 300, 16 * 300)
    for _ in range(20_000):
        cost.learn(decodes, true_cost(decodes) * 1.02)
    size = StepSize(1000, 0, 0)
    assert cost.predict(size) == pytest.approx(true_cost(size), rel=0.3)


def test_thousands_of_prompts_in_chunks_never_break_the_fit():
    cost, chance, size = StepCost(), random.Random(0), StepSize()
    for _ in range(1500):
        length = int(10 ** chance.uniform(2, 5))
        for start in range(0, length, 2048):
            size = StepSize().plus(start, min(2048, length - start))
            cost.learn(size, 0.003 + 2e-4 * size.num_tokens + 1.6e-7 * size.num_attended)
    assert cost.predict(size) == pytest.approx(0.003 + 2e-4 * size.num_tokens + 1.6e-7 * size.num_attended, rel=0.02)


def test_prefill_that_costs_more_in_large_steps_does_not_spoil_the_forecast_of_decodes():
    """A line through such steps starts below zero; cut off at zero, it says several times too much for a short step."""
    cost, chance = StepCost(), random.Random(4)

    def true_s(size):
        return 4e-4 + 4e-5 * size.num_tokens + 4e-8 * size.num_tokens**2 + 5e-8 * size.num_read

    def take(size):
        cost.learn(size, true_s(size) * (1 + 0.05 * chance.uniform(-1, 1)))

    for _ in range(100):
        take(StepSize().plus(0, chance.randint(100, 2000)))
    for step in range(100):
        decodes = StepSize(16, 16 * (256 + step), 16 * (256 + step))
        take(decodes)
    for size in (decodes, decodes.plus(0, 16), decodes.plus(0, 64)):
        assert cost.predict(size) == pytest.approx(true_s(size), rel=0.25)


def test_no_coefficient_is_negative_and_the_others_make_up_for_it():
    cost, chance = StepCost(), random.Random(5)
    for _ in range(300):
        num_tokens = chance.randint(100, 1000)
        cost.learn(StepSize(num_tokens, 100.0 * num_tokens, 100), 1e-6 * num_tokens**1.3)
    assert min(cost.coefficients) >= 0.0
    for num_tokens in (200, 800):
        size = StepSize(num_tokens, 100.0 * num_tokens, 100)
        assert cost.predict(size) == pytest.approx(1e-6 * num_tokens**1.3, rel=0.3)


def test_a_step_that_took_no_time_says_nothing():
    cost = taught()
    before = cost.coefficients
    cost.learn(StepSize(100, 100, 100), 0.0)
    assert cost.coefficients == before


def test_a_chunk_fills_the_time_that_decodes_leave():
    cost = taught()
    budget = StepBudget(cost, BudgetConfig(max_tokens=4096, max_stall=2.0))
    for _ in range(10):
        budget.spend(100, 1)
    before = budget.predicted_s
    budget.bound_by_decodes(budget.size)
    chunk = budget.fit(0, 4096)
    budget.spend(0, chunk)
    assert chunk % 8 == 0
    assert 1.5 * before < budget.predicted_s <= 2.0 * before


def test_a_target_time_bounds_every_step():
    budget = StepBudget(taught(), BudgetConfig(max_tokens=4096, target_s=0.05))
    budget.spend(0, budget.fit(0, 4096))
    assert 0.04 < budget.predicted_s <= 0.05


def test_a_prompt_is_never_starved_for_time_alone():
    budget = StepBudget(taught(), BudgetConfig(max_tokens=4096, target_s=1e-6))
    assert budget.fit(0, 4096) == 8
    assert budget.fit(0, 4096, strict=True) == 0


def test_without_decodes_a_prompt_takes_all_tokens():
    budget = StepBudget(taught(), BudgetConfig(max_tokens=512))
    budget.bound_by_decodes(budget.size)
    assert budget.fit(0, 4096) == 512


def test_before_anything_was_learned_only_tokens_count():
    budget = StepBudget(StepCost(), BudgetConfig(max_tokens=512, target_s=1e-9))
    assert budget.fit(0, 4096) == 512
