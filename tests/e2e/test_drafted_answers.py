"""Answers with drafts are those without, to the last bit: a small part of benchmarks/draft_equality.py."""

from __future__ import annotations

import pytest

from benchmarks.draft_distributions import planted
from benchmarks.draft_equality import take_prompts
from cloister.models import locate
from tests.equality import MODEL, ask, differing, drafting, make_requests, open_core, prepare, tight
from tests.thinning import thin

MAX_TOKENS = 24


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("equality"))


@pytest.fixture(scope="module")
def prompts():
    return take_prompts(locate(MODEL), 8)


@pytest.fixture(scope="module")
def alone(path, prompts):
    core = open_core(path, speculate="none", max_num_seqs=2, prefix_cache=False)
    return ask(core, make_requests(prompts, core, MAX_TOKENS))


@pytest.mark.parametrize("drafter", thin(["spec_infer", "medusa", "mtp", "ngram"], ["medusa", "mtp", "ngram"]))
def test_answers_are_equal_among_others_in_chunks_and_preempted(path, prompts, alone, drafter):
    core = open_core(path, **tight(drafter), **drafting(drafter, path))
    found = ask(core, make_requests(prompts, core, MAX_TOKENS))
    assert differing(found, alone) == []
    assert len(found.answers) == len(alone.answers)
    assert min(found.num_accepted, found.num_preempted) > 0


def test_answers_are_equal_after_prefix_hits(path, prompts, alone):
    core = open_core(path, max_num_seqs=8, prefix_cache=True, **drafting("draft_model", path))
    found = ask(core, make_requests(prompts, core, MAX_TOKENS, again=8))
    assert differing(found, alone) == []
    assert len(found.answers) > len(alone.answers)
    assert min(found.num_accepted, found.num_hits) > 0


def test_a_wrong_draft_that_is_accepted_is_a_difference(path, prompts, alone):
    core = open_core(path, **drafting("medusa", path))
    with planted(1.0):
        found = ask(core, make_requests(prompts[:3], core, MAX_TOKENS))
    assert ("r2", 0) in differing(found, alone)


def test_a_logprob_of_another_bit_is_a_difference(path, prompts, alone):
    core = open_core(path, **drafting("ngram", path))
    found = ask(core, make_requests(prompts[:3], core, MAX_TOKENS))
    assert differing(found, alone) == []
    answer = found.answers["r2", 0]
    entry = answer.logprobs[-1]
    answer.logprobs[-1] = type(entry)(token_id=entry.token_id, logprob=entry.logprob + 1e-7, top=entry.top)
    assert differing(found, alone) == [("r2", 0)]
