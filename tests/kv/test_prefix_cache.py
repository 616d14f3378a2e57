import pytest

from cloister.kv import BlockPool, BlockTable, PrefixCache, PrefixKeys
from cloister.types.scope import LOCAL_SCOPE, Scope, ScopeKind

SIZE = 4


@pytest.fixture
def pool():
    return BlockPool(8, SIZE)


@pytest.fixture
def tree(pool):
    return PrefixCache(pool)


@pytest.fixture
def keys():
    return PrefixKeys("model", SIZE)


def chain(keys: PrefixKeys, tokens: list[int], scope: Scope = LOCAL_SCOPE) -> list[bytes]:
    found: list[bytes] = []
    keys.extend(found, keys.root(scope), tokens, len(tokens) // SIZE)
    return found


def remember(pool: BlockPool, tree: PrefixCache, found: list[bytes]) -> list[int]:
    table = BlockTable(pool)
    table.grow(0, len(found) * SIZE)
    blocks = list(table.blocks)
    tree.insert(found, blocks, 0)
    table.close()
    return blocks


def test_same_scope_hits(pool, tree, keys):
    blocks = remember(pool, tree, chain(keys, list(range(8))))
    assert tree.match(chain(keys, list(range(8)))) == blocks


def test_another_scope_misses(pool, tree, keys):
    remember(pool, tree, chain(keys, list(range(8))))
    other = Scope(ScopeKind.TENANT, b"another")
    assert tree.match(chain(keys, list(range(8)), other)) == []


@pytest.mark.parametrize("other", [PrefixKeys("another model", SIZE), PrefixKeys("model", 2)])
def test_another_model_or_block_size_misses(pool, tree, keys, other):
    remember(pool, tree, chain(keys, list(range(8))))
    found: list[bytes] = []
    other.extend(found, other.root(LOCAL_SCOPE), list(range(8)), 8 // other.block_size)
    assert tree.match(found) == []


def test_an_adapter_has_a_chain_of_its_own(keys):
    assert keys.root(LOCAL_SCOPE, "a") != keys.root(LOCAL_SCOPE)


def test_a_key_stands_for_everything_before_it(keys):
    assert chain(keys, [1, 2, 3, 4, 9, 9, 9, 9])[1] != chain(keys, [4, 3, 2, 1, 9, 9, 9, 9])[1]


def test_the_longest_known_prefix_is_matched(pool, tree, keys):
    blocks = remember(pool, tree, chain(keys, list(range(12))))
    assert tree.match(chain(keys, [*range(8), 99, 99, 99, 99])) == blocks[:2]


def test_the_least_recently_used_leaf_goes_first(pool, tree, keys):
    old = remember(pool, tree, chain(keys, [1] * 8))
    new = remember(pool, tree, chain(keys, [2] * 8))
    tree.match(chain(keys, [1] * 8))
    assert tree.evict_one(0) == new[1], "a leaf, and not the one just used"
    assert tree.evict_one(0) == new[0], "a parent once its children are gone"
    assert tree.evict_one(0) == old[1]
    tree.check()
    pool.check()


def test_blocks_in_use_are_never_evicted(pool, tree, keys):
    blocks = remember(pool, tree, chain(keys, [1] * 8))
    pool.share(blocks)
    assert tree.evict_one(0) is None
    pool.release(reversed(blocks))
    assert tree.evict_one(0) == blocks[1]


def test_an_allocation_evicts_what_nobody_uses(pool, tree, keys):
    remember(pool, tree, chain(keys, [1] * 24))
    assert pool.num_cached == 6
    assert len(pool.allocate(8)) == 8
    assert len(tree) == 0
    tree.check()
    pool.check()


def test_two_equal_prompts_computed_side_by_side_keep_one_copy(pool, tree, keys):
    found = chain(keys, [1] * 8)
    first, second = BlockTable(pool), BlockTable(pool)
    for table in (first, second):
        table.grow(0, 8)
        tree.insert(found, table.blocks, 0)
    first.close()
    second.close()
    assert (pool.num_cached, pool.num_free) == (2, 6)
    tree.check()
    pool.check()


def test_a_private_copy_takes_the_place_of_an_evicted_original(pool, tree, keys):
    found = chain(keys, [1] * 12)
    first, second = BlockTable(pool), BlockTable(pool)
    first.grow(0, 4)
    tree.insert(found[:1], first.blocks, 0)
    second.grow(0, 12)
    tree.insert(found[:1], second.blocks, 0)
    first.close()
    assert tree.evict_one(0) is not None
    tree.insert(found, second.blocks, 1)
    assert tree.match(found) == second.blocks
    second.close()
    tree.check()
    pool.check()


def test_what_is_cached_can_be_had_while_an_equal_prompt_still_runs(pool, tree, keys):
    found = chain(keys, [1] * 12)
    first, second = BlockTable(pool), BlockTable(pool)
    for table, length in ((first, 8), (second, 12)):
        table.grow(0, length)
        tree.insert(found[: length // SIZE], table.blocks, 0)
    first.close()
    tree.check()
    assert len(pool.allocate(pool.num_available)) == 5
    tree.check()
    pool.check()


def test_many_uses_of_one_prefix_do_not_pile_up(pool, tree, keys):
    found = chain(keys, [1] * 8)
    blocks = remember(pool, tree, found)
    for _ in range(1000):
        tree.match(found)
        pool.share(blocks)
        pool.release(reversed(blocks))
    assert len(tree._evictable) <= len(tree)
