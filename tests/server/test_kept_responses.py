"""Responses that others go on from, through the openai SDK, and the store that holds them."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import httpx
import msgspec
import openai
import pytest

from cloister.launch import resolve_settings
from cloister.policy import Credentials, Gate, Policy
from cloister.server.app import create_app
from cloister.server.errors import OverloadedError
from cloister.server.load_shedding import BodyBudget
from cloister.server.reading_queue import LONG_BYTES
from cloister.server.responses.keeping import ENTRY_BYTES, LIFETIME_S, ResponseStore, read_body
from cloister.server.serve import ServerApp
from cloister.server.state import ServerState, open_reading_threads
from cloister.text import ChatTemplate, Tokenizer
from cloister.types.config import ServerConfig
from cloister.types.errors import InvalidRequestError, NotFoundError, PolicyError
from tests.server.running_server import INFO, MODEL, ScriptedEngine, make_gate, running, says

ROOMY = msgspec.structs.replace(INFO, max_model_len=4096)


@contextmanager
def keeping(model_path, gate=None, script=None):
    """Serves with a store; yields the address and the engine."""
    engine = ScriptedEngine(script or says("ok"), model=ROOMY)
    config = ServerConfig(port=0, drain_timeout_s=0.2)

    @asynccontextmanager
    async def open_app():
        template = ChatTemplate.load(model_path)
        app = create_app(engine, Tokenizer(model_path), template, gate or make_gate(), config, responses_kept=ResponseStore())
        yield ServerApp(app, engine)

    with running(open_app, config) as server:
        yield server.url, engine


def sdk_of(url, key="none"):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def last_prompt(engine):
    return bytes(engine.taken[-1].token_ids).decode()


@pytest.fixture(scope="module")
def served(model_path):
    with keeping(model_path) as (url, engine), sdk_of(url) as sdk:
        yield sdk, engine


def ask(sdk, text, **fields):
    return sdk.responses.create(model=MODEL, input=text, **fields)


def test_a_response_goes_on_from_the_one_before_it(served):
    sdk, engine = served
    first = ask(sdk, "one", instructions="be kind")
    second = ask(sdk, "two", previous_response_id=first.id)
    assert last_prompt(engine) == "user: one\nassistant: ok\nuser: two\nassistant:"
    assert (second.previous_response_id, second.store) == (first.id, True)
    ask(sdk, "three", previous_response_id=second.id, instructions="be brief")
    said = "system: be brief\nuser: one\nassistant: ok\nuser: two\nassistant: ok\nuser: three\nassistant:"
    assert last_prompt(engine) == said


def test_a_streamed_response_is_gone_on_from_too(served):
    sdk, engine = served
    with sdk.responses.stream(model=MODEL, input="one") as stream:
        first = stream.get_final_response()
    ask(sdk, "two", previous_response_id=first.id)
    assert last_prompt(engine).startswith("user: one\nassistant: ok\n")


def test_calls_and_their_results_are_part_of_what_is_kept(model_path):
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    script = says('<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    with keeping(model_path, script=script) as (url, engine), sdk_of(url) as sdk:
        first = ask(sdk, "one", tools=[tool])
        (call,) = first.output
        result = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
        ask(sdk, result, tools=[tool], previous_response_id=first.id)
        assert last_prompt(engine).index("user: one") < last_prompt(engine).index("42")


def test_who_asks_for_the_policy_is_told_what_is_kept(served):
    sdk, _ = served
    summary = httpx.get(str(sdk.base_url) + "policy").json()["summary"]
    assert "stay in memory for an hour" in summary


def test_a_response_is_shown_and_forgotten(served):
    sdk, _ = served
    first = ask(sdk, "one")
    assert sdk.responses.retrieve(first.id).output_text == "ok"
    sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        ask(sdk, "two", previous_response_id=first.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_what_is_not_to_be_kept_is_not(served):
    sdk, _ = served
    first = ask(sdk, "one", store=False)
    assert first.store is False
    with pytest.raises(openai.NotFoundError):
        ask(sdk, "two", previous_response_id=first.id)


def test_another_tenant_goes_on_from_nothing(model_path):
    credentials, ann = Credentials.empty().add("ann")
    credentials, bob = credentials.add("bob")
    gate = Gate(Policy("team"), credentials, loopback=True)
    with keeping(model_path, gate) as (url, engine), sdk_of(url, ann) as mine, sdk_of(url, bob) as others:
        first = ask(mine, "secret")
        for attack in (
            lambda: ask(others, "two", previous_response_id=first.id),
            lambda: others.responses.retrieve(first.id),
            lambda: others.responses.delete(first.id),
        ):
            with pytest.raises(openai.NotFoundError):
                attack()
        assert len(engine.taken) == 1
        ask(mine, "two", previous_response_id=first.id)
        assert "secret" in last_prompt(engine)


def test_who_cannot_be_told_apart_keeps_nothing(model_path):
    gate = Gate(Policy("open"), None, loopback=False)
    with keeping(model_path, gate) as (url, _), sdk_of(url) as sdk:
        assert ask(sdk, "one").store is False
        for fields in ({"store": True}, {"previous_response_id": "resp-1"}):
            with pytest.raises(openai.BadRequestError, match=r"keeps nothing|nothing is kept"):
                ask(sdk, "one", **fields)


def test_profiles_say_whether_responses_are_kept():
    def keeps(profile, **flags):
        return resolve_settings({"profile": profile, "model": "cloister-5m", **flags}).server.config.keep_responses

    assert [keeps(profile) for profile in ("open", "team", "private", "paranoid")] == [True, False, False, False]
    assert (keeps("team", keep_responses=True), keeps("open", keep_responses=False)) == (True, False)
    for profile in ("private", "paranoid"):
        with pytest.raises(PolicyError, match=r"storage\.responses"):
            keeps(profile, keep_responses=True)


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def put(store, owner, name, num_bytes=100):
    body = read_body(b'{"input": "%s"}' % (b"x" * num_bytes), store, owner)
    store.keep(owner, body, {"id": name, "output": []})


def names(store, owner):
    found = []
    for name in ("a", "b", "c", "d"):
        try:
            store.find(owner, name)
            found.append(name)
        except NotFoundError:
            pass
    return found


def test_a_response_stays_an_hour_after_it_was_last_gone_on_from_and_not_after_it_was_looked_at():
    clock = Clock()
    store = ResponseStore(clock=clock)
    put(store, b"ann", "a")
    put(store, b"ann", "b")
    clock.now_s = LIFETIME_S - 1
    assert names(store, b"ann") == ["a", "b"]
    read_body(b'{"input": "more", "previous_response_id": "a"}', store, b"ann")
    clock.now_s = 2 * LIFETIME_S - 2
    assert names(store, b"ann") == ["a"]
    clock.now_s = 4 * LIFETIME_S
    assert names(store, b"ann") == []
    put(store, b"ann", "b")
    assert list(store._kept) == ["b"]


def test_what_has_had_its_time_is_gone_though_nobody_asks_for_anything(monkeypatch):
    monkeypatch.setattr("cloister.server.responses.keeping.LIFETIME_S", 0.05)
    store = ResponseStore()
    put(store, b"ann", "a")
    put(store, b"ann", "b")
    give_up_s = time.monotonic() + 300
    while store._kept:
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def test_who_fills_the_store_loses_their_own():
    store = ResponseStore(most_bytes=4000 + 3 * ENTRY_BYTES)
    put(store, b"bob", "a")
    for name in ("b", "c", "d"):
        put(store, b"ann", name, 1500)
    assert names(store, b"bob") == ["a"]
    assert names(store, b"ann") == ["c", "d"]
    put(store, b"ann", "a2", 5000 + 3 * ENTRY_BYTES)
    assert names(store, b"ann") == ["c", "d"]


def test_very_many_short_entries_take_no_more_memory_than_a_few_long_ones():
    store = ResponseStore(most_bytes=100 * 1024)
    put(store, b"bob", "a")
    for number in range(5000):
        store.put(f"schema-{number}", b"ann", b"{}")
    assert len(store._kept) <= 100
    assert names(store, b"bob") == ["a"]
    store.forget(b"ann", "schema-")
    assert list(store._kept) == ["a"]
    assert store._num_bytes == sum(kept.num_bytes for kept in store._kept.values())


def test_of_a_conversation_only_what_prompts_have_is_kept():
    store = ResponseStore()
    part = '{"type": "output_text", "text": "hi", "logprobs": [1, 2, 3]}'
    raw = (
        f'{{"input": [{{"role": "assistant", "content": [{part}]}}, {{"type": "reasoning", "encrypted_content": "zanzibar"}}]}}'
    )
    body = read_body(raw.encode(), store, b"ann")
    written = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok", "logprobs": [4, 5]}]}
    store.keep(b"ann", body, {"id": "a", "output": [written]})
    kept = store.find(b"ann", "a")
    assert b"hi" in kept.items
    assert b"ok" in kept.items
    assert b"logprobs" not in kept.items
    assert b"zanzibar" not in kept.items
    assert b"logprobs" in kept.response, "what was answered is kept as it was"


def test_a_conversation_that_grew_longer_than_a_request_may_be_is_not_continued():
    store = ResponseStore(most_continued_bytes=2048)
    put(store, b"ann", "a", 3000)
    with pytest.raises(InvalidRequestError, match="longer than 2 KiB; begin a new one"):
        read_body(b'{"input": "more", "previous_response_id": "a"}', store, b"ann")


def test_a_short_body_that_continues_a_long_conversation_waits_with_the_long_ones_and_is_charged_its_memory():
    store, threads = ResponseStore(), open_reading_threads(2)
    put(store, b"ann", "a", 300_000)
    budget = BodyBudget(1 << 20)
    charge = budget.open("network")
    state = replace(ServerState(None, None, None, None, threads=threads, num_body_bytes=50), body_charge=charge)
    entered = []
    enter = threads._queue.enter
    threads._queue.enter = lambda tenant, num_bytes: entered.append(num_bytes) or enter(tenant, num_bytes)

    def read():
        return read_body(b'{"input": "more", "previous_response_id": "a"}', store, b"ann")

    assert len(asyncio.run(state.off_the_loop(read)).input) == 2
    assert entered[0] == 50
    assert entered[1] > 300_000 >= LONG_BYTES
    assert charge.num_bytes == entered[1] - 50
    charge.add(800_000 - charge.num_bytes)
    charge.is_whole = True
    other = budget.open("another network")
    other.add(100_000)  # it still arrives
    with pytest.raises(OverloadedError, match="no memory"):
        asyncio.run(state.off_the_loop(read))
    assert (other.is_shed, budget.num_bytes) == (False, 100_000), "the one that asks for it has no memory, not others"
