"""Vectors from `cloister serve` are those of the Python API, to the last bit, whatever else runs."""

import asyncio

import numpy as np
import openai
import pytest

from cloister import LLM
from tests.serving import MODEL, ServeProcess

TEXTS = [
    f"{start} {'and so on ' * number}" for number, start in enumerate(["CREATE INDEX", "A decorator", "import", "Notes"] * 8)
]


@pytest.fixture(scope="module")
def server():
    server = ServeProcess("--max-batched-tokens", "96", "--num-threads", "1")
    yield server
    assert server.stop()[0] == 0


async def ask(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        chat = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=60, extra_body={"ignore_eos": True}
        )
        vectors = client.embeddings.create(model=MODEL, input=TEXTS)
        ranking = client.post("/rerank", body={"query": TEXTS[3], "documents": TEXTS}, cast_to=object)
        return await asyncio.gather(chat, vectors, ranking)


def test_vectors_of_a_server_are_those_of_the_python_api(server):
    chat, vectors, ranking = asyncio.run(ask(server.url))
    assert chat.usage.completion_tokens == 60
    with LLM(MODEL, num_threads=1) as llm:
        expected = llm.embed(TEXTS)
        scores = llm.score(TEXTS[3], TEXTS)
    assert (np.array([item.embedding for item in vectors.data], np.float32) == expected).all()
    assert vectors.usage.prompt_tokens > 32 * 3
    assert [result["index"] for result in ranking["results"]] == sorted(range(len(TEXTS)), key=lambda i: -scores[i])
    assert server.metric("prompt_tokens_total") > vectors.usage.prompt_tokens
