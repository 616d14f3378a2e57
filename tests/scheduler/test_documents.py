"""Documents that are encoded separately: what is planned together, and what is found again."""

from __future__ import annotations

import pytest

from cloister.kv import PrefixKeys
from cloister.server.metrics import Metrics
from cloister.types.documents import Documents
from cloister.types.events import Ended, Preempted, Scheduled
from cloister.types.request import FinishReason
from cloister.types.scope import LOCAL_SCOPE, Scope, ScopeKind
from tests.scheduler.test_scheduler import Bench

SIZE = 4
PREFIX = list(range(100, 108))
A, B, C = [1] * 8, [2] * 12, [3] * 4
QUESTION = [7, 8, 9, 10, 11]


def join(*texts, question=QUESTION, prefix=PREFIX):
    """Returns a prompt with documents, and where these stand."""
    tokens, starts = list(prefix), []
    for text in texts:
        starts.append(len(tokens))
        tokens += text
    return tokens + question, Documents(tuple(starts), len(tokens))


def ask(bench, name, *texts, **fields):
    tokens, documents = join(*texts, question=fields.pop("question", QUESTION))
    bench.add(name, tokens, documents=documents, **fields)
    bench.run()
    bench.scheduler.prefix_cache.check()
    return next(e.num_cached_tokens for e in bench.events if isinstance(e, Ended) and e.request_id == name)


def count_computed(bench, *texts, **fields):
    before = bench.runner.num_computed
    num_cached = ask(bench, str(len(bench.events)), *texts, max_tokens=1, **fields)
    num_computed = bench.runner.num_computed - before
    assert num_cached + num_computed == len(PREFIX) + sum(map(len, texts)) + len(fields.get("question", QUESTION))
    return num_computed


def test_no_chunk_has_positions_of_two_documents_or_of_one_and_the_question():
    bench = Bench(block_size=SIZE)
    ask(bench, "a", A, B, C, max_tokens=1)
    chunks = [(part.start, part.num_tokens) for plan in bench.plans for part in plan.sequences]
    assert chunks == [(0, 16), (16, 12), (28, 4), (32, 5)]


def test_documents_are_found_again_in_another_order_and_in_a_subset():
    bench = Bench(block_size=SIZE)
    assert count_computed(bench, A, B, C) == 37
    assert count_computed(bench, C, A, B) == len(QUESTION)
    assert count_computed(bench, B) == len(QUESTION)
    assert count_computed(bench, A, B, C) == 1, "the question too is found behind the same documents in the same order"


def test_documents_are_found_behind_one_that_is_new():
    bench = Bench(block_size=SIZE)
    count_computed(bench, A, B)
    assert count_computed(bench, C, A, B) == len(C) + len(QUESTION)
    assert count_computed(bench, A, [5] * 4, B) == 4 + len(QUESTION)


def test_a_document_that_is_found_behind_a_new_one_is_a_prefix_hit_and_not_charged():
    bench = Bench(block_size=SIZE, policy="fair")
    ask(bench, "a", A, B, max_tokens=1, tenant="t")
    policy, charged = bench.scheduler._policy, []
    charge = policy.charge
    policy.charge = lambda sequence, *work: (charged.append(work), charge(sequence, *work))
    tokens, documents = join(C, A, B)
    bench.add("b", tokens, documents=documents, max_tokens=2, tenant="t")
    bench.step()
    assert bench.step()
    assert charged == [(len(C), 0), (len(QUESTION), 0)]
    assert policy._tenants["t"].backlog == 0
    bench.run()
    metrics = Metrics()
    for event in bench.events:
        metrics.observe(event)
    (end,) = bench.ended("b")
    assert end.num_cached_tokens == len(PREFIX) + len(A) + len(B)
    assert f"cloister_prefix_cache_hits_total {float(end.num_cached_tokens)}" in metrics.render().decode()


def test_a_document_that_begins_like_another_is_found_up_to_where_they_part():
    bench = Bench(block_size=SIZE)
    count_computed(bench, A, B)
    assert count_computed(bench, C, [2] * 8 + [4] * 4) == len(C) + 4 + len(QUESTION)


def test_a_plain_prompt_finds_a_document_directly_behind_the_prefix_only():
    bench = Bench(block_size=SIZE)
    ask(bench, "documents", A, B)
    bench.add("plain", [*PREFIX, *B, 5], max_tokens=1)
    bench.run()
    assert bench.cached("plain") == len(PREFIX) + len(B)
    bench.add("both", [*PREFIX, *A, *B, 5], max_tokens=1)
    bench.run()
    assert bench.cached("both") == len(PREFIX) + len(A), "behind another document its keys and values are others"


def test_another_prefix_or_scope_finds_no_document():
    bench = Bench(block_size=SIZE, num_blocks=128)
    ask(bench, "a", A, B)
    tokens, documents = join(A, B, prefix=[99] * 8)
    bench.add("prefix", tokens, documents=documents, max_tokens=1)
    other = Scope(ScopeKind.TENANT, b"other")
    tokens, documents = join(A, B)
    bench.add("scope", tokens, documents=documents, max_tokens=1, scope=other)
    bench.run()
    assert bench.cached("prefix") == bench.cached("scope") == 0


def test_what_follows_public_documents_is_not_public():
    keys = PrefixKeys("model", SIZE, [PREFIX + A, PREFIX + C])
    tokens, documents = join(A, C)
    chains = []
    for scope in (LOCAL_SCOPE, Scope(ScopeKind.TENANT, b"other")):
        chain: list[bytes] = []
        keys.extend(chain, keys.root(scope), tokens, 6, documents=documents)
        chains.append(chain)
    assert chains[0][:5] == chains[1][:5]
    assert set(chains[0][:5]) <= keys.public
    assert chains[0][5] != chains[1][5]


def test_the_order_of_documents_counts_for_what_follows_them():
    keys, chains = PrefixKeys("model", SIZE), []
    for texts in ((A, C), (C, A)):
        tokens, documents = join(*texts)
        chain: list[bytes] = []
        keys.extend(chain, keys.root(LOCAL_SCOPE), tokens, 6, documents=documents)
        chains.append(chain)
    assert set(chains[0][:5]) == set(chains[1][:5])
    assert chains[0][5] != chains[1][5]


def test_documents_survive_preemption_and_eviction_whatever_their_order():
    bench = Bench(block_size=SIZE, num_blocks=18, max_num_seqs=3)
    orders = [(A, B, C), (C, B), (B, A), (C, A, B), (A, A), (B, C, A)]
    for number, order in enumerate(orders * 3):
        tokens, documents = join(*order, question=[number, *QUESTION])
        bench.add(str(number), tokens, documents=documents, max_tokens=9)
    for _ in range(400):
        if not bench.step():
            break
        bench.scheduler.prefix_cache.check()
    assert {end.reason for end in bench.ended()} == {FinishReason.LENGTH}
    assert len(bench.ended()) == 18
    assert bench.of(Preempted)
    assert any(event.num_cached_tokens for event in bench.of(Scheduled) if event.resumed)
    assert bench.pool.num_used == 0


def test_several_answers_share_the_documents():
    bench = Bench(block_size=SIZE)
    ask(bench, "a", A, B, n=3)
    assert {end.reason for end in bench.ended()} == {FinishReason.LENGTH}
    assert count_computed(bench, B, A) == len(QUESTION)


@pytest.mark.parametrize(
    ("documents", "reason"),
    [
        (Documents((8, 14), 20), "multiples of 4"),
        (Documents((0, 8), 16), "ascend"),
        (Documents((8, 8), 16), "ascend"),
        (Documents((), 16), "ascend"),
        (Documents((8,), 24), "nothing follows"),
    ],
)
def test_documents_that_do_not_fit_are_refused(documents, reason):
    bench = Bench(block_size=SIZE)
    bench.add("a", 24, documents=documents)
    bench.run()
    (end,) = bench.ended()
    assert end.reason is FinishReason.REJECTED
    assert reason in end.error
