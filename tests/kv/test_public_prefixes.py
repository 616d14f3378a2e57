"""Prefixes of the release: everybody's, and nothing behind them is."""

import pytest

from cloister.kv import BlockPool, BlockTable, PrefixCache, PrefixKeys
from cloister.types.scope import Scope, ScopeKind

SIZE = 4
PROMPT = list(range(100, 110))  # two blocks and a half
KEYS = PrefixKeys("model", SIZE, [PROMPT, [7] * 8])
ANN, BEN = Scope(ScopeKind.REQUEST, b"ann"), Scope(ScopeKind.REQUEST, b"ben")


def chain(tokens: list[int], scope: Scope, keys: PrefixKeys = KEYS, **options: bool) -> list[bytes]:
    found: list[bytes] = []
    for num_blocks in range(len(tokens) // SIZE + 1):  # block by block, as a request grows
        keys.extend(found, keys.root(scope), tokens, num_blocks, **options)
    whole: list[bytes] = []
    keys.extend(whole, keys.root(scope), tokens, len(tokens) // SIZE, **options)
    assert whole == found
    return found


def test_scopes_share_the_release_and_nothing_behind_it():
    tokens = [*PROMPT, 1, 2, 3, 4, 5, 6]
    ann, ben = chain(tokens, ANN), chain(tokens, BEN)
    assert ann[:2] == ben[:2]
    assert not set(ann[2:]) & set(ben[2:])


@pytest.mark.parametrize("tokens", [[1, *PROMPT], [*PROMPT[:3], 1, *PROMPT[4:]], PROMPT[4:]])
def test_what_only_looks_like_the_release_is_ones_own(tokens):
    assert not set(chain(tokens, ANN)) & set(chain(tokens, BEN))


def test_half_of_a_prefix_is_shared_and_what_follows_another_start_is_not():
    shared = chain([*PROMPT[:4], 9, 9, 9, 9, *PROMPT[4:8]], ANN)
    again = chain([*PROMPT[:4], 9, 9, 9, 9, *PROMPT[4:8]], BEN)
    assert shared[:1] == again[:1] == chain(PROMPT, ANN)[:1]
    assert not set(shared[1:]) & set(again[1:])


def test_the_way_behind_a_prefix_depends_on_the_prefix():
    first, second = chain([*PROMPT[:8], 1, 1, 1, 1], ANN), chain([7] * 8 + [1] * 4, ANN)
    assert first[2] != second[2]


def test_an_adapter_reads_no_prefix_of_the_base():
    assert not set(chain(PROMPT, ANN, reads_public=False)) & KEYS.public


def test_without_prefixes_keys_are_what_they_were():
    bare = PrefixKeys("model", SIZE)
    assert chain(PROMPT, ANN, bare) == chain(PROMPT, ANN, reads_public=False)


def test_a_public_block_is_never_evicted_once_it_is_there():
    pool = BlockPool(4, SIZE)
    tree = PrefixCache(pool, KEYS.public)
    tokens = [*PROMPT[:8], 1, 1, 1, 1]
    found = chain(tokens, ANN)
    table = BlockTable(pool)
    table.grow(0, len(tokens))
    tree.insert(found, table.blocks, 0, KEYS.root(ANN))
    table.close()
    assert pool.num_available == 2
    pool.allocate(2)  # takes Ann's own, and neither of the release's
    assert tree.match_length(found) == 2
    pool.check()
    tree.check()
