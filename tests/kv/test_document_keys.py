"""Keys of documents: two blocks have the same key exactly if their KV depends on the same things.

All arrangements of a few texts are tried: what is prefix, document or question, for whom, by which adapter, and how weighed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import pytest

from cloister.kv import PrefixKeys
from cloister.types.documents import Documents
from cloister.types.scope import LOCAL_SCOPE, Scope, ScopeKind

SIZE = 2
TEXTS = ([1, 1], [2, 2])
SCOPES = (LOCAL_SCOPE, LOCAL_SCOPE.narrow("salt"), Scope(ScopeKind.TENANT, b"other"))
WEIGHTS = ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5))
PUBLIC = ([1, 1, 2, 2], [1, 1, 1, 1, 1, 1])

Context = tuple[object, ...]


def arrangements(num_blocks: int) -> Iterator[tuple[list[int], Documents | None]]:
    """All prompts of so many blocks, each plain and cut in every way, with all weights."""
    for blocks in product(TEXTS, repeat=num_blocks):
        tokens = [token for block in blocks for token in block]
        yield tokens, None
        for is_cut in product((False, True), repeat=num_blocks - 1):
            cuts = [SIZE * place for place, cut in enumerate(is_cut, 1) if cut]
            for weights in WEIGHTS if len(cuts) > 1 else ():
                yield tokens, Documents(tuple(cuts[:-1]), cuts[-1], *weights)
            if len(cuts) > 1:
                yield tokens, Documents(tuple(cuts[:-1]), cuts[-1], num_links=2)
            for positions in place(cuts) if len(cuts) > 1 else ():
                yield tokens, Documents(tuple(cuts[:-1]), cuts[-1], positions=positions)


def place(cuts: list[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Positions of modules: one behind the other, all at one place, and with a gap before, in or behind the first."""
    first, *others, end = cuts
    yield ((0, 0), (first, first))
    yield ((0, 0), *((start, first) for start in (first, *others)), (end, end))
    for gap in (2, 4):
        yield ((0, 0), (first, first + gap))
        yield ((0, 0), (first, first), (first + 1, first + 1 + gap))
        yield ((0, 0), (first, first), (end, end + gap))


def find_contexts(tokens: list[int], documents: Documents | None, scope: Scope, adapter: str | None) -> list[Context]:
    """What the KV of each block depends on."""
    found: list[Context] = []
    for end in range(SIZE, len(tokens) + 1, SIZE):
        position = end - SIZE
        if documents is not None and position >= documents.end:
            bounds = pairwise((0, *documents.starts, documents.end))
            parts = tuple(tuple(tokens[first:last]) for first, last in bounds)
            weights = (documents.temperature, documents.scale, documents.positions, documents.num_links)
            found.append(("after documents", scope, adapter, parts, weights, tuple(tokens[documents.end : end])))
            continue
        if documents is not None and documents.positions and position >= documents.starts[0]:
            start = documents.starts[0] + documents.shift(position)
            turns = documents.turns(start, documents.find_piece_end(start) or documents.end)
            module = (tuple(turns), tuple(tokens[start:end]))
            found.append(("module", scope, adapter, tuple(tokens[: documents.starts[0]]), module))
            continue
        shift = 0 if documents is None else documents.shift(position)
        seen = tokens[: (documents.starts[0] if documents is not None and shift else 0)]
        seen = seen + tokens[len(seen) + shift : end]
        is_public = adapter is None and any(seen == public[: len(seen)] for public in PUBLIC)
        found.append(("prompt", "everybody" if is_public else scope, adapter, tuple(seen)))
    return found


def test_blocks_have_one_key_exactly_if_their_kv_depends_on_the_same() -> None:
    keys = PrefixKeys("model", SIZE, PUBLIC)
    key_of: dict[Context, bytes] = {}
    context_of: dict[bytes, Context] = {}
    for (scope, adapter), num_blocks in product(product(SCOPES, (None, "adapter")), range(1, 6)):
        root = keys.root(scope, adapter)
        for tokens, documents in arrangements(num_blocks):
            chain: list[bytes] = []
            keys.extend(chain, root, tokens, num_blocks, reads_public=adapter is None, documents=documents)
            for key, context in zip(chain, find_contexts(tokens, documents, scope, adapter), strict=True):
                assert context_of.setdefault(key, context) == context, "one key for blocks of different KV"
                assert key_of.setdefault(context, key) == key, "blocks of the same KV do not share it"
    assert len(key_of) > 5000


@pytest.mark.parametrize("num_first", range(1, 5))
def test_keys_do_not_depend_on_how_many_were_asked_for_at_once(num_first: int) -> None:
    keys, tokens, documents = PrefixKeys("model", SIZE, PUBLIC), [1, 1, 1, 1, 2, 2, 1, 1, 2, 2], Documents((2, 6), 8, 0.5)
    wanted: list[bytes] = []
    keys.extend(wanted, keys.root(LOCAL_SCOPE), tokens, 5, documents=documents)
    found: list[bytes] = []
    for num_blocks in (num_first, 5):
        keys.extend(found, keys.root(LOCAL_SCOPE), tokens, num_blocks, documents=documents)
    assert found == wanted
