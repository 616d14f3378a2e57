"""llama.cpp's own routes, vLLM's, and sentences for what is not there."""

from __future__ import annotations

import json
import time

import httpx
import msgspec
import ollama
import pytest

from cloister.server import llamacpp
from cloister.server.errors import ABSENT
from cloister.types.request import FinishReason, GrammarKind
from tests.server.running_server import INFO, MODEL, ScriptedEngine, make_gate, output, says, serving_script, write_model
from tests.server.test_dialects import DOCS
from tests.server.test_embeddings import letters
from tests.text.test_infill import with_tokens

SPEECH = "Größe: 5 €. " * 40


def complete(client, **fields):
    return client.post("/completion", json={"prompt": "hello", "n_predict": 10, **fields})


def asked_of(model_path, path, model=INFO, **fields):
    """Returns the reply of a scripted server, and the request that its engine got."""
    engine = ScriptedEngine(says("ok"), model=model)
    with serving_script(model_path, engine) as server:
        reply = httpx.post(server.url + path, json=fields)
    return reply, engine.taken[0] if engine.taken else None


def test_a_prompt_is_gone_on_with(client):
    reply = complete(client).json()
    assert SPEECH.startswith(reply["content"])
    assert (reply["stop"], reply["stop_type"], reply["prompt"], reply["model"]) == (True, "limit", "hello", MODEL)
    assert (reply["tokens_predicted"], reply["tokens_evaluated"]) == (10, 5)
    assert reply["generation_settings"]["n_predict"] == 10
    times = reply["timings"]
    assert times["predicted_n"] == 10
    assert times["predicted_per_second"] == pytest.approx(10_000 / times["predicted_ms"])
    assert times["prompt_ms"] > 0


def test_a_stream_is_events_with_nothing_after_the_last(client):
    lines = [row.removeprefix("data: ") for row in complete(client, stream=True).text.split("\n\n") if row]
    *pieces, last = map(json.loads, lines)
    assert "".join(piece["content"] for piece in pieces) == complete(client).json()["content"]
    assert [piece["stop"] for piece in pieces] == [False] * len(pieces)
    assert (last["stop"], last["content"], last["tokens_predicted"]) == (True, "", 10)


def test_a_stopping_word_is_named(client):
    reply = complete(client, stop=[": 5"]).json()
    assert (reply["content"], reply["stop_type"], reply["stopping_word"]) == ("Größe", "word", ": 5")


def test_settings_reach_the_engine(model_path):
    _, request = asked_of(
        model_path,
        "/completion",
        prompt=["he", 108, "lo"],
        n_predict=-1,
        temperature=0.5,
        top_k=3,
        repeat_penalty=1.5,
        seed=-1,
        stop=["END"],
        logit_bias=[[65, 2.5], [66, False]],
        grammar='root ::= "yes" | "no"',
        cache_prompt=True,
        id_slot=0,
    )
    assert bytes(request.token_ids) == b"hello"
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty, sampling.seed) == (0.5, 3, 1.5, None)
    assert (sampling.stop, sampling.logit_bias) == (("END",), {65: 2.5, 66: -100.0})
    assert sampling.max_tokens == INFO.max_model_len - 5
    assert (sampling.grammar.kind, '"yes"' in sampling.grammar.source) == (GrammarKind.LARK, True)


def test_a_schema_is_the_form_of_the_answer(model_path):
    _, request = asked_of(model_path, "/completion", prompt="a", json_schema={"type": "object"})
    assert json.loads(request.sampling.grammar.source) == {"type": "object"}


def test_probabilities_and_tokens_come_where_they_are_asked_for(thinking):
    body = {"prompt": "hello", "n_predict": 3, "n_probs": 2, "return_tokens": True, "temperature": 0}
    reply = httpx.post(f"{thinking.url}/completion", json=body).json()
    assert [entry["id"] for entry in reply["completion_probabilities"]] == reply["tokens"]
    for entry in reply["completion_probabilities"]:
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] < 0
        assert len(entry["top_logprobs"]) == 2
    assert "completion_probabilities" not in httpx.post(f"{thinking.url}/completion", json={**body, "n_probs": 0}).json()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"n_predict": 0}, "n_predict"),
        ({"temperature": 9}, "temperature"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"mirostat": 2}, "mirostat"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"json_schema": {"type": 3}}, "json_schema"),
    ],
)
def test_a_field_at_fault_is_named_as_the_client_knows_it(client, fields, named):
    error = complete(client, **fields).json()["error"]
    assert f"`{named}`" in error["message"], error


def test_a_grammar_that_would_take_seconds_to_read_is_refused_at_once(client):
    rules = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(3000)) + 'r3000 ::= "a"\n'
    began_s = time.process_time()
    assert complete(client, grammar=rules).json()["error"]["param"] == "grammar"
    assert time.process_time() - began_s < 2


def test_a_grammar_is_never_repeated_in_an_error(client):
    assert "hunter2" not in complete(client, grammar='root ::= "hunter2" (').text


@pytest.fixture(scope="module")
def filling(tmp_path_factory):
    """A directory of a model that fills in the middle."""
    path = write_model(tmp_path_factory.mktemp("filling"))
    with_tokens(path, "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    return path


def test_what_is_missing_in_the_middle_is_filled_in(filling):
    model = msgspec.structs.replace(INFO, vocab_size=260)
    reply, request = asked_of(
        filling,
        "/infill",
        model,
        input_prefix="def f(",
        input_suffix="):",
        input_extra=[{"filename": "a.py", "text": "x = 1"}],
        prompt="a",
    )
    assert reply.json()["content"] == "ok"
    assert request.token_ids == [257, *b"x = 1\ndef f(a", 258, *b"):", 259]
    assert request.sampling.stop_token_ids == (257, 258, 259)


def test_ollamas_suffix_does_the_same(filling):
    engine = ScriptedEngine(says("ok"), model=msgspec.structs.replace(INFO, vocab_size=260))
    with serving_script(filling, engine) as server, ollama.Client(host=server.url) as sdk:
        assert sdk.generate(MODEL, "def f(", suffix="):").response == "ok"
        assert "insert" in sdk.show(MODEL).capabilities
    assert engine.taken[0].token_ids == [257, *b"def f(", 258, *b"):", 259]


def test_the_suffix_of_completions_does_the_same(filling):
    model = msgspec.structs.replace(INFO, vocab_size=260)
    body = {"prompt": ["def f(", ""], "suffix": "):", "stop_token_ids": [7]}
    engine = ScriptedEngine(says("ok"), model=model)
    with serving_script(filling, engine) as server:
        reply = httpx.post(f"{server.url}/v1/completions", json=body)
    assert [choice["text"] for choice in reply.json()["choices"]] == ["ok", "ok"]
    taken = sorted(engine.taken, key=lambda request: request.request_id)
    assert [request.token_ids for request in taken] == [[257, *b"def f(", 258, *b"):", 259], [257, 258, *b"):", 259]]
    assert {request.sampling.stop_token_ids for request in taken} == {(7, 257, 258, 259)}


def test_without_a_suffix_a_text_is_gone_on_with(filling):
    _, request = asked_of(filling, "/v1/completions", prompt="def f(", suffix="")
    assert (request.token_ids, request.sampling.stop_token_ids) == ([*b"def f("], ())


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": [1, 2]}, "prompt"), ({"prompt": "a", "echo": True}, "echo")],
)
def test_a_suffix_goes_with_a_text_that_is_not_repeated(filling, fields, param):
    reply, request = asked_of(filling, "/v1/completions", suffix="):", **fields)
    assert (reply.status_code, reply.json()["error"]["param"], request) == (400, param, None)
    assert "suffix" in reply.json()["error"]["message"]


def test_completions_of_a_model_that_does_not_fill_in_refuse_a_suffix(client):
    reply = client.post("/v1/completions", json={"prompt": "def f(", "suffix": "zanzibar"})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, "suffix", "no_infill")
    assert "zanzibar" not in reply.text


def test_a_model_that_does_not_fill_in_says_so(client):
    reply = client.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "no_infill")


def test_the_text_of_a_conversation_is_what_the_model_reads(client):
    messages = [{"role": "user", "content": "hi"}]
    reply = client.post("/apply-template", json={"messages": messages}).json()
    assert reply == {"prompt": "user: hi\nassistant:"}


def test_properties_tell_no_path(client, model_path):
    props = client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == INFO.max_model_len
    assert "assistant:" in props["chat_template"]
    assert (props["model_path"], props["eos_token"]) == (MODEL, "")
    assert str(model_path) not in json.dumps(props)


def test_ping_is_health(model_path):
    engine = ScriptedEngine(says("ok"))
    with serving_script(model_path, engine) as server:
        assert [httpx.request(method, f"{server.url}/ping").status_code for method in ("GET", "POST")] == [200, 200]
        engine.good = False
        assert httpx.get(f"{server.url}/ping").status_code == 503


def test_load_counts_what_the_engine_has(model_path):
    def script(request):
        return [output(request, "a"), 0.5, output(request, end=FinishReason.STOP)]

    with serving_script(model_path, ScriptedEngine(script)) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/load").json() == {"server_load": 0}
        body = {"prompt": "hello", "stream": True}
        with client.stream("POST", "/completion", json=body) as reply:
            next(reply.iter_lines())
            assert httpx.get(f"{server.url}/load").json() == {"server_load": 1}


def test_a_profile_that_tells_sums_only_tells_no_load(model_path):
    with serving_script(model_path, ScriptedEngine(says("ok")), gate=make_gate("private")) as server:
        reply = httpx.get(f"{server.url}/load")
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "refused_by_policy")


def test_pooled_vectors_are_embeddings(model_path):
    engine = ScriptedEngine(letters, model=msgspec.structs.replace(INFO, hidden_size=8))
    with serving_script(model_path, engine) as server:
        pooled, embedded = (
            httpx.post(f"{server.url}{path}", json={"input": ["abc", "hhh"]}).json() for path in ("/pooling", "/v1/embeddings")
        )
    assert [entry["data"] for entry in pooled["data"]] == [entry["embedding"] for entry in embedded["data"]]
    assert pooled["data"][0]["object"] == "pooling"


@pytest.mark.parametrize("folder", ABSENT)
def test_what_is_not_there_is_said_in_one_sentence(client, folder):
    for path in (folder, f"{folder}/more"):
        reply = client.post(path, files={"file": b"x"})
        error = reply.json()["error"]
        told = error if folder.startswith("/api") else error["message"]
        assert (reply.status_code, told) == (404, ABSENT[folder])
    assert ABSENT[folder].rstrip(".").count(". ") <= 1


PAGE = (DOCS / "compatibility.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", sorted({*llamacpp.LlamaCompletionBody.model_fields, *llamacpp.LlamaInfillBody.model_fields, *llamacpp.REFUSED})
)
def test_every_field_is_on_the_page(name):
    assert f"`{name}`" in PAGE
