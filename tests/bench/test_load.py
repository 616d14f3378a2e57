"""The load generator against a real HTTP server that answers as told by the prompt."""

import asyncio
import json
import threading
import time
from itertools import pairwise

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from cloister.bench.load import Target, find_model, send_all
from cloister.bench.workloads import WorkItem, Workload
from cloister.cli import main
from cloister.server.route_table import RouteTable
from cloister.types.errors import ConfigError

routes = RouteTable()
seen = []


@routes.get("/v1/models")
async def models():
    return JSONResponse({"object": "list", "data": [{"id": "toy"}]})


@routes.get("/other/v1/models")
async def other():
    return JSONResponse({"hello": "world"})


@routes.post("/v1/completions")
async def completions(request: Request):
    body = await request.json()
    seen.append((time.monotonic(), body, request.headers.get("authorization")))
    if body["prompt"] == "busy":
        return JSONResponse({"error": {"message": "no", "code": "queue_full"}}, status_code=429)
    return StreamingResponse(stream(body), media_type="text/event-stream")


async def stream(body):
    for number in range(body["max_tokens"]):
        if body["prompt"] == "slow":
            await asyncio.sleep(600)
        await asyncio.sleep(0.01)
        yield f"data: {json.dumps({'choices': [{'text': f't{number}', 'finish_reason': None}]})}\n\n"
        if body["prompt"] == "cut":
            return
        if body["prompt"] == "dies":
            yield f"data: {json.dumps({'error': {'message': 'x', 'code': 'engine_error'}})}\n\n"
            return
    yield f"data: {json.dumps({'choices': [{'text': '', 'finish_reason': 'length'}]})}\n\n"
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


@pytest.fixture(scope="module")
def url():
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes.routes), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 300
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(300)


def item(prompt, arrival_s=0.0, num_output=3):
    return WorkItem(arrival_s, prompt, 0, num_output)


def send(url, items, **options):
    target = Target(url, "toy", timeout_s=options.pop("timeout_s", 60))
    return asyncio.run(send_all(items, target, **options))


def test_an_answer_is_recorded_with_its_deliveries_and_usage(url):
    (record,) = send(url, [item("hello")])
    assert record.ok
    assert (record.num_input_tokens, record.num_output_tokens, record.num_cached_tokens) == (7, 5, 4)
    assert len(record.deliveries) == 3
    assert 0 < record.ttft_s < record.e2e_s <= record.end_s


def test_every_kind_of_failure_is_a_record_of_its_own(url):
    records = send(url, [item("busy"), item("cut"), item("dies"), item("fine")], timeout_s=60)
    assert [r.failure for r in records] == ["http_429", "cut_off", "engine_error", None]
    assert [r.failure for r in send(url, [item("slow")], timeout_s=1)] == ["timeout"]


def test_a_server_that_is_not_there_fails_every_request():
    (record,) = send("http://127.0.0.1:9", [item("hello")])
    assert record.failure == "connection"


def test_requests_leave_at_their_arrival_times_though_others_still_run(url):
    start, begun_s = len(seen), time.monotonic()
    records = send(url, [item("hello", num_output=60), item("hello", 0.2), item("hello", 0.4)])
    times = [time_s for time_s, _, _ in seen[start:]]
    assert times[1] - begun_s >= 0.2, "never early; how late depends on what else the machine does"
    assert times[2] - begun_s >= 0.4
    assert records[0].end_s > records[2].due_s


def test_one_at_a_time_counts_from_the_sending(url):
    records = send(url, [item("hello")] * 3, max_concurrency=1)
    for before, after in pairwise(records):
        assert after.due_s >= before.end_s


def test_an_answer_has_exactly_the_length_of_the_trace(url):
    send(url, [item([40, 41], num_output=9)])
    body = seen[-1][1]
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (9, 9, True)
    assert body["prompt"] == [40, 41]


def test_the_api_key_is_sent(url):
    asyncio.run(send_all([item("hello")], Target(url, "toy", api_key="sk-1")))
    assert seen[-1][2] == "Bearer sk-1"


def test_the_model_is_the_first_one_listed(url):
    assert asyncio.run(find_model(url)) == "toy"


@pytest.mark.parametrize("where", ["http://127.0.0.1:9", "nonsense"])
def test_a_missing_server_is_named_with_what_to_do(where):
    with pytest.raises(ConfigError, match="cloister serve"):
        asyncio.run(find_model(where))


def test_another_kind_of_server_is_refused(url):
    with pytest.raises(ConfigError, match="OpenAI API"):
        asyncio.run(find_model(url + "/other"))


@pytest.mark.parametrize("repeats", [False, True])
def test_a_server_that_knew_the_prompts_before_is_said(url, repeats, capsys, monkeypatch):
    prompts = [[40] * 16] * 3 if repeats else [[40] * 16, [41] * 16, [42] * 16]  # the server says that it had 4 of 7 tokens
    items = tuple(WorkItem(0.0, prompt, 16, 2) for prompt in prompts)
    monkeypatch.setattr("cloister.bench.workloads.build_workload", lambda *_: Workload("some", items))
    with pytest.raises(SystemExit) as caught:
        main(["bench", "serve", "--url", url, "--num-warmup", "0"])
    assert not caught.value.code
    err = capsys.readouterr().err
    assert ("57% of the prompt tokens came from the server's cache" in err) == (not repeats)
