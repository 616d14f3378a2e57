from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from cloister.client.routing_audit.tails import (
    add,
    binomial,
    chi_square_tail,
    holm,
    hypergeometric,
    lower_tail,
    two_sided,
    upper_tail,
)


@pytest.mark.parametrize(("n", "p"), [(1, 0.5), (20, 0.01), (600, 0.25), (6000, 0.9)])
def test_binomials_agree_with_scipy_deep_into_the_tails(n: int, p: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    ours = binomial(n, p)
    k = np.arange(n + 1)
    np.testing.assert_allclose(ours, stats.binom.pmf(k, n, p), rtol=1e-9, atol=1e-290)
    for at in (0, n // 4, n // 2, n):
        assert upper_tail(ours, at) == pytest.approx(stats.binom.sf(at - 1, n, p), rel=1e-8, abs=1e-290)
        assert lower_tail(ours, at) == pytest.approx(stats.binom.cdf(at, n, p), rel=1e-8, abs=1e-290)


@pytest.mark.parametrize(("total", "marked", "taken"), [(10, 3, 4), (600, 60, 30), (5000, 4000, 200), (7, 7, 3), (7, 0, 3)])
def test_hypergeometrics_agree_with_scipy(total: int, marked: int, taken: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    theirs = stats.hypergeom.pmf(np.arange(taken + 1), total, marked, taken)
    np.testing.assert_allclose(hypergeometric(total, marked, taken), theirs, rtol=1e-9, atol=1e-290)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 30])
@pytest.mark.parametrize("statistic", [0.0, 0.3, 5.0, 60.0, 400.0])
def test_chi_square_tails_agree_with_scipy(statistic: float, degrees: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    assert chi_square_tail(statistic, degrees) == pytest.approx(stats.chi2.sf(statistic, degrees), rel=1e-10)


def test_a_sum_of_counts_is_counted_out() -> None:
    chances = (0.2, 0.5, 0.9)
    wanted = np.zeros(4)
    for outcome in itertools.product((0, 1), repeat=3):
        wanted[sum(outcome)] += np.prod([p if hit else 1 - p for hit, p in zip(outcome, chances, strict=True)])
    np.testing.assert_allclose(add(binomial(1, p) for p in chances), wanted)


def test_a_two_sided_test_claims_no_more_than_it_may() -> None:
    source = random.Random(3)
    distribution = binomial(60, 0.3)
    counts = [sum(source.random() < 0.3 for _ in range(60)) for _ in range(2000)]
    assert sum(two_sided(distribution, count) <= 0.05 for count in counts) <= 0.05 * 2000 * 1.3


def test_holm_corrects_step_by_step() -> None:
    # by hand: 0.01 * 4, 0.02 * 3, then never less than the one before, in the order given
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
