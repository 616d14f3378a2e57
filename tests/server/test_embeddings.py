"""/v1/embeddings, /v1/score and /v1/rerank, before an engine whose vectors count letters."""

from __future__ import annotations

import asyncio
import base64

import httpx
import msgspec
import numpy as np
import openai
import pytest

from cloister.engine import EngineClient, ThreadTransport
from cloister.executor import ModelRunner
from cloister.executor.pooling import Pool
from cloister.policy import Credentials, KeyQuota
from cloister.server.jobs import MAX_SIDE_BY_SIDE
from cloister.types.request import FinishReason, PoolingParams
from tests.engine.replica import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, VOCAB_SIZE, make_config, make_replica
from tests.executor.test_pooling import HiddenHistoryProgram
from tests.server.running_server import INFO, MODEL, ScriptedEngine, make_gate, output, serving, serving_script

SIZE = 8
TEXTS = ["abc", "abd", "hhh", "a"]
OWN = PoolingParams(kind="mean", normalize=True)


def vector(text, *, normalize=True, dimensions=SIZE):
    """Says how often each of the letters a to h occurs."""
    counts = np.array([text.count(letter) for letter in "abcdefgh"][:dimensions], np.float64) / len(text)
    return counts / np.linalg.norm(counts) if normalize else counts


def letters(request):
    if bytes(request.token_ids) == b"fail":
        return [output(request, end=FinishReason.ERROR, error="the engine failed")]
    pool = Pool(request.pooling)
    pool.add(np.array([[token == ord(letter) for letter in "abcdefgh"] for token in request.token_ids], np.float32))
    return [output(request, end=FinishReason.STOP, token_ids=[], embedding=pool.take())]


class CountingEngine(ScriptedEngine):
    """Knows how many requests it held at once."""

    num_open = most_open = 0

    async def generate(self, request, observer=None, *, in_batches=False):
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(0)
        async for item in super().generate(request):
            yield item
        self.num_open -= 1


@pytest.fixture(scope="module")
def engine():
    return CountingEngine(letters, model=msgspec.structs.replace(INFO, hidden_size=SIZE, pooling=OWN))


@pytest.fixture(scope="module")
def server(model_path, engine):
    with serving_script(model_path, engine) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=300) as client:
        yield client


def embed(client, **fields):
    reply = client.post("/v1/embeddings", json={"model": MODEL, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("given", [TEXTS, [list(text.encode()) for text in TEXTS]])
def test_many_texts_come_back_in_order(client, given):
    answer = embed(client, input=given)
    assert [item["index"] for item in answer["data"]] == [0, 1, 2, 3]
    for item, text in zip(answer["data"], TEXTS, strict=True):
        assert item["object"] == "embedding"
        assert item["embedding"] == pytest.approx(vector(text))
    assert (answer["object"], answer["model"]) == ("list", MODEL)
    assert answer["usage"] == {"prompt_tokens": 10, "total_tokens": 10}


@pytest.mark.parametrize("given", ["abc", list(b"abc")])
def test_one_text_is_one_vector(client, given):
    (item,) = embed(client, input=given)["data"]
    assert item["embedding"] == pytest.approx(vector("abc"))


def test_a_request_without_a_model_gets_the_one_that_is_served(client):
    reply = client.post("/v1/embeddings", json={"input": "abc"})
    assert (reply.status_code, reply.json()["model"]) == (200, MODEL)


def test_base64_is_float32_little_endian(client):
    (item,) = embed(client, input="abc", encoding_format="base64")["data"]
    assert np.frombuffer(base64.b64decode(item["embedding"]), "<f4") == pytest.approx(vector("abc"))


def test_fewer_dimensions_are_cut_and_normalised_again(client):
    (item,) = embed(client, input="abch", dimensions=3)["data"]
    assert item["embedding"] == pytest.approx(vector("abch", dimensions=3))
    assert np.linalg.norm(item["embedding"]) == pytest.approx(1)


def test_normalising_can_be_switched_off(client):
    (item,) = embed(client, input="aab", normalize=False)["data"]
    assert item["embedding"] == pytest.approx(vector("aab", normalize=False))


def test_the_engine_holds_few_of_many_texts_at_once(client, engine):
    engine.taken.clear()
    engine.most_open = 0
    answer = embed(client, input=["ab"] * 2048)
    assert len(answer["data"]) == len(engine.taken) == 2048
    assert 1 < engine.most_open <= MAX_SIDE_BY_SIDE
    assert all(request.sampling.max_tokens == 0 for request in engine.taken)


def test_the_openai_client_gets_numbers(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as sdk:
        answer = sdk.embeddings.create(model=MODEL, input=TEXTS)
        plain = sdk.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float", dimensions=4)
    assert [item.embedding for item in answer.data] == [pytest.approx(vector(text)) for text in TEXTS]
    assert len(plain.data[0].embedding) == 4
    assert answer.usage.prompt_tokens == 10


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input"),
        ("/v1/embeddings", {"input": ["a", [1]]}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input"),
        ("/v1/embeddings", {"input": {"text": "a"}}, "input"),
        ("/v1/embeddings", {"input": [1, True]}, "input"),
        ("/v1/embeddings", {"input": [1.5]}, "input"),
        ("/v1/embeddings", {"input": [10**9]}, "input"),
        ("/v1/embeddings", {"input": [-1]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": "a" * 257}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": SIZE + 1}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["a", ""]}, "documents[1].text"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused_by_its_field(client, path, fields, param):
    reply = client.post(path, json=fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_another_model_is_not_found(client):
    for path, fields in [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ]:
        assert client.post(path, json={"model": "other", **fields}).status_code == 404


def test_a_whole_window_of_tokens_is_taken(client):
    assert len(embed(client, input="a" * 256)["data"]) == 1


def test_one_text_that_fails_fails_the_request_and_aborts_the_others(client, engine):
    engine.left.clear()
    reply = client.post("/v1/embeddings", json={"input": ["abc", "fail"]})
    assert reply.status_code == 503
    assert "data" not in reply.json()


def test_a_score_is_the_cosine_of_two_vectors(client):
    one = client.post("/v1/score", json={"model": MODEL, "text_1": "abc", "text_2": TEXTS}).json()
    assert [item["score"] for item in one["data"]] == [pytest.approx(float(vector("abc") @ vector(text))) for text in TEXTS]
    assert one["usage"]["prompt_tokens"] == 13
    pairs = client.post("/v1/score", json={"text_1": TEXTS, "text_2": TEXTS[::-1]}).json()
    expected = [pytest.approx(float(vector(a) @ vector(b))) for a, b in zip(TEXTS, TEXTS[::-1], strict=True)]
    assert [item["score"] for item in pairs["data"]] == expected
    assert (pairs["object"], pairs["data"][1]["object"], pairs["data"][1]["index"]) == ("list", "score", 1)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_back_by_relevance(client, path):
    answer = client.post(path, json={"model": MODEL, "query": "abc", "documents": ["hhh", {"text": "abd"}, "abc"]}).json()
    assert [(result["index"], result["document"]["text"]) for result in answer["results"]] == [
        (2, "abc"),
        (1, "abd"),
        (0, "hhh"),
    ]
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == [pytest.approx(1), pytest.approx(2 / 3), pytest.approx(0)]
    assert answer["usage"]["total_tokens"] == 12


def test_a_ranking_may_be_short_and_without_texts(client):
    fields = {"query": "abc", "documents": ["h", "abc", "a"], "top_n": 2, "return_documents": False}
    answer = client.post("/v1/rerank", json=fields).json()
    assert [list(result) for result in answer["results"]] == [["index", "relevance_score"]] * 2
    assert [result["index"] for result in answer["results"]] == [1, 2]


async def start_pooling(path):
    """Starts a real engine around a tiny program that has hidden states."""
    sizes = {"vocab_size": VOCAB_SIZE, "block_size": BLOCK_SIZE}
    program = HiddenHistoryProgram(num_blocks=NUM_BLOCKS, **sizes)
    runner = ModelRunner(program, max_model_len=MAX_MODEL_LEN, **sizes)
    engine = EngineClient(ThreadTransport(make_replica(path, runner).core), make_config(path))
    await engine.start()
    return engine


def test_tokens_that_are_pooled_count_for_their_key(model_path):
    credentials, key = Credentials.empty().add("ann", limits=KeyQuota(tokens_per_day=30))
    credentials, operator = credentials.add("boss", is_operator=True)
    with (
        serving(model_path, lambda: start_pooling(model_path), gate=make_gate("team", credentials)) as server,
        httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=300) as client,
    ):
        assert len(embed(client, input=["four", "six or"])["data"]) == 2
        reply = client.post("/v1/score", json={"text_1": "a", "text_2": ["a", "b"]})
        assert reply.json()["data"][0]["score"] == pytest.approx(1)
        assert reply.headers["x-ratelimit-remaining-tokens"] == "17"
        refused = client.post("/v1/embeddings", json={"input": "eighteen letters.."})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        counted = client.get("/metrics", headers={"authorization": f"Bearer {operator}"}).text
        assert "cloister_prompt_tokens_total" in counted
