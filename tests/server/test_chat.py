"""Chat completions, through the openai SDK and as plain JSON, on a real engine."""

from __future__ import annotations

import httpx
import openai
import pytest

from cloister.types.request import FinishReason, TokenLogprobs
from tests.server.running_server import MODEL, RunningServer, ScriptedEngine, output, says, serving_script

HELLO = [{"role": "user", "content": "hello"}]
SPEECH = "Größe: 5 €. " * 40


@pytest.fixture(scope="module")
def sdk(speaking: RunningServer):
    with openai.OpenAI(base_url=f"{speaking.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def test_the_sdk_chats(sdk):
    reply = sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=20)
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.choices[0].message.role == "assistant"
    assert SPEECH.startswith(reply.choices[0].message.content)
    assert reply.choices[0].finish_reason == "length"
    num_prompt = len(b"user: hello\nassistant:")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (num_prompt, 20)
    assert reply.usage.total_tokens == num_prompt + 20


def test_the_sdk_streams_the_same_text(sdk):
    whole = sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=30)
    chunks = list(
        sdk.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=30, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({c.id for c in chunks}) == 1


def test_a_stream_ends_with_done_and_has_usage_only_when_asked(client):
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "stream": True}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("data: [DONE]\n\n")
    assert '"usage"' not in reply.text
    with_usage = client.post("/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}})
    assert with_usage.text.count('"usage":null') == with_usage.text.count("data: {") - 1


def test_a_stream_never_breaks_a_character(client):
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 40, "stream": True}
    assert "\ufffd" not in client.post("/v1/chat/completions", json=body).text


def test_a_stop_string_ends_the_answer_and_is_no_part_of_it(sdk):
    reply = sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=40, stop=["€", "zzz"])
    assert reply.choices[0].message.content == "Größe: 5 "
    assert reply.choices[0].finish_reason == "stop"


def test_several_choices_come_from_one_prompt(thinking):
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none") as sdk:
        reply = sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=6, n=3, seed=7)
        again = sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=6, n=3, seed=7)
        streamed = {0: "", 1: "", 2: ""}
        for chunk in sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=6, n=3, seed=7, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    texts = [choice.message.content for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert texts == [choice.message.content for choice in again.choices]
    assert texts == list(streamed.values())
    assert reply.usage.completion_tokens == 18
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_a_cache_salt_separates_what_equal_prompts_share(thinking):
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none") as sdk:

        def count_cached(salt: str | None) -> int:
            extra = {} if salt is None else {"cache_salt": salt}
            reply = sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1, temperature=0, extra_body=extra)
            return reply.usage.prompt_tokens_details.cached_tokens

        found = [count_cached(salt) for salt in (None, None, "ward 3", "ward 3", "ward 4")]
    assert found[1] > 0
    assert found[2:] == [0, found[1], 0]


def test_logprobs_of_a_reply_and_of_its_stream_are_equal(thinking):
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none") as sdk:
        positions = sdk.chat.completions.create(**asked).choices[0].logprobs.content
        chunks = list(sdk.chat.completions.create(**asked, stream=True))
    assert len(positions) == 5
    for position in positions:
        assert len(position.top_logprobs) == 3
        assert position.top_logprobs[0].logprob == position.logprob
        assert position.logprob <= 0
        assert bytes(position.bytes).decode(errors="replace") == position.token
    streamed = [p for c in chunks if c.choices[0].logprobs for p in c.choices[0].logprobs.content]
    assert streamed == positions


def test_every_chunk_but_the_last_has_a_list_of_logprobs(thinking):
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 5, "temperature": 0, "logprobs": True, "n": 2}
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none") as sdk:
        choices = [c.choices[0] for c in sdk.chat.completions.create(**asked, stream=True)]
    assert [c.logprobs.content for c in choices if c.delta.role] == [[], []]
    assert all(c.finish_reason is not None or c.logprobs.content is not None for c in choices)


def test_every_role_reaches_the_template(model_path):
    engine = ScriptedEngine(says("ok"))
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    with serving_script(model_path, engine) as server:
        reply = httpx.post(f"{server.url}/v1/chat/completions", json={"model": MODEL, "messages": messages})
    assert reply.status_code == 200
    # The template of these tests has no place for calls, so that they are text.
    call, result = '<tool_call>{"name": "add", "arguments": {}}</tool_call>', "<tool_response>4</tool_response>"
    prompt = f"system: be brief\nuser: 2+2?\nassistant: {call}\nuser: {result}\nassistant:"
    assert bytes(engine.taken[0].token_ids).decode() == prompt


def test_what_the_client_leaves_open_is_the_models_default(model_path):
    engine = ScriptedEngine(says("ok"))
    body = {"model": MODEL, "messages": HELLO}
    with serving_script(model_path, engine) as server, httpx.Client(base_url=server.url) as client:
        client.post("/v1/chat/completions", json=body)
        client.post("/v1/chat/completions", json={**body, "temperature": 0, "top_k": -1})
    first, second = (request.sampling for request in engine.taken)
    assert (first.temperature, first.top_k, first.top_p, first.max_tokens) == (0.25, 7, 1.0, None)
    assert (second.temperature, second.top_k) == (0.0, 0)


def test_every_sampling_field_reaches_the_engine(model_path):
    engine = ScriptedEngine(says("ok"))
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": -3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    more = {"n": 2, "stop": "end", "stop_token_ids": [9], "logit_bias": {"12": -100}, "max_completion_tokens": 33}
    with serving_script(model_path, engine) as server:
        body = {"model": MODEL, "messages": HELLO, "priority": 4, **fields, **more}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
    sampling = engine.taken[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (sampling.n, sampling.stop, sampling.stop_token_ids) == (2, ("end",), (9,))
    assert (sampling.logit_bias, sampling.max_tokens) == ({12: -100.0}, 33)
    assert engine.taken[0].priority == 4


def test_minus_infinity_is_written_as_a_number(model_path):
    lowest = TokenLogprobs(97, float("-inf"), ((97, float("-inf")),), b"a", (b"a",))
    engine = ScriptedEngine(lambda r: [output(r, "a", end=FinishReason.LENGTH, logprobs=[lowest])])
    with serving_script(model_path, engine) as server:
        body = {"model": MODEL, "messages": HELLO, "logprobs": True, "top_logprobs": 1}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert reply["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_ids_do_not_depend_on_the_prompt(client):
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 1}
    assert len({client.post("/v1/chat/completions", json=body).json()["id"] for _ in range(5)}) == 5
