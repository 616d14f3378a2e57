"""What a client can learn from the shares of the cache: how many others have one, and nothing else about them."""

from __future__ import annotations

import os

import pytest

from cloister.kv import BlockPool, BlockTable, PrefixCache, PrefixKeys
from cloister.kv.cache_quotas import CacheQuotas
from cloister.types.scope import PERSON_LIFETIME_S, SESSION_LIFETIME_S, Scope, ScopeKind

SIZE, NUM_SHARES, PER_SHARE = 4, 16, 3
KEYS = PrefixKeys("model", SIZE)


class Node:
    """A prefix cache with shares, and requests to it."""

    def __init__(self) -> None:
        self.pool = BlockPool(4 * NUM_SHARES * PER_SHARE, SIZE)
        self.cache = PrefixCache(self.pool, quotas=[CacheQuotas(NUM_SHARES, PER_SHARE)])

    def ask(self, scope: Scope, now: float, num_blocks: int = 1) -> int:
        """Sends a prompt of some blocks; returns how many of them were cached (`cached_tokens` of the reply)."""
        self.cache.expire(now)
        root, found = KEYS.root(scope), []
        KEYS.extend(found, root, list(range(num_blocks * SIZE)), num_blocks)
        hit = self.cache.match(found)
        self.pool.share(hit)
        table = BlockTable(self.pool, hit)
        table.grow(len(hit) * SIZE, num_blocks * SIZE)
        self.cache.insert(found, table.blocks, 0, root, scope.owner or scope.seed, expires=scope.lifetime_s is not None)
        if scope.lifetime_s is not None:
            self.cache.renew(root, now + scope.lifetime_s)
        table.close()
        self.cache.check()
        return len(hit)


def session() -> Scope:
    return Scope(ScopeKind.SESSION, os.urandom(32), SESSION_LIFETIME_S)


def count_free(node: Node, now: float) -> int:
    """What any client can do: it opens sessions and asks twice in each, until one is not cached."""
    count = 0
    while True:
        mine = session()
        node.ask(mine, now)
        if not node.ask(mine, now):
            return count
        count += 1


@pytest.mark.parametrize("num_others", [0, 5, 15, 16, 40])
@pytest.mark.parametrize("num_blocks", [1, 3, 9])
def test_sessions_of_others_can_be_counted_up_to_the_shares_whatever_they_ask(num_others: int, num_blocks: int) -> None:
    """The leak of docs/decisions/0065. That lengths do not matter shows that it is of the number only."""
    node = Node()
    for _ in range(num_others):
        node.ask(session(), 0.0, num_blocks)
    assert count_free(node, 1.0) == max(0, NUM_SHARES - num_others)


def test_a_count_is_of_five_minutes_and_costs_as_many_sessions_as_it_finds_free() -> None:
    node = Node()
    for _ in range(5):
        node.ask(session(), 0.0)
    assert count_free(node, 1.0) == 11
    assert count_free(node, 2.0) == 0  # those who count hold the shares themselves
    assert count_free(node, 2.0 + SESSION_LIFETIME_S) == NUM_SHARES


def test_a_user_of_an_issuer_has_one_share_whatever_they_open() -> None:
    """So one user learns at most whether all shares are taken."""
    node = Node()
    me = Scope(ScopeKind.TENANT, os.urandom(32), PERSON_LIFETIME_S)
    for n in range(2 * NUM_SHARES):
        node.ask(me.narrow(str(n)), 0.0)
    assert count_free(node, 1.0) == NUM_SHARES - 1


def test_shares_of_an_issuers_users_become_free_again() -> None:
    """More users than shares: those who ask later have a cache too, once others have not asked for an hour."""
    node = Node()
    for _ in range(NUM_SHARES):
        node.ask(Scope(ScopeKind.TENANT, os.urandom(32), PERSON_LIFETIME_S), 0.0)
    late = Scope(ScopeKind.TENANT, os.urandom(32), PERSON_LIFETIME_S)
    assert [node.ask(late, now) for now in (10.0, 20.0)] == [0, 0]
    assert [node.ask(late, now) for now in (PERSON_LIFETIME_S, PERSON_LIFETIME_S + 1)] == [0, 1]
