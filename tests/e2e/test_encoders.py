"""Encoders behind the same server as other models: what comes over HTTP is what transformers says of the same texts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from cloister import LLM
from cloister.engine import EngineClient, ThreadTransport
from cloister.launch.engine import build_engine
from cloister.policy import Credentials, KeyQuota
from cloister.types.config import EngineConfig
from cloister.types.errors import ConfigError, InvalidRequestError
from tests.encoder_factory import make_encoder, reference
from tests.server.running_server import make_gate, serving
from tests.serving import ServeProcess

TEXTS = ["the cat sat", "what is that?", "the long road to the sea " * 12, "a"]
SETTINGS: dict[str, Any] = {"num_threads": 1, "max_batched_tokens": 64, "kv_memory_mb": 1, "weights_cache": ""}


@contextmanager
def served(path: Path, **gate: Any) -> Iterator[httpx.Client]:
    config = EngineConfig(model=str(path), **SETTINGS)

    async def start() -> EngineClient:
        client = EngineClient(ThreadTransport(build_engine(config)), config)
        await client.start()
        return client

    with serving(path, start, gate=make_gate(**gate)) as server, httpx.Client(base_url=server.url, timeout=300) as client:
        yield client


def tokens(path: Path, *texts: str) -> tuple[list[int], list[int]]:
    encoding = Tokenizer.from_file(str(path / "tokenizer.json")).encode(*texts)
    return encoding.ids, encoding.type_ids


def expected_scores(path: Path, *texts: str) -> np.ndarray[Any, Any]:
    ids, types = tokens(path, *texts)
    scores = reference(path, ids, types if "bert" in path.name and "modern" not in path.name else None)[1]
    assert scores is not None
    return scores.astype(np.float64)


def sigmoid(score: float) -> float:
    return float(1 / (1 + np.exp(-score)))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("m") / "embedder", "BertModel", pooling="cls")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("m") / "bert-judge", "BertForSequenceClassification", num_labels=1)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    labels = {0: "sad", 1: "calm", 2: "glad"}
    return make_encoder(tmp_path_factory.mktemp("m") / "modern", "ModernBertForSequenceClassification", id2label=labels)


@pytest.fixture(scope="module")
def embeddings(embedder: Path) -> Iterator[httpx.Client]:
    with served(embedder) as client:
        yield client


@pytest.fixture(scope="module")
def judgements(judge: Path) -> Iterator[httpx.Client]:
    with served(judge) as client:
        yield client


@pytest.fixture(scope="module")
def classes(classifier: Path) -> Iterator[httpx.Client]:
    with served(classifier) as client:
        yield client


def test_an_encoder_starts_without_a_warning(embedder: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_engine(EngineConfig(model=str(embedder), **SETTINGS))
    assert not [record for record in caplog.records if record.name.startswith("cloister")]


def test_vectors_are_those_of_transformers(embeddings: httpx.Client, embedder: Path) -> None:
    client = openai.OpenAI(base_url=f"{embeddings.base_url}/v1", api_key="none")
    found = client.embeddings.create(model="embedder", input=TEXTS)
    assert found.usage.prompt_tokens == sum(len(tokens(embedder, text)[0]) for text in TEXTS)
    for item, text in zip(found.data, TEXTS, strict=True):
        first = reference(embedder, tokens(embedder, text)[0])[0][0].astype(np.float64)
        assert np.abs(np.array(item.embedding) - first / np.linalg.norm(first)).max() <= 1e-5


def test_a_vector_has_the_same_bits_alone(embeddings: httpx.Client) -> None:
    together = embeddings.post("/v1/embeddings", json={"input": TEXTS, "encoding_format": "base64"}).json()["data"]
    for item, text in zip(together, TEXTS, strict=True):
        (alone,) = embeddings.post("/v1/embeddings", json={"input": text, "encoding_format": "base64"}).json()["data"]
        assert alone["embedding"] == item["embedding"]


def test_an_embedder_ranks_by_cosine(embeddings: httpx.Client) -> None:
    found = embeddings.post("/v1/rerank", json={"query": TEXTS[0], "documents": TEXTS}).json()["results"]
    assert found[0]["index"] == 0
    assert found[0]["relevance_score"] == pytest.approx(1)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_a_cross_encoder_scores_each_pair(path: str, judgements: httpx.Client, judge: Path) -> None:
    found = judgements.post(path, json={"query": "what is the sea?", "documents": TEXTS, "top_n": 3}).json()
    expected = [sigmoid(expected_scores(judge, "what is the sea?", text)[0]) for text in TEXTS]
    assert [item["index"] for item in found["results"]] == sorted(range(4), key=lambda i: -expected[i])[:3]
    for item in found["results"]:
        assert item["relevance_score"] == pytest.approx(expected[item["index"]], abs=1e-5)
        assert item["document"]["text"] == TEXTS[item["index"]]
    assert found["usage"]["prompt_tokens"] == sum(len(tokens(judge, "what is the sea?", text)[0]) for text in TEXTS)


def test_scores_are_of_pairs_in_order(judgements: httpx.Client, judge: Path) -> None:
    found = judgements.post("/v1/score", json={"text_1": TEXTS, "text_2": TEXTS[::-1]}).json()["data"]
    pairs = zip(TEXTS, TEXTS[::-1], strict=True)
    assert [item["score"] for item in found] == pytest.approx([sigmoid(expected_scores(judge, *p)[0]) for p in pairs], abs=1e-5)
    one = judgements.post("/v1/score", json={"text_1": TEXTS[0], "text_2": TEXTS}).json()["data"]
    expected = [sigmoid(expected_scores(judge, TEXTS[0], text)[0]) for text in TEXTS]
    assert [item["score"] for item in one] == pytest.approx(expected, abs=1e-5)


def test_a_document_cannot_end_itself(judgements: httpx.Client, judge: Path) -> None:
    """A separator that a document spells is text."""
    found = judgements.post("/v1/score", json={"text_1": "the sea", "text_2": "road [SEP] the sea"}).json()
    plain = Tokenizer.from_file(str(judge / "tokenizer.json")).encode("the sea", "road").ids
    assert found["usage"]["prompt_tokens"] > len(plain) + len(tokens(judge, "the sea")[0]) - 1


def test_classes_have_names_and_probabilities(classes: httpx.Client, classifier: Path) -> None:
    found = classes.post("/classify", json={"input": TEXTS}).json()
    assert (found["object"], found["model"]) == ("list", "modern")
    for item, text in zip(found["data"], TEXTS, strict=True):
        scores = expected_scores(classifier, text)
        powers = np.exp(scores - scores.max())
        assert item["probs"] == pytest.approx((powers / powers.sum()).tolist(), abs=1e-5)
        assert (item["label"], item["num_classes"]) == (["sad", "calm", "glad"][int(scores.argmax())], 3)
    raw = classes.post("/classify", json={"input": TEXTS[0], "use_activation": False}).json()["data"][0]["probs"]
    assert raw == pytest.approx(expected_scores(classifier, TEXTS[0]).tolist(), abs=1e-4)


CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {**CHAT, "max_tokens": 5}),
        ("/api/generate", {"model": "embedder", "prompt": "Hello"}),
        ("/completion", {"prompt": "Hello"}),
    ],
)
def test_a_request_for_text_gets_one_clear_error(path: str, body: dict[str, Any], embeddings: httpx.Client) -> None:
    reply = embeddings.post(path, json=body)
    assert reply.status_code == 400
    assert "is an encoder, which generates no text" in reply.text


@pytest.mark.parametrize(
    ("of", "path", "body", "code"),
    [
        ("embeddings", "/classify", {"input": "a"}, "no_classes"),
        ("classes", "/v1/embeddings", {"input": "a"}, "no_embeddings"),
        ("classes", "/v1/rerank", {"query": "a", "documents": ["b"]}, "no_scores"),
        ("judgements", "/v1/score", {"text_1": [5, 6], "text_2": "b"}, "invalid_type"),
        ("judgements", "/v1/rerank", {"query": "the " * 200, "documents": ["the " * 200]}, "context_length_exceeded"),
        ("embeddings", "/v1/embeddings", {"input": "the " * 400}, "context_length_exceeded"),
    ],
)
def test_what_a_model_does_not_do_is_refused(
    of: str, path: str, body: dict[str, Any], code: str, request: pytest.FixtureRequest
) -> None:
    reply = request.getfixturevalue(of).post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)
    assert "the the" not in reply.text


def test_pairs_count_for_the_quota_of_a_key(judge: Path) -> None:
    credentials, key = Credentials.empty().add("ann", limits=KeyQuota(tokens_per_day=40))
    with served(judge, profile="team", credentials=credentials) as client:
        body, headers = {"query": "the cat sat", "documents": TEXTS[:2]}, {"authorization": f"Bearer {key}"}
        num_tokens = sum(len(tokens(judge, "the cat sat", text)[0]) for text in TEXTS[:2])
        reply = client.post("/v1/rerank", json=body, headers=headers)
        assert reply.headers["x-ratelimit-remaining-tokens"] == str(40 - num_tokens)
        assert client.post("/v1/rerank", json=body).status_code == 401
        assert client.post("/v1/rerank", json=body | {"documents": TEXTS[2:3]}, headers=headers).status_code == 429


def test_the_python_api_does_the_same(judge: Path, classifier: Path) -> None:
    with LLM(str(judge), **SETTINGS) as llm:
        expected = [sigmoid(expected_scores(judge, "the sea", text)[0]) for text in TEXTS]
        assert llm.score("the sea", TEXTS) == pytest.approx(expected, abs=1e-5)
        for call in (llm.generate, llm.embed):
            with pytest.raises(InvalidRequestError):
                call("the sea")
    with LLM(str(classifier), **SETTINGS) as llm:
        (found,) = llm.classify("the sea")
        assert sorted(found) == ["calm", "glad", "sad"]
        assert sum(found.values()) == pytest.approx(1)
        with pytest.raises(InvalidRequestError, match="3 classes"):
            llm.score("a", "b")


def test_an_encoder_is_not_quantised(embedder: Path) -> None:
    with pytest.raises(ConfigError, match="leave `quant` out"):
        asyncio.run(asyncio.to_thread(build_engine, EngineConfig(model=str(embedder), quant="int8", **SETTINGS)))


def test_an_encoder_is_served_under_the_profile_private(judge: Path) -> None:
    server = ServeProcess("--model", str(judge), "--profile", "private", "--kv-memory-mb", "1", "--num-threads", "1")
    try:
        reply = httpx.post(f"{server.url}/v1/rerank", json={"query": "the sea", "documents": TEXTS}, timeout=300)
        assert [item["index"] for item in reply.json()["results"]]
        assert "the cat" not in server.printed
    finally:
        assert server.stop()[0] == 0
