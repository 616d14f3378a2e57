"""Ollama's Python client: `pip install ollama`, then `python ollama_python.py http://127.0.0.1:8000`."""

from __future__ import annotations

import json

import ollama
from checks import QUESTION, WEATHER, run_checks, server_url

client = ollama.Client(host=server_url())
model = client.list().models[0].model
SCHEMA = {"type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"], "additionalProperties": False}
GREEDY = {"temperature": 0, "num_predict": 16}


def chat() -> str:
    reply = client.chat(model, QUESTION, options=GREEDY)
    assert reply.message.content
    assert reply.total_duration >= reply.load_duration + reply.prompt_eval_duration + reply.eval_duration
    return f"{reply.eval_count} tokens in {reply.eval_duration / 1e6:.1f} ms"


def stream() -> str:
    whole = client.chat(model, QUESTION, options=GREEDY).message.content
    assert "".join(line.message.content for line in client.chat(model, QUESTION, options=GREEDY, stream=True)) == whole
    return "the same text as at once"


def generate() -> str:
    return f"{client.generate(model, 'VACUUM is', raw=True, options=GREEDY).eval_count} tokens"


def tools() -> str:
    reply = client.chat(model, QUESTION, tools=[WEATHER], options=GREEDY)
    assert reply.message.content or reply.message.tool_calls
    return "an answer" if reply.message.content else "a call"


def structured() -> str:
    reply = client.chat(model, QUESTION, format=SCHEMA, options={"num_predict": 64})
    assert isinstance(json.loads(reply.message.content)["score"], int)
    return reply.message.content


def embed() -> str:
    first, second = client.embed(model, ["one", "two"]).embeddings
    assert len(first) == len(second)
    return f"{len(first)} numbers"


def logprobs() -> str:
    reply = client.chat(model, QUESTION, logprobs=True, top_logprobs=2, options=GREEDY)
    assert all(len(position.top_logprobs) == 2 for position in reply.logprobs)
    return f"{len(reply.logprobs)} positions"


def models() -> str:
    shown = client.show(model)
    assert client.ps().models[0].model == model
    return f"{shown.details.family}, {shown.details.parameter_size}, {shown.capabilities}"


def refusals() -> str:
    told = []
    for ask in (lambda: client.pull("other"), lambda: client.chat("other", QUESTION)):
        try:
            ask()
        except ollama.ResponseError as error:
            told.append(error.status_code)
    assert told == [403, 404]
    return str(told)


run_checks(
    "ollama (Python)",
    {check.__name__: check for check in (chat, stream, generate, tools, structured, embed, logprobs, models, refusals)},
)
