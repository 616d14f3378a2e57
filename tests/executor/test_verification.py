"""Runner and scheduler verify drafts: the tokens of a seeded request are those that come without any (batch invariance)."""

import pytest

from cloister.types.step import Sample
from tests.executor.test_batch_invariance import VOCAB, answers, requests
from tests.samplers import KERNELS
from tests.thinning import cover
from tests.tree_history import DrawingTreeProgram, Erratic, Prophet, TreeHistoryProgram

PROGRAMS = [TreeHistoryProgram, DrawingTreeProgram][: 2 if KERNELS else 1]


@pytest.fixture(scope="module", params=PROGRAMS)
def make_program(request):
    return request.param


@pytest.fixture(scope="module")
def alone(make_program):
    found = {}
    for request in requests():
        found |= answers([request], make_program, num_blocks=400, max_tokens=512, depth=1)[0]
    return found


def prophet(alone, **options):
    prompts = {request.request_id: list(request.token_ids) for request in requests()}
    return Prophet([prompts[name] + tokens for (name, _), tokens in alone.items()], VOCAB, **options)


@pytest.mark.parametrize(
    ("sizes", "chains"), cover([(400, 512, 4), (36, 512, 4), (29, 7, 4), (130, 16, 1), (5, 64, 32)], [True, False])
)
def test_tokens_are_those_without_drafts(alone, make_program, sizes, chains):
    num_blocks, max_tokens, block_size = sizes
    drafter, speculation = prophet(alone, chains=chains), Erratic()
    together, num_preempted = answers(
        requests(),
        make_program,
        num_blocks=num_blocks,
        max_tokens=max_tokens,
        block_size=block_size,
        depth=1,
        drafter=drafter,
        speculation=speculation,
    )
    assert together == alone
    assert speculation.num_accepted > 0.1 * speculation.num_drafted > 10
    assert (num_preempted > 0) == (num_blocks != 400)
    assert len(set(drafter.forgotten)) == len(set(alone))


def test_a_plan_made_ahead_drafts_nothing_for_a_sequence_whose_token_is_still_to_come(alone, make_program):
    speculation = Erratic()
    together, _ = answers(
        requests(), make_program, num_blocks=400, max_tokens=512, depth=2, drafter=prophet(alone), speculation=speculation
    )
    assert together == alone
    assert speculation.num_drafted == 0


def test_a_program_that_leaves_accepted_positions_where_they_are_is_found_out(alone, make_program):
    def make(**options):
        return make_program(moves=False, **options)

    with pytest.raises(AssertionError):
        assert (
            answers(requests(), make, num_blocks=400, max_tokens=512, depth=1, drafter=prophet(alone), speculation=Erratic())[0]
            == alone
        )


def test_drafters_see_where_each_step_began_and_what_came(alone, make_program):
    drafter = prophet(alone)
    answers(requests(), make_program, num_blocks=400, max_tokens=512, depth=1, drafter=drafter, speculation=Erratic())
    assert any(seen.path for seen in drafter.seen)
    for seen in drafter.seen:
        gained = [int(seen.chosen[0]), *[int(seen.chosen[place + 1]) for place in seen.path]]
        assert len(seen.chosen) == 1 + len(seen.draft.token_ids)
        assert [seen.draft.token_ids[place] for place in seen.path] == gained[:-1]
        assert seen.last_row == (seen.path[-1] + 1 if seen.path else 0)


def test_a_sample_says_nothing_of_content():
    assert "7" not in repr(Sample(1, [7, 7], None, 3, (0,))).replace("num_tokens", "")
