"""`cloister serve` as a person starts it: a process of its own, the embedded model, real clients."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.serving import MODEL, ServeProcess
from tests.slow_engine import SLOW


@pytest.fixture(scope="module")
def server():
    running = ServeProcess("--num-threads", "1")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def slow():
    """A server whose answers still run when something happens to them."""
    running = ServeProcess("--num-threads", "1", module=SLOW)
    yield running
    running.stop()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def test_the_start_says_what_it_took_and_the_phases_add_up(server):
    (line,) = (line for line in server.lines if line.startswith("started in "))
    whole, _, phases = line.removeprefix("started in ").partition(" s: ")
    took = {name: float(duration) for name, duration in (phase.split() for phase in phases.split(", "))}
    assert list(took) == ["import", "locate", "read", "build", "front"]
    assert sum(took.values()) == pytest.approx(float(whole), abs=0.1)
    assert took["import"] > 0
    assert server.metric("startup_seconds") == pytest.approx(float(whole), abs=0.1)


def test_the_openai_sdk_chats(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0
    )
    assert answer.usage.completion_tokens <= 8
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_the_openai_sdk_streams_what_it_answers_at_once(client):
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    chunks = client.chat.completions.create(**ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_the_openai_sdk_gets_logprobs(client):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
        temperature=0,
    )
    for entry in answer.choices[0].logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert bytes(entry.bytes).decode(errors="replace") == entry.token


def test_a_bad_request_is_an_openai_error(client):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], temperature=9)


def test_a_disconnect_frees_the_blocks(slow):
    body = {"model": MODEL, "prompt": "x", "max_tokens": 7000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{slow.url}/v1/completions", json=body, timeout=300) as reply:
        lines = reply.iter_lines()
        next(lines)
        slow.wait_until(lambda: slow.metric("num_requests_running") == 1)
    slow.wait_until(lambda: slow.metric("num_requests_running") == 0)
    assert slow.metric("kv_cache_usage_perc") == 0


async def ask(client: httpx.AsyncClient, url: str, chance: random.Random, most_tokens: int) -> str:
    """Sends one request that may be left in the middle; returns how it ended."""
    body = {"model": MODEL, "prompt": [chance.randrange(300, 4000)] * chance.randint(1, 60), "stream": True}
    body |= {"max_tokens": chance.randint(1, most_tokens), "ignore_eos": True, "n": chance.choice([1, 1, 1, 2])}
    leave_after = chance.randint(1, 10) if chance.random() < 0.3 else None
    async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            return f"status {reply.status_code}"
        num_lines, last = 0, ""
        async for line in reply.aiter_lines():
            num_lines += line.startswith("data:")
            last = line or last
            if leave_after is not None and num_lines >= leave_after:
                return "left"
            if "error" in line and "error" in json.loads(line.removeprefix("data: ")):
                return "error"
        return "answered" if last == "data: [DONE]" else "cut off"


async def ask_many(url: str, num_requests: int, seed: int, most_tokens: int, meanwhile) -> list[str]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        asks = [asyncio.create_task(ask(client, url, random.Random(seed + i), most_tokens)) for i in range(num_requests)]
        await meanwhile()
        return await asyncio.gather(*asks)


def test_everybody_gets_a_reply_when_the_engine_is_killed_and_the_server_serves_on(slow):
    killed, before = slow.engine_pid, slow.metric("generation_tokens_total")

    async def kill():
        # not before streams have begun: what is killed earlier gets a plain 503
        give_up_s = time.monotonic() + 300
        while slow.metric("num_requests_running") < 5 or slow.metric("generation_tokens_total") < before + 100:
            assert time.monotonic() < give_up_s, "the engine has nothing to do"
            await asyncio.sleep(0.05)
        os.kill(killed, signal.SIGKILL)

    ends = asyncio.run(ask_many(slow.url, 40, 0, 150, kill))
    assert len(ends) == 40
    assert set(ends) <= {"answered", "left", "status 503", "status 429"}  # 503: while there is no engine, nothing is accepted
    assert slow.metric("num_resumes_total") > 0, "the kill must have hit somebody"
    slow.wait_until(slow.is_well)
    assert slow.engine_pid != killed
    after = asyncio.run(ask_many(slow.url, 20, 1000, 60, lambda: asyncio.sleep(0)))
    assert set(after) <= {"answered", "left"}
    slow.wait_until(lambda: slow.metric("kv_cache_usage_perc") == 0)


COUNTRIES = {
    "type": "array",
    "minItems": 40,
    "items": {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "integer"}}, "required": ["name"]},
}
RESUMED_BODIES = {
    "seeded": {"temperature": 1.0, "seed": 19},  # a draw that goes on writing: one that ends early is hardly a chunk
    "several": {"temperature": 1.0, "seed": 6, "n": 3},
    "grammar": {
        "temperature": 1.0,
        "seed": 7,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": COUNTRIES}},
    },
    "logprobs": {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    "penalties": {"temperature": 0.8, "seed": 8, "frequency_penalty": 0.7, "stop": ["qzx"]},
}


def test_answers_are_whole_and_the_same_though_the_engine_is_killed_while_they_are_written(server, slow):
    def write(asked: ServeProcess, name: str, begun: Callable[[], object]) -> list[tuple[str, str | None, list[float]]]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me about paged KV"}], "max_tokens": 200}
        body |= {**RESUMED_BODIES[name], "stream": True, "extra_body": {"ignore_eos": True}}
        text, ends, logprobs = defaultdict(str), {}, {}
        client = openai.OpenAI(base_url=f"{asked.url}/v1", api_key="none", max_retries=0, timeout=300)
        with client, client.chat.completions.create(**body) as chunks:
            for chunk in chunks:
                for choice in chunk.choices:
                    text[choice.index] += choice.delta.content or ""
                    ends[choice.index] = choice.finish_reason
                    if choice.logprobs is not None:
                        logprobs.setdefault(choice.index, []).extend(entry.logprob for entry in choice.logprobs.content)
                if any(text.values()):
                    begun()
        return [(text[index], ends[index], logprobs.get(index, [])) for index in sorted(text)]

    whole = {name: write(server, name, lambda: None) for name in RESUMED_BODIES}
    killed, num_resumed = slow.engine_pid, slow.metric("num_resumes_total")
    begun = {name: threading.Event() for name in RESUMED_BODIES}
    with ThreadPoolExecutor() as pool:
        answers = {name: pool.submit(write, slow, name, begun[name].set) for name in RESUMED_BODIES}
        give_up_s = time.monotonic() + 300
        for name, has_begun in begun.items():
            assert has_begun.wait(give_up_s - time.monotonic()), f"the answer {name} does not begin"
        os.kill(killed, signal.SIGKILL)
        assert {name: answer.result() for name, answer in answers.items()} == whole
    assert slow.metric("num_resumes_total") > num_resumed
    assert slow.engine_pid != killed


def test_a_drained_server_ends_what_runs_and_prints_nothing_that_was_sent():
    running = ServeProcess("--max-num-seqs", "4", "--num-threads", "1", module=SLOW)
    body = {"model": MODEL, "prompt": "unmistakeable-marker-words", "max_tokens": 150, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=300) as reply:
        lines = reply.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    status, printed = running.wait()
    assert status == 0
    assert "stopping: 1 request" in printed
    assert "unmistakeable" not in printed


def test_tenants_do_not_feel_each_others_prefixes(tmp_path):
    keys = tmp_path / "keys.json"
    made = {}
    for name in ("alice", "bob"):
        command = [sys.executable, "-m", "cloister.cli", "keys", "add", name, "--tenant", name, "--file", str(keys)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        made[name] = max(printed.split(), key=len)
    running = ServeProcess("--api-keys", str(keys), "--num-threads", "1")
    try:
        assert httpx.get(f"{running.url}/v1/models", timeout=300).status_code == 401
        assert httpx.get(f"{running.url}/health", timeout=300).status_code == 200

        def num_cached(name: str) -> int:
            with openai.OpenAI(base_url=f"{running.url}/v1", api_key=made[name], max_retries=0) as client:
                answer = client.completions.create(model=MODEL, prompt="the same long prompt " * 20, max_tokens=1)
            return answer.usage.prompt_tokens_details.cached_tokens

        assert num_cached("alice") == 0
        assert num_cached("alice") > 0
        assert num_cached("bob") == 0
    finally:
        running.stop()


def test_a_marker_planted_everywhere_is_in_no_output_of_either_process():
    marker = "unmistakeable-marker"
    running = ServeProcess("--log-format", "json", "--log-clients", "--num-threads", "1")
    marked = {"x-marker": marker, "user-agent": marker, "traceparent": marker, "authorization": f"Bearer {marker}"}
    with httpx.Client(base_url=running.url, headers=marked, timeout=300) as client:
        prompts = {
            "/v1/completions": {"prompt": marker},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": marker}]},
        }
        for path, prompt in prompts.items():
            body = {"model": MODEL, "max_tokens": 4, "user": marker, "stop": marker, "metadata": {marker: marker}, **prompt}
            for fields in ({}, {"stream": True}, {"model": marker}, {marker: marker}, {"temperature": marker}):
                client.post(f"{path}?{marker}={marker}", json={**body, **fields})
        client.post("/v1/completions", json={"model": MODEL, "prompt": marker * 20_000})
        client.get(f"/{marker}")
        client.request(marker, "/v1/models")
        figures = client.get("/metrics").text
        os.kill(running.engine_pid, signal.SIGABRT)  # its last words count too
        running.wait_until(lambda: "is gone" in running.printed)  # the front is well until it has noticed
        running.wait_until(running.is_well)
    status, printed = running.stop()
    assert status == 0
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert sum(line["logger"] == "cloister.requests" for line in lines) >= 13
    assert any(line["level"] == "error" for line in lines)
    assert marker not in printed + figures


def test_two_replicas_answer_as_one_engine_does_though_one_is_killed(client):
    wanted = {"model": MODEL, "prompt": [[300 + number] * 30 for number in range(6)], "max_tokens": 300, "temperature": 0}
    wanted["extra_body"] = {"ignore_eos": True}
    whole = [choice.text for choice in client.completions.create(**wanted).choices]
    replicated = ServeProcess("--replicas", "2", "--num-threads", "1", module=SLOW)
    try:
        assert any(line.startswith("2 replicas, router least_load") for line in replicated.lines)
        killed, texts = replicated.engine_pid, defaultdict(str)
        with openai.OpenAI(base_url=f"{replicated.url}/v1", api_key="none", max_retries=0, timeout=300) as two:
            for chunk in two.completions.create(**wanted, stream=True):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                if killed is not None and len(texts) == 6:  # all have begun, and none has ended
                    os.kill(killed, signal.SIGKILL)
                    killed = None
        assert [texts[number] for number in range(6)] == whole
        assert replicated.metric("num_resumes_total") > 0
        assert replicated.metric("replica_routed_total") >= 6
        replicated.wait_until(lambda: replicated.metric("replica_up") == 2)
        assert replicated.is_well()
    finally:
        replicated.stop()
