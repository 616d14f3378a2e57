"""REST: what is looked up is what a plain search finds, best first, and only in a datastore of the model's own tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.executor.drafters import DRAFTERS
from cloister.executor.drafters.datastore import HEADER, HEADS, SUFFIXES, TOKENS, Datastore, sort_suffixes, write_datastore
from cloister.executor.drafters.rest import MAX_DRAFTS, MAX_MATCH, NUM_SAMPLED, RestDrafter
from cloister.models import locate
from cloister.models.generation import digest_tokenizer
from cloister.text import Tokenizer
from cloister.types.errors import CloisterError, ConfigError
from tests.executor.drafters.answering import VOCAB, answer_with, ask_for, context_for, known, parents_of, walk
from tests.thinning import examples

Documents = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=40), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory, whose datastore each example replaces."""
    return tmp_path_factory.mktemp("store")


def make(path: Path, documents: Sequence[Sequence[int]], num_ids: int = VOCAB, tokenizer: str = "a") -> Datastore:
    write_datastore(path, documents, num_ids=num_ids, tokenizer=tokenizer)
    return Datastore(path, tokenizer, num_ids)


def search(documents: Sequence[Sequence[int]], pattern: Sequence[int]) -> list[list[int]]:
    """What follows every occurrence of a pattern."""
    size = len(pattern)
    return [
        list(document[start + size :])
        for document in documents
        for start in range(len(document) - size + 1)
        if list(document[start : start + size]) == list(pattern)
    ]


@pytest.mark.parametrize("num_ids", [5, 1 << 17])
@given(Documents, st.lists(st.integers(0, 4), min_size=1, max_size=6))
@settings(max_examples=examples(40), deadline=None)
def test_what_is_found_is_what_a_plain_search_finds(
    store_path: Path, num_ids: int, documents: list[list[int]], pattern: list[int]
) -> None:
    store = make(store_path, documents, num_ids)
    start, end = store.find(pattern)
    expected = search(documents, pattern)
    assert end - start == len(expected)
    rows = store.read(start, end, 1, len(pattern), 3)
    firsts = Counter({token: last - first for token, first, last in rows.split(0, len(rows), 0)} if len(rows) else {})
    assert firsts == Counter(row[0] for row in expected if row)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=120), st.sampled_from([16, 32]))
@settings(max_examples=examples(100), deadline=None)
def test_suffixes_are_in_the_order_of_their_tokens(tokens: list[int], bits: int) -> None:
    order = sort_suffixes(np.array([*tokens, (1 << bits) - 1], np.uint32), bits=bits)
    whole = [*tokens, (1 << bits) - 1]
    assert [whole[place : place + 64] for place in order] == sorted(whole[place : place + 64] for place in range(len(whole)))


@given(Documents, st.lists(st.integers(0, 4), min_size=1, max_size=20), st.integers(1, 12))
@settings(max_examples=examples(80), deadline=None)
def test_a_draft_continues_the_longest_suffix_that_the_datastore_has(
    store_path: Path, documents: list[list[int]], tokens: list[int], num_drafts: int
) -> None:
    draft = ask_for(known(tokens), num_drafts, RestDrafter(make(store_path, documents)))
    longest: list[list[int]] = []
    for size in range(1, min(MAX_MATCH, len(tokens)) + 1):
        longest = search(documents, tokens[-size:]) or longest
    paths: list[list[int]] = []
    for token, parent in zip(draft.token_ids, parents_of(draft), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    assert all(any(row[: len(path)] == path for row in longest) for path in paths)
    if longest and any(longest) and len(longest) <= NUM_SAMPLED and paths:
        ((_, count),) = Counter(row[0] for row in longest if row).most_common(1)
        assert sum(row[:1] == paths[0] for row in longest) == count


def test_frequent_continuations_come_first_and_doubtful_ones_not_at_all(tmp_path: Path) -> None:
    store = make(tmp_path, [[1, 2, 3, 10, 11]] * 6 + [[1, 2, 3, 20, 21]] * 3 + [[1, 2, 3, 30]])
    draft = ask_for(known([9, 1, 2, 3]), MAX_DRAFTS, RestDrafter(store))
    assert draft.token_ids[0] == 10
    assert len(walk(draft, [10, 11])) == len(walk(draft, [20, 21])) == 2
    assert draft.token_ids.index(10) < draft.token_ids.index(20) < draft.token_ids.index(30)
    assert ask_for(known([9, 8]), MAX_DRAFTS, RestDrafter(store)).token_ids == []
    rare = make(tmp_path, [[1, token] for token in range(2, 200)])
    assert ask_for(known([1]), MAX_DRAFTS, RestDrafter(rare)).token_ids == []


def test_a_shape_is_filled_as_far_as_it_goes(tmp_path: Path) -> None:
    store = make(tmp_path, [[1, 2, 3, 10, 11]] * 6 + [[1, 2, 3, 20, 21]] * 3)
    draft = ask_for(known([1, 2, 3]), 3, RestDrafter(store), (-1, -1, 1, 0))
    assert draft.token_ids == [10, 20, 21]
    assert parents_of(draft) == [-1, -1, 1]


def test_an_answer_from_the_public_text_takes_half_the_steps(tmp_path: Path) -> None:
    text = [(7 * place * place + place // 3) % 250 for place in range(500)]
    store = make(tmp_path, [text])
    assert answer_with(RestDrafter(store), [299, 298], text[100:200], 16).tokens_per_step > 2
    assert answer_with(RestDrafter(store), [299, 298], list(range(251, 290)), 16).num_drafted == 0


def test_memory_is_what_the_files_take(tmp_path: Path) -> None:
    store = make(tmp_path, [[1, 2, 3]] * 100)
    assert RestDrafter(store).fixed_bytes == sum((tmp_path / name).stat().st_size for name in (TOKENS, SUFFIXES, HEADS))


def test_a_datastore_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    make(tmp_path, [[1, 2, 3]])
    with pytest.raises(ConfigError, match=r"another tokenizer; build it with `cloister datastore build`") as caught:
        Datastore(tmp_path, "b", VOCAB)
    assert caught.value.param == "datastore"


@pytest.mark.parametrize("name", [HEADER, TOKENS, SUFFIXES, HEADS])
def test_a_missing_or_short_file_is_refused(tmp_path: Path, name: str) -> None:
    make(tmp_path, [[1, 2, 3]])
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-3])
    with pytest.raises(ConfigError, match="missing or damaged"):
        Datastore(tmp_path, "a", VOCAB)
    (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match="no datastore" if name == HEADER else "missing or damaged"):
        Datastore(tmp_path, "a", VOCAB)


def test_an_open_datastore_outlives_the_one_that_takes_its_place(tmp_path: Path) -> None:
    store = make(tmp_path, [[1, 2, 3]] * 5000)
    make(tmp_path, [[1, 2]])
    start, end = store.find([1, 2])
    assert end - start == 5000


def test_heads_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    make(tmp_path, [[1, 2, 3]])
    heads = np.fromfile(tmp_path / HEADS, np.uint32)
    for place, value in ((-1, 99), (1, 99), (0, 1)):
        damaged = heads.copy()
        damaged[place] = value
        damaged.tofile(tmp_path / HEADS)
        with pytest.raises(ConfigError, match="damaged"):
            Datastore(tmp_path, "a", VOCAB)


def test_ids_that_the_model_lacks_are_never_drafted(tmp_path: Path) -> None:
    make(tmp_path, [[1, 2, 250, 3]] * 9)
    assert ask_for(known([1]), 8, RestDrafter(Datastore(tmp_path, "a", VOCAB))).token_ids == [2, 250, 3]
    assert ask_for(known([1]), 8, RestDrafter(Datastore(tmp_path, "a", 200))).token_ids == [2]


def test_another_version_is_refused(tmp_path: Path) -> None:
    make(tmp_path, [[1, 2, 3]])
    header = json.loads((tmp_path / HEADER).read_text())
    (tmp_path / HEADER).write_text(json.dumps({**header, "version": 2}))
    with pytest.raises(ConfigError, match="is of version 2, and this build reads 1"):
        Datastore(tmp_path, "a", VOCAB)


def test_a_text_without_tokens_makes_no_datastore(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokens"):
        write_datastore(tmp_path, [[], []], num_ids=10, tokenizer="a")


def test_the_embedded_model_brings_a_datastore_of_its_own_tokens() -> None:
    path = locate("cloister-5m")
    drafter = DRAFTERS.get("rest")(context_for(path, vocab_size=4096))
    assert drafter.fixed_bytes < 3e6
    tokenizer = Tokenizer(path)
    prompt = tokenizer.encode("What is the Python module json?\n")
    answer = tokenizer.encode("Encode and decode the JSON format.")
    assert answer_with(drafter, prompt, answer, 16).num_accepted > 0


def test_a_model_without_a_datastore_is_told_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cloister datastore build"):
        DRAFTERS.get("rest")(context_for(tmp_path))
    with pytest.raises(CloisterError, match=r"tokenizer\.json"):
        digest_tokenizer(tmp_path)


def test_copies_of_a_model_have_one_tokenizer_and_other_models_another(tmp_path: Path) -> None:
    embedded = locate("cloister-5m")
    assert digest_tokenizer(embedded) == digest_tokenizer(locate("cloister-draft"))
    (tmp_path / "tokenizer.json").write_bytes((embedded / "tokenizer.json").read_bytes() + b"\n")
    assert digest_tokenizer(tmp_path) != digest_tokenizer(embedded)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says which files a process has mapped")
def test_no_file_is_mapped_since_pages_in_the_cache_show_which_tokens_were_looked_up(tmp_path: Path) -> None:
    store = make(tmp_path, [[1, 2, 3]] * 5000)
    mapped = Path("/proc/self/maps").read_text()
    assert store.find([1, 2]) != (0, 0)
    assert [name for name in (TOKENS, SUFFIXES, HEADS) if str(tmp_path / name) in mapped] == []
