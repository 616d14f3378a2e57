"""Bodies of very many parts: refused by a count before an object is made of any, and freed at once."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cloister.server import parse, state
from cloister.server.embeddings import text_list
from cloister.server.parse import MAX_CONTAINERS, MAX_NAMES, MAX_VALUES, check_num_parts, parse_body
from cloister.server.reading_queue import ReadingQueue, ReadingThreads
from cloister.server.routes import tokens
from cloister.server.schemas import ChatBody, check_prompt
from cloister.text.grammar import check_schema_size
from cloister.text.grammar.schema import MAX_CHARS
from cloister.types.errors import InvalidRequestError
from tests.server.running_server import MODEL, RunningServer
from tests.server.test_bad_input import CHAT, HELLO, TEXT, check_error
from tests.thinning import examples

JSON = {"content-type": "application/json"}


def with_names(num_names: int) -> bytes:
    return json.dumps({f"f{i}": 1 for i in range(num_names)}).encode()


@pytest.mark.parametrize(
    ("taken", "refused", "words"),
    [
        (with_names(MAX_NAMES), with_names(MAX_NAMES + 1), "100,000 names"),
        (b"[" * MAX_CONTAINERS, b"[{" * (MAX_CONTAINERS // 2) + b"[", "100,000 lists and objects"),
        (b"[1" + b",1" * (MAX_VALUES - 1), b"[1" + b",1" * MAX_VALUES, "1,048,576 entries"),
    ],
    ids=["names", "lists", "entries"],
)
def test_a_body_has_a_largest_number_of_parts(taken: bytes, refused: bytes, words: str) -> None:
    check_num_parts(taken)
    with pytest.raises(InvalidRequestError, match=words):
        check_num_parts(refused)


@pytest.mark.parametrize("text", [",:[{" * 300_000, '\\",[' * 300_000, "\\" * 300_001 + '"[' + "," * 1_100_000])
def test_a_text_may_have_as_many_signs_as_it_likes(text: str) -> None:
    check_num_parts(json.dumps({"text": text, "more": text[:10]}).encode())


def count(value: Any) -> tuple[int, int, int]:
    """Returns the names, the containers and the entries of a value; an empty container counts as an entry of its own."""
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = [count(item) for item in (value.values() if isinstance(value, dict) else value)]
    names, containers, entries = (sum(each) for each in zip(*inner, strict=True)) if inner else (0, 0, 0)
    return names + (len(value) if isinstance(value, dict) else 0), containers + 1, entries + max(1, len(value))


LETTERS = st.text(st.sampled_from('a",:[]{}\\é'), max_size=6)
VALUES = st.recursive(
    LETTERS | st.integers(0, 9), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(LETTERS, inner, max_size=4)
)


@given(value=VALUES, limits=st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 8)), is_ascii=st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_the_count_is_that_of_the_value(value: Any, limits: tuple[int, int, int], is_ascii: bool) -> None:
    raw = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in zip(("MAX_NAMES", "MAX_CONTAINERS", "MAX_VALUES"), limits, strict=True):
            patch.setattr(parse, name, limit)
        is_over = any(number > limit for number, limit in zip(count(value), limits, strict=True))
        try:
            check_num_parts(raw)
        except InvalidRequestError:
            assert is_over
        else:
            assert not is_over


def test_a_body_of_too_many_fields_takes_little_more_memory_than_its_text() -> None:
    raw = json.dumps({"messages": HELLO, **{f"f{i:06d}": 1 for i in range(300_000)}}).encode()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError):
            parse_body(raw, ChatBody)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(raw)


def test_an_error_does_not_hold_the_mistakes_that_it_does_not_name() -> None:
    raw = json.dumps({"messages": HELLO, **{f"f{i}": 1 for i in range(2000)}}).encode()
    with pytest.raises(InvalidRequestError, match="too many mistakes") as found:
        parse_body(raw, ChatBody)
    assert found.value.__context__ is None


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Held:
    """What a reading made of a body."""


@pytest.mark.usefixtures("uncollected")
def test_what_a_refused_reading_made_is_freed_at_once() -> None:
    made: list[weakref.ref[Held]] = []

    def read() -> None:
        held = Held()
        made.append(weakref.ref(held))
        raise InvalidRequestError("no")

    async def main() -> None:
        threads = ReadingThreads(ReadingQueue(1))
        for _ in range(3):
            try:
                await threads.run("a", 1, read)
            except InvalidRequestError:
                continue

    asyncio.run(main())
    deadline_s = time.monotonic() + 300
    while any(ref() is not None for ref in made) and time.monotonic() < deadline_s:  # the last thread may be about to end
        time.sleep(0.01)
    assert [ref() for ref in made] == [None] * 3


def test_a_list_that_is_too_long_is_refused_before_its_entries_are_looked_at(client: httpx.Client) -> None:
    """Each has a mistake at its end, which would be reported otherwise."""
    with pytest.raises(InvalidRequestError, match="at most 2048"):
        text_list("input")(["x"] * 2048 + [None])
    with pytest.raises(InvalidRequestError, match="at most 256"):
        check_prompt(["x"] * 256 + [None])
    for path, field in (("/v1/embeddings", "input"), (TEXT, "prompt"), ("/completion", "prompt")):
        reply = client.post(path, json={field: [1] * 5000 + [2**31 - 1]})
        assert reply.json()["error"]["code"] == "context_length_exceeded", reply.text
    error = check_error(client.post(CHAT, json={"messages": HELLO, "guided_choice": ["x"] * 1000 + [1]}), 400)
    assert "list of 1000 or fewer" in error["message"]
    error = check_error(client.post("/completion", json={"prompt": "x", "logit_bias": [[1, 1]] * 1024 + [1]}), 400)
    assert "list of 1024 or fewer" in error["message"]


def make_properties(number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(number)}}


@pytest.mark.parametrize("field", ["guided_json", "structured_outputs", "response_format"])
def test_a_schema_is_not_written_before_its_size_is_known(
    client: httpx.Client, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    dumps = json.dumps

    def note(value: Any, **options: Any) -> str:
        text = dumps(value, **options)
        written.append(len(text))
        return text

    schema = make_properties(20_000)
    fields: dict[str, dict[str, Any]] = {
        "guided_json": {"guided_json": schema},
        "structured_outputs": {"structured_outputs": {"json": schema}},
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
    }
    body = dumps({"messages": HELLO, **fields[field]})
    monkeypatch.setattr(json, "dumps", note)
    reply = client.post(CHAT, content=body, headers=JSON)
    monkeypatch.undo()
    error = check_error(reply, 400)
    assert "65536 characters" in error["message"]
    assert "1000 properties" in error["message"]
    assert max(written, default=0) < MAX_CHARS


def test_a_tool_that_is_too_large_is_told_the_limits(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": make_properties(20_000)}}
    error = check_error(client.post(CHAT, json={"messages": HELLO, "tools": [tool], "tool_choice": "required"}), 400)
    assert "65536 characters" in error["message"]


@given(value=VALUES, repeated=st.integers(1, 40_000))
@example(value=[[]], repeated=26_213)
@settings(max_examples=examples(50), deadline=None)
def test_a_schema_within_the_limit_is_not_refused_by_its_size(value: Any, repeated: int) -> None:
    schema = {"enum": [value] * repeated}
    length = len(json.dumps(schema, ensure_ascii=False, separators=(",", ":")))
    try:
        check_schema_size(schema, "guided_json")
    except InvalidRequestError:
        assert len(json.dumps(schema)) > MAX_CHARS
    else:
        assert length <= 2 * MAX_CHARS


def test_bodies_are_read_and_long_replies_written_off_the_event_loop(
    client: httpx.Client, speaking: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of routes that do little with their body as well."""

    def has_loop() -> bool:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        return True

    on_the_loop: list[bool] = []
    read, write = parse.from_json, state.json_response

    def note_read(*args: Any, **options: Any) -> Any:
        on_the_loop.append(has_loop())
        return read(*args, **options)

    def note_write(answer: Any) -> Any:
        if isinstance(answer, tokens.Tokenized | tokens.Detokenized):
            on_the_loop.append(has_loop())
        return write(answer)

    monkeypatch.setattr(parse, "from_json", note_read)
    monkeypatch.setattr(state, "json_response", note_write)
    for path, body in {
        "/api/show": {"model": MODEL},
        "/api/pull": {"model": MODEL},
        "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "b"},
        "/v1/unload_lora_adapter": {"lora_name": "a"},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [1]},
    }.items():
        client.post(path, json=body)
    assert on_the_loop == [False] * 8


@pytest.mark.parametrize("fields", [{"prompt": "", "return_token_strs": True}, {"content": "", "with_pieces": True}])
def test_a_reply_shows_the_texts_of_so_many_tokens(
    client: httpx.Client, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "MAX_SHOWN", 10)
    name, option = fields
    assert client.post("/tokenize", json={**fields, name: "a" * 10}).status_code == 200
    error = check_error(client.post("/tokenize", json={**fields, name: "a" * 11}), 400)
    assert error["param"] == option
    assert client.post("/tokenize", json={name: "a" * 11}).json()["count"] == 11
