import random

import pytest

from cloister.sched import BudgetConfig, StepBudget, StepCost


def taught(a=5e-3, b=1e-4, c=1e-8, num_steps=300, noise=0.0, spike=None):
    cost, chance = StepCost(), random.Random(1)
    for i in range(num_steps):
        tokens, attended = chance.randint(1, 2000), chance.randint(1, 4_000_000)
        seconds = (a + b * tokens + c * attended) * (1 + noise * chance.uniform(-1, 1))
        cost.learn(tokens, attended, seconds * (50 if spike and i % spike == 0 and i > 50 else 1))
    return cost


def test_the_cost_of_a_step_is_learned():
    assert taught().coefficients == pytest.approx((5e-3, 1e-4, 1e-8), rel=0.01)


def test_noise_and_lone_slow_steps_do_not_mislead():
    cost = taught(noise=0.1, spike=25)
    assert cost.predict(500, 1_000_000) == pytest.approx(5e-3 + 0.05 + 0.01, rel=0.25)


def test_a_change_of_speed_is_followed():
    cost = taught()
    chance = random.Random(2)
    for _ in range(2000):
        tokens = chance.randint(1, 2000)
        cost.learn(tokens, 0, 1e-2 + 2e-4 * tokens)
    assert cost.predict(1000, 0) == pytest.approx(0.21, rel=0.1)


def test_many_equal_steps_do_not_unlearn_what_they_do_not_show():
    cost = taught()
    for _ in range(20_000):
        cost.learn(16, 16 * 300, (5e-3 + 16e-4) * 1.02)
    assert cost.predict(1000, 0) == pytest.approx(0.105, rel=0.3)


def test_a_chunk_fills_the_time_that_decodes_leave():
    cost = taught()
    budget = StepBudget(cost, BudgetConfig(max_tokens=4096, max_stall=2.0))
    for _ in range(10):
        budget.spend(100, 1)
    before = budget.predicted_s
    budget.bound_by_decodes()
    chunk = budget.fit(0, 4096)
    budget.spend(0, chunk)
    assert chunk % 32 == 0
    assert 1.5 * before < budget.predicted_s <= 2.0 * before


def test_a_target_time_bounds_every_step():
    budget = StepBudget(taught(), BudgetConfig(max_tokens=4096, target_s=0.05))
    budget.spend(0, budget.fit(0, 4096))
    assert 0.04 < budget.predicted_s <= 0.05


def test_a_prompt_is_never_starved_for_time_alone():
    budget = StepBudget(taught(), BudgetConfig(max_tokens=4096, target_s=1e-6))
    assert budget.fit(0, 4096) == 32
    assert budget.fit(0, 4096, strict=True) == 0


def test_without_decodes_a_prompt_takes_all_tokens():
    budget = StepBudget(taught(), BudgetConfig(max_tokens=512))
    budget.bound_by_decodes()
    assert budget.fit(0, 4096) == 512


def test_before_anything_was_learned_only_tokens_count():
    budget = StepBudget(StepCost(), BudgetConfig(max_tokens=512, target_s=1e-9))
    assert budget.fit(0, 4096) == 512
