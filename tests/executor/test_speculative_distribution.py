"""Drafts leave the distribution of what is drawn as it is: a small part of benchmarks/draft_distributions.py."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.draft_distributions import DRAWN, planted
from cloister.backends.availability import why_no_kernels
from cloister.executor.drafters import DRAFTERS
from tests.drafter_factory import drafter_maker, equip
from tests.speculating import (
    RECIPES,
    VOCAB,
    Oracle,
    Replica,
    chi_square_p,
    draw_answers,
    holm,
    make_tiny,
    p_values,
)
from tests.thinning import cover, thin

pytestmark = pytest.mark.skipif(why_no_kernels() is not None, reason="drafts of real models need the native back end")
LEVEL = 1e-4
BY_NAME = {recipe.name: recipe for recipe in RECIPES}
NUM_ANSWERS = 600


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_tiny(tmp_path_factory.mktemp("tiny") / "model")
    return equip(path, np.random.default_rng(0).integers(2, VOCAB, (200, 30)).tolist())


@pytest.fixture(scope="module")
def oracle(model):
    return Oracle(model)


@pytest.fixture(scope="module")
def plain(model):
    """Answers to each recipe without drafts."""
    replica = Replica(model)
    return {
        name: draw_answers(replica, recipe, NUM_ANSWERS, seed=1, is_seeded=False)
        for name, recipe in BY_NAME.items()
        if name in ("truncated", "everything")
    }


def drafted(model, drafter, recipe, num_answers=NUM_ANSWERS, **options):
    replica = Replica(model, drafter_maker(drafter, model), num_drafts=6)
    answers = draw_answers(replica, BY_NAME[recipe], num_answers, **{"seed": 1, "is_seeded": False, **options})
    assert replica.speculation.num_accepted > 0.05 * replica.speculation.num_steps
    return answers


def test_plain_sampling_has_the_distribution(oracle, plain):
    values = [p for name, answers in plain.items() for p in p_values(answers, oracle.strings(BY_NAME[name])).values()]
    assert not any(holm(values, LEVEL))


@pytest.mark.parametrize(("drafter", "recipe"), cover(DRAWN, ["truncated", "everything"]))
def test_drawn_drafts_keep_the_distribution(model, oracle, plain, drafter, recipe):
    answers = drafted(model, drafter, recipe)
    assert not any(holm(list(p_values(answers, oracle.strings(BY_NAME[recipe])).values()), LEVEL))
    assert (answers != plain[recipe]).any()


@pytest.mark.parametrize("drafter", thin(sorted(set(DRAFTERS.names()) - set(DRAWN)), 3))
def test_requests_without_a_seed_draw_the_very_tokens_beside_drafts_that_are_not_drawn(model, plain, drafter):
    assert (drafted(model, drafter, "everything") == plain["everything"]).all()


@pytest.mark.parametrize("drafter", thin(DRAWN, 2))
def test_seeded_requests_draw_the_very_tokens_beside_drafts_that_are_drawn_with_their_noise(model, plain, drafter):
    assert (drafted(model, drafter, "everything", is_seeded=True) == plain["everything"]).all()


@pytest.mark.parametrize(("drafter", "recipe"), [("draft_model", "truncated"), ("ngram", "everything")])
def test_a_planted_bias_is_caught(model, oracle, drafter, recipe):
    with planted(0.2):
        answers = drafted(model, drafter, recipe)
    assert min(p_values(answers, oracle.strings(BY_NAME[recipe])).values()) < 1e-6


def test_a_token_that_cannot_come_is_caught(oracle):
    probs = oracle.strings(BY_NAME["truncated"])
    impossible = np.argwhere(probs == 0)[:1]
    assert p_values(impossible, probs)["first three"] == 0


def test_the_test_itself_errs_as_often_as_it_says():
    rng = np.random.default_rng(2)
    probs = rng.dirichlet(np.ones(200))
    counts = rng.multinomial(3000, probs, size=2000)
    values = np.array([chi_square_p(row.astype(np.float64), 3000 * probs) for row in counts])
    assert 0.03 < (values < 0.05).mean() < 0.08


def test_holm_rejects_only_what_its_rank_allows():
    assert holm([0.004, 0.3, 0.02, 0.01], 0.04) == [True, False, True, True]
    assert holm([0.02, 0.02], 0.03) == [False, False]
