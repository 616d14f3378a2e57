"""Blocks of a scope that ends by itself: gone when its time is over, and not before."""

import pytest

from cloister.kv import BlockPool, BlockTable, PrefixCache, PrefixKeys
from cloister.types.scope import Scope, ScopeKind

SIZE = 4
TOKENS = list(range(12))


@pytest.fixture
def pool():
    return BlockPool(8, SIZE)


@pytest.fixture
def tree(pool):
    return PrefixCache(pool)


def root_of(name: bytes) -> bytes:
    return PrefixKeys("model", SIZE).root(Scope(ScopeKind.SESSION, name, 300.0))


def chain(root: bytes, num_blocks: int = 3) -> list[bytes]:
    found: list[bytes] = []
    PrefixKeys("model", SIZE).extend(found, root, TOKENS, num_blocks)
    return found


def remember(pool: BlockPool, tree: PrefixCache, root: bytes) -> BlockTable:
    table = BlockTable(pool)
    table.grow(0, len(TOKENS))
    tree.insert(chain(root), table.blocks, 0, root, expires=True)
    return table


def test_blocks_are_dropped_and_wiped_when_their_time_is_over(pool, tree):
    root = root_of(b"a")
    table = remember(pool, tree, root)
    blocks = list(table.blocks)
    table.close()
    tree.renew(root, 300.0)
    tree.expire(299.9)
    assert tree.match_length(chain(root)) == 3
    tree.expire(300.0)
    assert tree.match_length(chain(root)) == 0
    assert sorted(pool.take_wipes()) == sorted(blocks)
    assert pool.num_free == pool.num_total
    tree.check()


def test_a_later_request_prolongs_and_an_earlier_deadline_does_not_shorten(pool, tree):
    root = root_of(b"a")
    remember(pool, tree, root).close()
    tree.renew(root, 300.0)
    tree.renew(root, 500.0)
    tree.renew(root, 400.0)
    tree.expire(499.0)
    assert tree.match_length(chain(root)) == 3
    tree.expire(500.0)
    assert tree.match_length(chain(root)) == 0


def test_sessions_end_one_by_one(pool, tree):
    first, second = root_of(b"a"), root_of(b"b")
    for root, deadline_s in ((first, 10.0), (second, 20.0)):
        remember(pool, tree, root).close()
        tree.renew(root, deadline_s)
    tree.expire(15.0)
    assert (tree.match_length(chain(first)), tree.match_length(chain(second))) == (0, 3)


def test_blocks_in_use_stay_until_they_are_not(pool, tree):
    root = root_of(b"a")
    table = remember(pool, tree, root)
    tree.renew(root, 10.0)
    tree.expire(10.0)
    assert all(pool.references(block) for block in table.blocks)
    assert tree.match_length(chain(root)) == 3
    table.close()
    tree.expire(10.5)
    assert tree.match_length(chain(root)) == 3
    tree.expire(11.1)
    assert tree.match_length(chain(root)) == 0
    assert not tree.ttl.queue


def test_what_was_evicted_before_is_no_matter(pool, tree):
    root = root_of(b"a")
    remember(pool, tree, root).close()
    tree.renew(root, 10.0)
    pool.allocate(7)
    tree.expire(10.0)
    assert len(tree) == 0
    pool.check()
    tree.check()


def test_a_scope_without_a_lifetime_stays(pool, tree):
    table = BlockTable(pool)
    table.grow(0, len(TOKENS))
    root = root_of(b"a")
    tree.insert(chain(root), table.blocks, 0)
    table.close()
    tree.expire(1e9)
    assert tree.match_length(chain(root)) == 3
