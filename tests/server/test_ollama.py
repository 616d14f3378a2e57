"""Ollama's API through its Python client, on real engines and scripted ones."""

from __future__ import annotations

import json

import httpx
import msgspec
import numpy as np
import ollama
import pytest

from cloister.server.ollama import schemas
from cloister.server.ollama.models import write_count
from cloister.server.ollama.reading import _messages
from cloister.types.config import ServerConfig
from cloister.types.errors import EngineError
from cloister.types.request import FinishReason, GrammarKind, PoolingParams
from tests.server.running_server import INFO, MODEL, ScriptedEngine, make_gate, output, says, serving_script
from tests.server.test_dialects import DOCS
from tests.server.test_embeddings import letters

SPEECH = "Größe: 5 €. " * 40
HELLO = [{"role": "user", "content": "hello"}]
ROOMY = msgspec.structs.replace(INFO, max_model_len=4096)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
THINKING = ServerConfig(port=0, drain_timeout_s=1.0, reasoning_parser="think")


@pytest.fixture(scope="module")
def sdk(speaking):
    with ollama.Client(host=speaking.url) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def real(thinking):
    with ollama.Client(host=thinking.url) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def counting(model_path):
    """A server whose vectors count letters."""
    model = msgspec.structs.replace(INFO, hidden_size=8, pooling=PoolingParams(kind="mean"))
    with serving_script(model_path, ScriptedEngine(letters, model=model)) as server:
        yield server


@pytest.fixture(scope="module")
def vectors(counting):
    with ollama.Client(host=counting.url) as sdk:
        yield sdk


def asking(model_path, script, ask, **options):
    """Asks a server that plays a script; returns what came, and the request that the engine got."""
    engine = ScriptedEngine(says(script) if isinstance(script, str) else script, model=ROOMY)
    with serving_script(model_path, engine, **options) as server, ollama.Client(host=server.url) as sdk:
        came = ask(sdk)
    return came, engine.taken[0] if engine.taken else None


def text_of(request):
    return bytes(request.token_ids).decode()


def test_the_client_gets_an_answer(sdk):
    reply = sdk.chat(MODEL, HELLO, options={"num_predict": 20})
    assert (reply.model, reply.done, reply.done_reason) == (MODEL, True, "length")
    assert SPEECH.startswith(reply.message.content)
    assert reply.message.role == "assistant"
    assert (reply.prompt_eval_count, reply.eval_count) == (len(b"user: hello\nassistant:"), 20)


def test_the_client_streams_the_same_answer(sdk):
    whole = sdk.chat(MODEL, HELLO, options={"num_predict": 30})
    *pieces, last = sdk.chat(MODEL, HELLO, options={"num_predict": 30}, stream=True)
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert not any(piece.done for piece in pieces)
    assert (last.done, last.done_reason, last.eval_count, last.message.content) == (True, "length", 30, "")


def test_an_answer_is_a_stream_of_lines_unless_the_request_says_otherwise(client):
    reply = client.post("/api/generate", json={"model": MODEL, "prompt": "hello", "options": {"num_predict": 5}})
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert len(lines) > 2
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    whole = client.post("/api/generate", json={"prompt": "hello", "stream": False, "options": {"num_predict": 5}})
    assert whole.json()["response"] == "".join(line["response"] for line in lines)


def test_times_are_those_of_the_engine(sdk):
    reply = sdk.chat(MODEL, HELLO, options={"num_predict": 50})
    parts = (reply.load_duration, reply.prompt_eval_duration, reply.eval_duration)
    assert min(parts) > 0
    assert sum(parts) <= reply.total_duration < 300e9


def test_a_prompt_is_a_conversation_and_a_raw_one_is_not(model_path):
    ask = {"prompt": "hello", "options": {"num_predict": 2}}
    _, framed = asking(model_path, "ok", lambda sdk: sdk.generate(MODEL, system="be kind", **ask))
    assert text_of(framed) == "system: be kind\nuser: hello\nassistant:"
    reply, raw = asking(model_path, "ok", lambda sdk: sdk.generate(MODEL, raw=True, **ask))
    assert text_of(raw) == "hello"
    assert reply.response == "ok"


def test_an_answer_without_a_bound_may_fill_the_window(model_path):
    for ask in ({"prompt": "hello", "raw": True}, {"prompt": "hello"}, {"prompt": "hello", "options": {"num_predict": -1}}):
        _, request = asking(model_path, "ok", lambda sdk, ask=ask: sdk.generate(MODEL, **ask))
        assert request.sampling.max_tokens in (None, ROOMY.max_model_len - len(request.token_ids))


def test_options_reach_the_engine(model_path):
    options = {
        "num_predict": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.75,
        "min_p": 0.125,
        "seed": 11,
        "stop": ["END"],
        "repeat_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.5,
        "num_ctx": 512,
        "num_gpu": 1,
        "use_mmap": True,
    }
    _, request = asking(model_path, "ok", lambda sdk: sdk.chat(MODEL, HELLO, options=options, keep_alive="5m"))
    wanted = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.75,
        "min_p": 0.125,
        "seed": 11,
        "stop": ("END",),
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.5,
    }
    assert {name: getattr(request.sampling, name) for name in wanted} == wanted


def test_what_is_left_open_is_the_models_own_and_minus_one_is_no_seed(model_path):
    _, request = asking(model_path, "ok", lambda sdk: sdk.chat(MODEL, HELLO, options={"seed": -1, "repeat_last_n": 0}))
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.25, 7, None)
    assert request.sampling.repetition_penalty == 1.0


def test_a_seed_repeats_an_answer(real):
    options = {"seed": 5, "temperature": 1.0, "num_predict": 12}
    first, second = (real.generate(MODEL, "hello", raw=True, options=options).response for _ in range(2))
    assert first == second


@pytest.mark.parametrize("ask", [{"raw": True}, {}])
def test_the_form_of_an_answer_reaches_the_engine(model_path, ask):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    _, free = asking(model_path, "{}", lambda sdk: sdk.generate(MODEL, "hello", format="json", **ask))
    assert free.sampling.grammar.kind is GrammarKind.JSON_OBJECT
    _, bound = asking(model_path, "{}", lambda sdk: sdk.generate(MODEL, "hello", format=schema, **ask))
    assert json.loads(bound.sampling.grammar.source) == schema
    _, chat = asking(model_path, "{}", lambda sdk: sdk.chat(MODEL, HELLO, format=schema))
    assert json.loads(chat.sampling.grammar.source) == schema


def test_calls_come_whole_with_objects_for_arguments(model_path):
    def ask(sdk):
        whole = sdk.chat(MODEL, HELLO, tools=[WEATHER])
        return whole, list(sdk.chat(MODEL, HELLO, tools=[WEATHER], stream=True))

    (whole, streamed), _ = asking(model_path, f"I ask.{CALL}", ask)
    (call,) = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Köln"})
    assert (whole.message.content, whole.done_reason) == ("I ask.", "stop")
    calls = [call for line in streamed for call in line.message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [{"city": "Köln"}]


def test_results_of_calls_go_back_in_order_without_ids(model_path):
    call = {"function": {"name": "weather", "arguments": {"city": "Köln"}}}
    other = {"function": {"name": "time", "arguments": {}}}
    said = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call, other]},
        {"role": "tool", "content": "noon", "tool_name": "time"},
        {"role": "tool", "content": "rain", "tool_name": "weather"},
    ]
    _, request = asking(model_path, "ok", lambda sdk: sdk.chat(MODEL, said, tools=[WEATHER]))
    assert "noon" in text_of(request)
    made = _messages([schemas.OllamaMessage.model_validate(message) for message in said])
    ids = [entry["id"] for entry in made[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in made[2:]] == ids[::-1]
    assert len(set(ids)) == 2


def test_reasoning_is_thinking(model_path):
    reply, _ = asking(model_path, "<think>hm</think>yes", lambda sdk: sdk.chat(MODEL, HELLO), config=THINKING)
    assert (reply.message.thinking, reply.message.content) == ("hm", "yes")
    lines, _ = asking(
        model_path, "<think>hm</think>yes", lambda sdk: list(sdk.generate(MODEL, "hello", stream=True)), config=THINKING
    )
    assert "".join(line.thinking or "" for line in lines) == "hm"
    assert "".join(line.response for line in lines) == "yes"


@pytest.mark.parametrize(("is_strict", "status"), [(False, 200), (True, 400)])
def test_a_model_that_does_not_think_says_so(model_path, is_strict, status):
    config = ServerConfig(port=0, drain_timeout_s=1.0, strict_fields=is_strict)
    with serving_script(model_path, ScriptedEngine(says("ok")), config=config) as server:
        reply = httpx.post(f"{server.url}/api/chat", json={"messages": HELLO, "think": True, "stream": False})
    assert reply.status_code == status
    assert reply.headers.get("cloister-ignored-fields") == (None if is_strict else "think")
    assert ("`think` is refused" in reply.text) == is_strict


def test_log_probabilities_come_with_the_tokens(real):
    options = {"num_predict": 3, "temperature": 0}
    for reply in (
        real.chat(MODEL, HELLO, logprobs=True, top_logprobs=2, options=options),
        real.generate(MODEL, "hello", raw=True, logprobs=True, top_logprobs=2, options=options),
    ):
        assert len(reply.logprobs) == 3
        for position in reply.logprobs:
            assert position.logprob == position.top_logprobs[0].logprob < 0


@pytest.mark.parametrize("ask", ["chat", "generate"])
def test_a_request_that_asks_nothing_says_that_the_model_is_there(sdk, ask):
    reply = getattr(sdk, ask)(MODEL, keep_alive=-1)
    assert (reply.done, reply.done_reason) == (True, "load")


def test_vectors_are_those_of_the_openai_route(vectors, counting):
    texts = ["abc", "hhh", "aab"]
    embedded = vectors.embed(MODEL, texts)
    asked = {"input": texts, "normalize": True}
    ours = httpx.post(f"{counting.url}/v1/embeddings", json=asked).json()["data"]
    assert np.allclose(embedded.embeddings, [entry["embedding"] for entry in ours])
    assert (embedded.prompt_eval_count, embedded.total_duration > 0) == (9, True)
    assert len(vectors.embed(MODEL, "abc", dimensions=2).embeddings[0]) == 2
    assert vectors.embed(MODEL, "").embeddings == []
    one = np.array(vectors.embeddings(MODEL, "aab").embedding)
    assert np.allclose(one, [2 / 3, 1 / 3, 0, 0, 0, 0, 0, 0])


def test_a_text_beyond_the_window_is_cut_unless_the_request_says_otherwise(vectors):
    window = INFO.max_model_len
    assert vectors.embed(MODEL, "a" * (window + 9)).prompt_eval_count == window
    with pytest.raises(ollama.ResponseError, match="context window"):
        vectors.embed(MODEL, "a" * (window + 9), truncate=False)


def test_what_is_served_is_listed_shown_and_running(sdk):
    (model,) = sdk.list().models
    assert (model.model, model.digest) == (MODEL, sdk.ps().models[0].digest)
    assert sdk.ps().models[0].context_length == INFO.max_model_len
    shown = sdk.show(MODEL)
    assert "completion" in shown.capabilities
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == INFO.max_model_len
    assert "assistant:" in shown.template
    assert sdk.show(f"{MODEL}:latest").template == shown.template


@pytest.mark.parametrize(("count", "written"), [(4_700_000, "4.7M"), (1_240_000_000, "1.2B"), (900, "900")])
def test_weights_are_counted_as_people_say_it(count, written):
    assert write_count(count) == written


def test_the_tag_that_clients_add_names_the_same_model(sdk):
    assert sdk.chat(f"{MODEL}:latest", HELLO, options={"num_predict": 1}).model == MODEL


def test_a_pull_of_what_is_there_succeeds_and_any_other_is_refused(sdk):
    assert sdk.pull(MODEL).status == "success"
    assert [line.status for line in sdk.pull(MODEL, stream=True)] == ["success"]
    with pytest.raises(ollama.ResponseError, match="downloads nothing at a client's request") as caught:
        sdk.pull("llama3.2")
    assert caught.value.status_code == 403


def test_curl_as_ollamas_documentation_has_it_is_answered_and_a_browsers_form_is_not(client):
    body = json.dumps({"messages": HELLO, "stream": False, "options": {"num_predict": 1}}).encode()
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert client.post("/api/chat", content=body, headers=form).json()["done"]
    for browser in ({"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        assert client.post("/api/chat", content=body, headers={**form, **browser}).status_code == 415
    assert client.post("/v1/chat/completions", content=body, headers=form).status_code == 415


def test_errors_are_one_sentence(client, sdk):
    with pytest.raises(ollama.ResponseError) as caught:
        sdk.chat("other", HELLO)
    assert caught.value.status_code == 404
    assert f"it serves `{MODEL}`" in caught.value.error
    for path, sent in (
        ("/api/chat", {"json": {"messages": "hello"}}),
        ("/api/chat", {"content": b"{", "headers": {"content-type": "application/json"}}),
        ("/api/generate", {"content": b"{}", "headers": {"content-type": "text/plain"}}),
        ("/api/nothing", {"json": {}}),
        ("/api/tags", {"json": {}}),
    ):
        reply = client.post(path, **sent)
        assert reply.status_code >= 400
        assert list(reply.json()) == ["error"]
        assert isinstance(reply.json()["error"], str)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"options": {"temperature": 9}}, "options.temperature"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"format": {"type": 3}}, "format"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1, 2]}, "context"),
        ({"images": ["aGk="]}, "images"),
        ({"suffix": "end"}, "suffix"),
        ({"raw": True, "system": "be kind"}, "system"),
        ({"raw": True, "top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_a_field_at_fault_is_named_as_the_client_knows_it(client, fields, named):
    reply = client.post("/api/generate", json={"prompt": "hello", "stream": False, **fields})
    assert (reply.status_code, f"`{named}`" in reply.json()["error"]) == (400, True), reply.text


def test_a_fault_on_the_way_is_the_last_line(model_path):
    def script(request):
        return [output(request, "a"), output(request, end=FinishReason.ERROR)]

    def ask(sdk):
        answer = iter(sdk.chat(MODEL, HELLO, stream=True))
        assert next(answer).message.content == "a"
        with pytest.raises(ollama.ResponseError, match="engine failed"):
            next(answer)

    asking(model_path, script, ask)


def test_a_request_that_is_refused_has_its_status_though_it_is_a_stream(model_path):
    def ask(sdk):
        with pytest.raises(ollama.ResponseError) as caught:
            list(sdk.chat(MODEL, HELLO, stream=True))
        return caught.value.status_code

    assert asking(model_path, lambda request: [EngineError("down")], ask)[0] == 503


def test_a_profile_without_streams_answers_in_one_line_and_refuses_to_stream(model_path):
    def ask(sdk):
        whole = httpx.post(sdk._client.base_url.join("/api/chat"), json={"messages": HELLO})
        with pytest.raises(ollama.ResponseError) as caught:
            list(sdk.chat(MODEL, HELLO, stream=True))
        return whole, caught.value.status_code

    (whole, status), _ = asking(model_path, "ok", ask, gate=make_gate("paranoid"))
    assert (whole.json()["message"]["content"], whole.json()["done"]) == ("ok", True)
    assert status == 403


PAGE = (DOCS / "ollama.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    sorted(
        {
            *schemas.Options.model_fields,
            *schemas.OllamaChatBody.model_fields,
            *schemas.OllamaGenerateBody.model_fields,
            *schemas.OllamaEmbedBody.model_fields,
            *schemas.REFUSED,
            *schemas.REFUSED_OPTIONS,
        }
    ),
)
def test_every_field_is_on_the_page(name):
    assert f"`{name}`" in PAGE
