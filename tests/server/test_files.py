"""/v1/files and /v1/batches through the openai SDK, before scripted engines: sealed, found by their owner only."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import resource
import threading
import time
import tracemalloc
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from cloister.engine import EngineClient
from cloister.policy import Credentials, Gate, Policy
from cloister.server.app import _answer_error, create_app
from cloister.server.errors import INTERNAL, OverloadedError
from cloister.server.files import batches
from cloister.server.files import store as shelves
from cloister.server.files.batches import Batch, BatchRunner, read_lines
from cloister.server.files.internal_requests import post
from cloister.server.files.service import FileService, read_form
from cloister.server.files.store import LIFETIME_S, FileStore, Owner, Shelf
from cloister.server.files.vault import KEY_BYTES, DamagedError, StorageFullError, Vault, read_key
from cloister.server.kept_content import charge_kept
from cloister.server.load_shedding import BODY_CHARGE, BodyBudget
from cloister.server.logs import public_error
from cloister.server.reading_queue import ReadingThreads
from cloister.server.routes import files as batch_routes
from cloister.server.routes.files import READ_BYTES
from cloister.server.serve import ServerApp
from cloister.server.state import ServerState, open_reading_threads
from cloister.text import ChatTemplate, Tokenizer
from cloister.types.config import ServerConfig
from cloister.types.errors import CloisterError, ConfigError, InvalidRequestError, NotFoundError, PolicyError, QueueFullError
from cloister.types.request import FinishReason
from tests.server.running_server import ScriptedEngine, endless, make_gate, output, running, says, serving_script
from tests.server.test_floods import wait_until
from tests.thinning import examples

SECRET = "the secret recipe"
KEY = bytes(range(32))


@contextmanager
def keeping(model_path, directory, engine: EngineClient, gate: Gate | None = None, **settings):
    """Serves with files kept in a directory; ends as a server does that is stopped."""
    config = ServerConfig(port=0, drain_timeout_s=0.2, files=str(directory), **settings)

    @asynccontextmanager
    async def open_app():
        kept_gate = gate or make_gate()
        stored = FileService.open(config, kept_gate)
        app = create_app(engine, Tokenizer(model_path), ChatTemplate.load(model_path), kept_gate, config, stored=stored)
        yield ServerApp(app, engine)
        await stored.runner.close()
        stored.close()

    with running(open_app, config) as server:
        yield server


def sdk_of(server, key="none"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def line(custom_id, content="hello", **fields):
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 5}
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps({**request, **fields}).encode() + b"\n"


def begin(sdk, content):
    stored = sdk.files.create(file=("in.jsonl", content), purpose="batch")
    return sdk.batches.create(input_file_id=stored.id, endpoint="/v1/chat/completions", completion_window="24h")


def wait(sdk, batch, *statuses):
    give_up_s = time.monotonic() + 300
    while True:
        batch = sdk.batches.retrieve(batch.id)
        if batch.status in (statuses or ("completed", "failed", "expired", "cancelled")):
            return batch
        assert time.monotonic() < give_up_s, f"still {batch.status}"
        time.sleep(0.02)


def results(sdk, file_id):
    return [json.loads(row) for row in sdk.files.content(file_id).text.splitlines()]


@pytest.fixture
def server(model_path, tmp_path):
    with keeping(model_path, tmp_path / "kept", ScriptedEngine(says("ok"))) as server:
        yield server


def test_a_file_comes_back_as_it_went_and_can_be_removed(server):
    content = b"a\r\n--b\n\x00\xff" * 100
    with sdk_of(server) as sdk:
        stored = sdk.files.create(file=("a b.jsonl", content), purpose="batch")
        assert (stored.filename, stored.bytes, stored.purpose) == ("a b.jsonl", len(content), "batch")
        assert stored.expires_at - stored.created_at == LIFETIME_S
        assert sdk.files.content(stored.id).content == content
        assert [each.id for each in sdk.files.list()] == [stored.id]
        assert sdk.files.delete(stored.id).deleted
        with pytest.raises(openai.NotFoundError):
            sdk.files.retrieve(stored.id)


def put_answers(directory: Path, records: list[bytes]) -> str:
    """Keeps a file as a batch leaves one, of the only owner; returns its id."""
    gate = make_gate()
    service = FileService.open(ServerConfig(files=str(directory)), gate)
    owner, file_id = service.owner(gate.admit(None)), service.store.shelf.new_id()
    for number, record in enumerate(records):
        service.store.append(file_id, owner, number, record)
    service.store.publish(owner, file_id, "answers", sum(len(record) + 1 for record in records))
    service.close()
    return file_id


def test_a_large_file_is_read_while_it_is_sent(model_path, tmp_path):
    size = 1 << 20
    records = [bytes([number]) * (size - 1) for number in range(40)]
    file_id = put_answers(tmp_path / "kept", records)
    with keeping(model_path, tmp_path / "kept", ScriptedEngine(says("ok"))) as server:
        tracemalloc.start()
        try:
            with httpx.stream("GET", f"{server.url}/v1/files/{file_id}/content") as reply:
                assert reply.headers["content-length"] == str(40 * size)
                received = 0
                for piece in reply.iter_raw(size):
                    assert piece == records[received // size] + b"\n"
                    received += len(piece)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert received == 40 * size
    assert peak_bytes < 12 * size, "a few records at a time"


@pytest.mark.parametrize(("place", "status"), [(0, 500), (3, 200)])
def test_a_file_that_is_damaged_is_never_sent_whole(model_path, tmp_path, place, status):
    file_id = put_answers(tmp_path / "kept", [bytes([number]) * READ_BYTES for number in range(5)])
    path = tmp_path / "kept" / f"{file_id}.data"
    data = bytearray(path.read_bytes())
    data[place * len(data) // 5 + 500] ^= 1
    path.write_bytes(data)
    with keeping(model_path, tmp_path / "kept", ScriptedEngine(says("ok"))) as server:
        with httpx.stream("GET", f"{server.url}/v1/files/{file_id}/content") as reply:
            assert reply.status_code == status
            with contextlib.nullcontext() if status == 500 else pytest.raises(httpx.RemoteProtocolError):
                reply.read()
        path.write_bytes(data[: len(data) * 4 // 5])  # what is missing is known before anything is sent
        assert httpx.get(f"{server.url}/v1/files/{file_id}/content").status_code == 500


def test_a_file_of_many_short_lines_takes_few_turns_of_the_threads(model_path, tmp_path, monkeypatch):
    records = [b"%05d" % number * 20 for number in range(5_000)]
    content = b"".join(record + b"\n" for record in records)
    file_id, num_turns, run = put_answers(tmp_path / "kept", records), 0, ReadingThreads.run

    async def count(*arguments, **options):
        nonlocal num_turns
        num_turns += 1
        return await run(*arguments, **options)

    with keeping(model_path, tmp_path / "kept", ScriptedEngine(says("ok"))) as server:
        monkeypatch.setattr(ReadingThreads, "run", count)
        assert httpx.get(f"{server.url}/v1/files/{file_id}/content").content == content
    assert num_turns <= len(content) / READ_BYTES + 2


def test_a_file_that_is_being_sent_waits_for_a_full_queue(model_path, tmp_path, monkeypatch):
    """Its reply has begun, so it could be cut only."""
    records = [bytes([number]) * READ_BYTES for number in range(4)]
    file_id, turns, run = put_answers(tmp_path / "kept", records), [], ReadingThreads.run

    async def refuse_the_second(*arguments, **options):
        turns.append(arguments)
        if len(turns) in (2, 3):
            raise QueueFullError("full", retry_after_s=1.0)
        return await run(*arguments, **options)

    monkeypatch.setattr(batch_routes, "TURN_RETRY_S", 0.01)
    with keeping(model_path, tmp_path / "kept", ScriptedEngine(says("ok"))) as server:
        monkeypatch.setattr(ReadingThreads, "run", refuse_the_second)
        reply = httpx.get(f"{server.url}/v1/files/{file_id}/content")
    assert reply.content == b"".join(record + b"\n" for record in records)
    assert len(turns) == 7


def test_a_client_that_leaves_a_file_leaves_it_closed(model_path, tmp_path):
    file_id = put_answers(tmp_path / "kept", [bytes(1 << 20)] * 20)

    def count_open() -> int:
        opened = (os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir())
        return sum(file_id in path for path in opened)

    with keeping(model_path, tmp_path / "kept", ScriptedEngine(says("ok"))) as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(httpx.stream("GET", f"{server.url}/v1/files/{file_id}/content")) for _ in range(5)]
        assert [client.status_code for client in clients] == [200] * 5
        wait_until(lambda: count_open() == 5)
        stack.close()
        wait_until(lambda: count_open() == 0)


def test_a_batch_answers_every_line_once(server):
    with sdk_of(server) as sdk:
        lines = [line(f"q{i}") for i in range(9)]
        bad = line("bad", body={"messages": [], "max_tokens": 5})
        batch = wait(sdk, begin(sdk, b"".join([*lines, bad])))
        assert (batch.status, batch.request_counts.total) == ("completed", 10)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (9, 1)
        answers = results(sdk, batch.output_file_id)
        with pytest.raises(openai.BadRequestError, match="holds answers of a batch"):
            sdk.batches.create(input_file_id=batch.output_file_id, endpoint=batch.endpoint, completion_window="24h")
        assert sorted(each["custom_id"] for each in answers) == [f"q{i}" for i in range(9)]
        for each in answers:
            assert each["response"]["status_code"] == 200
            assert each["response"]["body"]["choices"][0]["message"]["content"] == "ok"
        (failed,) = results(sdk, batch.error_file_id)
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)
        assert [each.id for each in sdk.batches.list()] == [batch.id]


def test_an_input_at_fault_is_told_line_by_line_and_none_of_it_runs(server):
    with sdk_of(server) as sdk:
        content = line("a") + line("a") + b"{\n" + line("b", url="/v1/embeddings") + line("c", body={"stream": True})
        batch = begin(sdk, content)
        assert batch.status == "failed"
        assert [(each.line, each.code) for each in batch.errors.data] == [
            (2, "duplicate_custom_id"),
            (3, "invalid_json"),
            (4, "mismatched_endpoint"),
            (5, "invalid_value"),
        ]
        assert not server.engine.taken
        assert begin(sdk, b"\n").errors.data[0].code == "empty_file"


def test_a_server_that_starts_again_goes_on_where_the_one_before_it_was(model_path, tmp_path):
    def script(request):
        asked = bytes(request.token_ids).decode()
        if "slow" in asked:
            return endless(request)
        return [output(request, "first"), output(request, end=FinishReason.STOP)]

    lines = [line("a"), line("b"), line("slow", "slow"), line("c")]
    with keeping(model_path, tmp_path / "kept", ScriptedEngine(script)) as server, sdk_of(server) as sdk:
        batch = begin(sdk, b"".join(lines))
        give_up_s = time.monotonic() + 300
        while sdk.batches.retrieve(batch.id).request_counts.completed < 3:
            assert time.monotonic() < give_up_s
            time.sleep(0.02)
    again = ScriptedEngine(says("second"))
    with keeping(model_path, tmp_path / "kept", again) as server, sdk_of(server) as sdk:
        batch = wait(sdk, batch)
        told = {
            each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"]
            for each in results(sdk, batch.output_file_id)
        }
    assert told == {"a": "first", "b": "first", "c": "first", "slow": "second"}
    assert len(again.taken) == 1


def test_a_server_that_starts_again_takes_the_lines_that_the_one_before_it_took(model_path, tmp_path):
    with keeping(model_path, tmp_path / "kept", ScriptedEngine(endless)) as server, sdk_of(server) as sdk:
        batch = begin(sdk, line("a", priority=1))
        assert batch.status == "in_progress"
    with keeping(model_path, tmp_path / "kept", ScriptedEngine(says("ok"))) as server, sdk_of(server) as sdk:
        batch = wait(sdk, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 1)


def test_a_batch_that_is_cancelled_keeps_its_answers(model_path, tmp_path):
    def script(request):
        return endless(request) if b"slow" in bytes(request.token_ids) else says("ok")(request)

    engine = ScriptedEngine(script)
    with keeping(model_path, tmp_path / "kept", engine) as server, sdk_of(server) as sdk:
        batch = begin(sdk, line("a") + line("slow", "slow"))
        wait_until(lambda: sdk.batches.retrieve(batch.id).request_counts.completed == 1 and len(engine.taken) == 2)
        cancelled = sdk.batches.cancel(batch.id)
        assert cancelled.status == "cancelled"
        assert [each["custom_id"] for each in results(sdk, cancelled.output_file_id)] == ["a"]
        assert len(engine.left) == 1


def test_a_line_that_finds_the_server_busy_is_asked_again(model_path, tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "MOST_RETRY_S", 0.05)
    tries = []

    def script(request):
        tries.append(request)
        return [QueueFullError("full", retry_after_s=0.01)] if len(tries) == 1 else says("ok")(request)

    with keeping(model_path, tmp_path / "kept", ScriptedEngine(script)) as server, sdk_of(server) as sdk:
        assert wait(sdk, begin(sdk, line("a"))).request_counts.completed == 1
    assert len(tries) == 2


def test_lines_are_a_class_behind_what_somebody_waits_for(server):
    with sdk_of(server) as sdk:
        wait(sdk, begin(sdk, line("a")))
    assert server.engine.taken[0].priority == 1


@pytest.fixture
def two_tenants():
    credentials, ann = Credentials.empty().add("ann")
    credentials, bob = credentials.add("bob")
    return Gate(Policy("team"), credentials, loopback=True), credentials, ann, bob


def test_another_tenant_finds_nothing(model_path, tmp_path, two_tenants):
    gate, _, ann, bob = two_tenants
    with keeping(model_path, tmp_path / "kept", ScriptedEngine(says("ok")), gate) as server:
        with sdk_of(server, ann) as mine, sdk_of(server, bob) as others:
            batch = wait(mine, begin(mine, line("a")))
            assert (list(others.files.list()), list(others.batches.list())) == ([], [])
            asks = (
                lambda: others.files.retrieve(batch.input_file_id),
                lambda: others.files.content(batch.output_file_id),
                lambda: others.files.delete(batch.input_file_id),
                lambda: others.batches.retrieve(batch.id),
                lambda: others.batches.cancel(batch.id),
                lambda: others.batches.create(
                    input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
                ),
            )
            for ask in asks:
                with pytest.raises(openai.NotFoundError):
                    ask()
            assert mine.files.content(batch.output_file_id).text
        refused = httpx.get(f"{server.url}/v1/files")
    assert refused.status_code == 401


def test_a_batch_ends_with_its_key(model_path, tmp_path, two_tenants):
    gate, credentials, ann, _ = two_tenants
    with keeping(model_path, tmp_path / "kept", ScriptedEngine(endless), gate) as server, sdk_of(server, ann) as sdk:
        begin(sdk, line("slow", "slow"))
        wait_until(lambda: bool(server.engine.taken))
    later = Gate(Policy("team"), credentials.remove("ann"), loopback=True)
    again = ScriptedEngine(says("ok"))
    with keeping(model_path, tmp_path / "kept", again, later):
        time.sleep(0.1)
    assert not again.taken


def test_nothing_on_the_disk_is_to_be_read_or_told_apart(model_path, tmp_path):
    directory = tmp_path / "kept"
    with keeping(model_path, directory, ScriptedEngine(says(SECRET))) as server, sdk_of(server) as sdk:
        stored = sdk.files.create(file=(f"{SECRET}.jsonl", line("a", SECRET)), purpose="batch")
        batch = sdk.batches.create(
            input_file_id=stored.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"what": SECRET},
        )
        wait(sdk, batch)
    data = b"".join(path.read_bytes() for path in directory.iterdir())
    assert len(data) > 500
    for word in (b"secret", b"recipe", b"hello", b"messages", b"local", b"batch_output"):
        assert word not in data
    assert all(path.stat().st_mode & 0o077 == 0 for path in [directory, *directory.iterdir(), tmp_path / "kept.key"])


@pytest.mark.parametrize("profile", ["private", "paranoid"])
def test_a_strict_profile_keeps_nothing(model_path, tmp_path, profile):
    with pytest.raises(PolicyError, match="storage"):
        FileService.open(ServerConfig(files=str(tmp_path / "kept")), make_gate(profile))
    assert not (tmp_path / "kept").exists()


def test_routes_of_a_server_that_keeps_nothing_say_so(client, model_path):
    reply = client.get("/v1/files")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "no_file_store")
    gate = make_gate("private")
    with serving_script(model_path, ScriptedEngine(says("ok")), gate=gate) as server:
        assert httpx.get(f"{server.url}/v1/files").status_code == 403


def test_who_cannot_be_told_apart_keeps_nothing(tmp_path):
    gate = Gate(Policy("open"), None, loopback=False)
    with pytest.raises(ConfigError, match="needs API keys"):
        FileService.open(ServerConfig(files=str(tmp_path / "kept")), gate)


def test_a_page_elsewhere_cannot_send_a_form(server):
    form = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
    refused = httpx.post(f"{server.url}/v1/files", headers={"origin": "https://evil.example"}, **form)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert httpx.post(f"{server.url}/v1/files", headers={"origin": "http://[evil"}, **form).status_code == 403
    assert httpx.post(f"{server.url}/v1/files", headers={"origin": server.url}, **form).status_code == 200


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({"files": {"file": ("a", b"x")}}, "purpose"),
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "fine-tune"}}, "purpose"),
        ({"files": {"other": ("a", b"x")}, "data": {"purpose": "batch"}}, "file"),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data"}}, "multipart/form-data"),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data; boundary=x"}}, "multipart/form-data"),
    ],
)
def test_a_form_at_fault_is_explained(server, form, named):
    reply = httpx.post(f"{server.url}/v1/files", **form)
    assert (reply.status_code, f"`{named}`" in reply.text or named in reply.text) == (400, True)


def test_a_file_without_room_is_refused_and_leaves_nothing(tmp_path):
    store = FileStore(Vault(tmp_path / "kept", KEY, 4000))
    owner = Owner.of(store.vault, b"ann")
    store.create(owner, "a", bytes(2000))
    with pytest.raises(StorageFullError, match="no room left"):
        store.create(owner, "b", bytes(2000))
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_a_full_disk_is_said_in_words_and_nothing_is_left_in_halves(tmp_path):
    store = FileStore(Vault(tmp_path / "kept", KEY, 1 << 20))
    owner = Owner.of(store.vault, b"ann")
    store.append("file-" + "0" * 32, owner, 0, b"first")
    before = {path.name: path.read_bytes() for path in (tmp_path / "kept").iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # the kernel writes as much as fits, and refuses the rest
    try:
        with pytest.raises(StorageFullError, match="disk is full"):
            store.create(owner, "a", bytes(8192))
        with pytest.raises(StorageFullError, match="disk is full"):
            store.append("file-" + "0" * 32, owner, 1, bytes(8192))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in (tmp_path / "kept").iterdir()} == before
    store.append("file-" + "0" * 32, owner, 1, b"second")
    assert list(store.lines("file-" + "0" * 32, owner)) == [b"first\n", b"second\n"]


def test_a_record_that_was_cut_short_was_never_written(tmp_path):
    vault = Vault(tmp_path / "kept", KEY, 1 << 20)
    vault.append("a", KEY, 0, b"one")
    vault.append("a", KEY, 1, b"two")
    path = tmp_path / "kept" / "a"
    for cut in (1, 10, 30):
        data = path.read_bytes()
        path.write_bytes(data[:-cut])
        assert list(vault.mend("a", KEY)) == [b"one"]
        vault.append("a", KEY, 1, b"two")
        assert list(vault.read("a", KEY)) == [b"one", b"two"]


def test_what_others_changed_is_found_out(tmp_path):
    store = FileStore(Vault(tmp_path / "kept", KEY, 1 << 20))
    owner = Owner.of(store.vault, b"ann")
    one, two = store.create(owner, "a", b"one"), store.create(owner, "b", b"two")
    paths = [tmp_path / "kept" / f"{stored.id}.data" for stored in (one, two)]
    data = [path.read_bytes() for path in paths]
    for changed in (data[1], data[0][:-1] + bytes([data[0][-1] ^ 1]), b"", data[0] * 2):
        paths[0].write_bytes(changed)
        with pytest.raises(DamagedError):
            store.content(one, owner)
    paths[0].write_bytes(data[0])
    assert store.content(one, owner) == b"one"
    with pytest.raises(DamagedError):
        store.content(one, Owner(owner.tag, bytes(32)))


def test_what_has_had_its_time_is_gone_at_once_and_then_from_the_disk(tmp_path):
    now = [1000.0]
    store = FileStore(Vault(tmp_path / "kept", KEY, 1 << 20), lambda: now[0])
    owner = Owner.of(store.vault, b"ann")
    stored = store.create(owner, "a", b"one", lifetime_s=3600)
    now[0] += 3600
    with pytest.raises(NotFoundError):
        store.shelf.find(stored.id, owner)
    assert store.shelf.of(owner) == []
    store.sweep()
    assert list((tmp_path / "kept").iterdir()) == []


def test_what_a_server_that_ended_in_the_middle_left_is_removed(tmp_path):
    vault = Vault(tmp_path / "kept", KEY, 1 << 20)
    kept, lost = "file-" + "1" * 32, "file-" + "2" * 32
    for name in (f"{kept}.data", f"{lost}.data", ".draft"):
        (tmp_path / "kept" / name).write_bytes(b"x")
    vault.close()
    FileStore(Vault(tmp_path / "kept", KEY, 1 << 20)).tidy([kept])
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [f"{kept}.data"]


def test_two_servers_do_not_share_a_directory(tmp_path):
    vault = Vault(tmp_path / "kept", KEY, 1 << 20)
    with pytest.raises(ConfigError, match="another server"):
        Vault(tmp_path / "kept", KEY, 1 << 20)
    vault.close()
    Vault(tmp_path / "kept", KEY, 1 << 20).close()


def test_a_key_file_that_others_can_read_is_refused(tmp_path):
    (tmp_path / "kept.key").write_bytes(KEY)
    (tmp_path / "kept.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        FileService.open(ServerConfig(files=str(tmp_path / "kept")), make_gate())


def test_a_form_with_too_many_parts_is_refused():
    part = b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\n1\r\n'
    with pytest.raises(InvalidRequestError, match="parts"):
        read_form("multipart/form-data; boundary=x", part * 100 + b"--x--")


@pytest.mark.parametrize("unit", [";", "; a", "; a*0=b", "\r\na: b"], ids=["semicolons", "parameters", "pieces", "lines"])
def test_a_part_with_a_long_head_is_refused_before_it_costs_anything(unit):
    head = '--x\r\ncontent-disposition: form-data; name="file"' + unit * 20_000
    taken_s = []
    while not taken_s or min(taken_s) >= 0.05:  # a collection of garbage, which any of them may meet, takes longer
        assert len(taken_s) < 5, taken_s
        began_s = time.thread_time()
        with pytest.raises(InvalidRequestError, match=r"more than 4096 bytes of headers"):
            read_form("multipart/form-data; boundary=x", f"{head}\r\n\r\ndata\r\n--x--".encode())
        taken_s.append(time.thread_time() - began_s)


def test_an_input_may_have_so_many_lines_and_no_more(monkeypatch):
    monkeypatch.setattr(batches, "MAX_LINES", 2)
    two = line("a") + line("b")
    assert [each.custom_id for each in read_lines(two, "/v1/chat/completions")[0]] == ["a", "b"]
    assert read_lines(two, "/v1/chat/completions")[1] == []
    (mistake,) = read_lines(two + line("c"), "/v1/chat/completions")[1]
    assert (mistake.code, mistake.line) == ("too_many_lines", 3)


def test_lines_that_were_not_answered_in_time_are_told_so(model_path, tmp_path, monkeypatch):
    """The time is over as soon as one of two lines was answered, and not before, however long that took."""
    given = []

    class Clock:
        """asyncio as the runner of batches sees it."""

        def __getattr__(self, name):
            return getattr(asyncio, name)

        def timeout(self, delay_s):
            given.append((delay_s, asyncio.timeout(None)))
            return given[-1][1]

    def script(request):
        return endless(request) if b"slow" in bytes(request.token_ids) else says("ok")(request)

    monkeypatch.setattr(batch_routes, "WINDOW_S", 3600)
    with keeping(model_path, tmp_path / "kept", ScriptedEngine(script)) as server, sdk_of(server) as sdk:
        monkeypatch.setattr(batches, "asyncio", Clock())
        batch = begin(sdk, line("a") + line("slow", "slow"))
        wait_until(lambda: sdk.batches.retrieve(batch.id).request_counts.completed == 1)
        ((delay_s, window),) = given
        assert 3000 < delay_s <= 3600
        loop = server.uvicorn.servers[0].get_loop()
        loop.call_soon_threadsafe(lambda: window.reschedule(loop.time()))
        batch = wait(sdk, batch)
        assert batch.status == "expired"
        assert [each["custom_id"] for each in results(sdk, batch.output_file_id)] == ["a"]
        (told,) = results(sdk, batch.error_file_id)
        assert (told["custom_id"], told["error"]["code"], told["response"]) == ("slow", "batch_expired", None)


def test_a_disk_that_fills_while_a_batch_runs_ends_it_and_keeps_what_was_answered(model_path, tmp_path):
    def script(request):
        return [output(request, "x" * 50_000), output(request, end=FinishReason.STOP)]

    with keeping(model_path, tmp_path / "kept", ScriptedEngine(script), files_mb=1) as server, sdk_of(server) as sdk:
        batch = wait(sdk, begin(sdk, b"".join(line(f"q{i}") for i in range(40))))
        assert (batch.status, batch.errors.data[0].code) == ("failed", "storage_full")
        assert 0 < batch.request_counts.completed < 40
        assert len(results(sdk, batch.output_file_id)) == batch.request_counts.completed


def test_an_owner_who_floods_the_store_leaves_room_for_others(tmp_path, monkeypatch):
    vault = Vault(tmp_path / "kept", KEY, 100_000)
    store = FileStore(vault, most_each_bytes=50_000)
    ann, bob = Owner.of(vault, b"ann"), Owner.of(vault, b"bob")
    for _ in range(5):
        store.create(ann, "a", bytes(10_000))
    with pytest.raises(StorageFullError, match="delete some"):
        store.create(ann, "a", bytes(10_000))
    store.create(bob, "b", bytes(10_000))
    monkeypatch.setattr(shelves, "MAX_OBJECTS", 5)
    with pytest.raises(StorageFullError, match="delete some"):
        store.create(ann, "a", b"")
    store.create(bob, "b", b"")


def test_what_a_batch_has_written_counts_against_its_owners_share_while_it_runs(tmp_path):
    vault = Vault(tmp_path / "kept", KEY, 100_000)
    store = FileStore(vault, most_each_bytes=50_000)
    ann, bob = Owner.of(vault, b"ann"), Owner.of(vault, b"bob")
    output_id, error_id = store.shelf.new_id(), store.shelf.new_id()
    for number in range(4):
        store.append(output_id, ann, number, bytes(10_000))
    with pytest.raises(StorageFullError, match="delete some"):
        store.append(error_id, ann, 0, bytes(10_000))
    with pytest.raises(StorageFullError, match="delete some"):
        store.create(ann, "a", bytes(10_000))
    store.create(bob, "b", bytes(10_000))
    again = FileStore(vault, most_each_bytes=50_000)  # as a server that starts again
    assert len(list(again.lines(output_id, ann))) == 4
    with pytest.raises(StorageFullError, match="delete some"):
        again.create(ann, "a", bytes(10_000))
    store.publish(ann, output_id, "out", 40_004)
    assert not store._unfinished  # nothing is remembered of uploads that were refused
    store.create(ann, "a", bytes(9_000))  # counted once
    with pytest.raises(StorageFullError, match="delete some"):
        store.create(ann, "a", bytes(9_000))


def test_uploads_that_come_at_once_do_not_pass_the_share_together(tmp_path):
    vault = Vault(tmp_path / "kept", KEY, 1_000_000)
    store = FileStore(vault, most_each_bytes=50_000)
    ann = Owner.of(vault, b"ann")
    replace, both = vault.replace, threading.Barrier(2)

    def slow(*args, **kwargs):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return replace(*args, **kwargs)

    vault.replace = slow
    outcomes = []

    def upload():
        try:
            outcomes.append(store.create(ann, "a", bytes(30_000)).bytes)
        except StorageFullError:
            outcomes.append("full")

    threads = [threading.Thread(target=upload) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, outcomes)) == ["30000", "full"]


def test_a_page_of_an_allowed_origin_sends_a_form_and_removes_the_file(model_path, tmp_path):
    page = "https://chat.example.org"
    form = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
    with keeping(model_path, tmp_path / "kept", ScriptedEngine(says("ok")), allowed_origins=page) as server:
        files = f"{server.url}/v1/files"
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        assert httpx.options(files, headers={"origin": page, **asked}).headers["access-control-allow-origin"] == page
        stored = httpx.post(files, headers={"origin": page}, **form)
        assert (stored.status_code, stored.headers["access-control-allow-origin"]) == (200, page)
        assert httpx.post(files, headers={"origin": "https://evil.example"}, **form).status_code == 403
        one = f"{files}/{stored.json()['id']}"
        asked = {"access-control-request-method": "DELETE"}
        assert "DELETE" in httpx.options(one, headers={"origin": page, **asked}).headers["access-control-allow-methods"]
        assert httpx.delete(one, headers={"origin": page}).json()["deleted"]


def test_an_owner_with_many_batches_waits_and_others_do_not(model_path, tmp_path, two_tenants, monkeypatch):
    def script(request):
        return endless(request) if b"slow" in bytes(request.token_ids) else says("ok")(request)

    gate, _, ann, bob = two_tenants
    monkeypatch.setattr(batch_routes, "MAX_OPEN", 6)
    with (
        keeping(model_path, tmp_path / "kept", ScriptedEngine(script), gate) as server,
        sdk_of(server, ann) as flood,
        sdk_of(server, bob) as other,
    ):
        for _ in range(6):
            begin(flood, line("slow", "slow"))
        with pytest.raises(openai.RateLimitError, match="wait until one has ended"):
            begin(flood, line("slow", "slow"))
        assert wait(other, begin(other, line("a"))).status == "completed"


def test_a_batch_runs_though_its_client_left_while_it_was_made(server, monkeypatch):
    create, has_begun, has_left = batch_routes._create, threading.Event(), threading.Event()

    def create_slowly(*args):
        has_begun.set()
        assert has_left.wait(300)
        return create(*args)

    monkeypatch.setattr(batch_routes, "_create", create_slowly)
    with sdk_of(server) as sdk:
        stored = sdk.files.create(file=("in.jsonl", line("a")), purpose="batch")
        body = {"input_file_id": stored.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        client = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=300)
        client.request("POST", "/v1/batches", json.dumps(body), {"content-type": "application/json"})
        assert has_begun.wait(300)
        client.close()
        has_left.set()
        give_up_s = time.monotonic() + 300
        while [each.status for each in sdk.batches.list()] != ["completed"]:
            assert time.monotonic() < give_up_s, "it never ran"
            time.sleep(0.02)


def test_a_batch_that_is_cancelled_before_it_began_has_ended(tmp_path):
    async def scenario():
        vault = Vault(tmp_path / "kept", KEY, 1 << 20)
        store, shelf = FileStore(vault), Shelf(vault, Batch, "batch_")
        batch = Batch(
            id=shelf.new_id(),
            owner="ann",
            created_at=shelf.now(),
            expires_at=shelf.now() + 100,
            endpoint="/v1/chat/completions",
            input_file_id="",
            completes_by=shelf.now() + 100,
            key=None,
            output_id=store.shelf.new_id(),
            error_id=store.shelf.new_id(),
        )
        runner = BatchRunner(store, shelf, make_gate(), None, BodyBudget())
        runner.start(batch)
        await runner.cancel(batch)
        await runner.close()
        return batch.status

    assert asyncio.run(scenario()) == "cancelled"


def test_a_line_of_a_batch_is_charged_as_a_body_with_what_it_names_until_it_has_ended():
    budget, seen = BodyBudget(1 << 20), []

    async def app(scope, receive, send):
        charge = scope["state"][BODY_CHARGE]
        state = replace(ServerState(None, None, None, None, threads=open_reading_threads(2)), body_charge=charge)
        await state.off_the_loop(partial(charge_kept, 700_000))
        seen.append(budget.num_bytes)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def ask():
        return asyncio.run(post(app, "/v1/responses", b"x" * 100_000, None, budget))

    assert ask().status == 200
    assert seen == [800_000]
    assert budget.num_bytes == 0
    other = budget.open("a network")
    other.add(500_000)
    other.is_whole = True
    with pytest.raises(OverloadedError, match="no memory"):
        ask()
    assert budget.num_bytes == 500_000
    other.add(500_000)
    assert ask().status == 503, "a batch sends it again later"
    assert budget.num_bytes == 1_000_000
    assert len(seen) == 1


def test_batches_and_other_requests_share_one_budget(model_path, tmp_path, monkeypatch, two_tenants):
    networks = {}

    class Watched(BodyBudget):
        def open(self, network, owner=""):
            networks.setdefault(self, set()).add((network, owner))
            return super().open(network, owner)

    gate, _, ann, _ = two_tenants
    monkeypatch.setattr("cloister.server.app.BodyBudget", Watched)
    with keeping(model_path, tmp_path / "kept", ScriptedEngine(says("ok")), gate) as server, sdk_of(server, ann) as sdk:
        assert wait(sdk, begin(sdk, line("a"))).request_counts.completed == 1
    assert list(networks.values()) == [{("127.0.0.0/24", "ann"), ("", "ann")}], "a batch uses its tenant's share"


def test_a_disk_that_fails_is_said_in_words(tmp_path):
    vault = Vault(tmp_path / "kept", KEY, 1 << 20)
    (tmp_path / "kept").rename(tmp_path / "gone")
    for write in (lambda: vault.replace("a", KEY, b"x"), lambda: vault.append("a", KEY, 0, b"x")):
        with pytest.raises(CloisterError, match="tell its operator"):
            write()


def test_files_whose_key_is_missing_are_not_given_another(tmp_path):
    config = ServerConfig(files=str(tmp_path / "kept"))
    service = FileService.open(config, make_gate())
    service.store.create(Owner.of(service.store.vault, b"local"), "a", b"x")
    service.close()
    (tmp_path / "kept.key").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"kept\.key, without which nobody can read them, is missing"):
        FileService.open(config, make_gate())
    assert not (tmp_path / "kept.key").exists()
    (tmp_path / "elsewhere").rename(tmp_path / "kept.key")
    FileService.open(config, make_gate()).close()


def test_what_is_not_stored_here_needs_no_key(tmp_path):
    (tmp_path / "kept" / "lost+found").mkdir(parents=True)  # a new file system has it
    FileService.open(ServerConfig(files=str(tmp_path / "kept")), make_gate()).close()


def test_a_key_file_that_was_changed_is_named_at_start(tmp_path):
    config = ServerConfig(files=str(tmp_path / "kept"))
    service = FileService.open(config, make_gate())
    service.store.create(Owner.of(service.store.vault, b"local"), "a", b"x")
    service.close()
    (tmp_path / "kept.key").write_bytes(KEY)
    with pytest.raises(ConfigError, match=r"kept\.key"):
        FileService.open(config, make_gate())
    with pytest.raises(ConfigError, match=r"kept\.key"):  # and not that another server has the directory
        FileService.open(config, make_gate())


@pytest.mark.parametrize("name", ["Größe 日本.jsonl", 'a "b".jsonl', "a;b.jsonl"])
def test_a_file_keeps_the_name_that_it_came_with(server, name):
    with sdk_of(server) as sdk:
        stored = sdk.files.create(file=(name, b"x"), purpose="batch")
        assert sdk.files.retrieve(stored.id).filename == stored.filename
        assert stored.filename == name.replace('"', "%22")  # as forms write a quote (WHATWG HTML, 4.10.21.8)


HEADS = st.sampled_from(
    [b'content-disposition: form-data; name="purpose"', b"content-disposition: form-data; name*=utf-9''a", b"\xff: \xff"]
)
FORMS = st.lists(st.tuples(HEADS, st.binary(max_size=8)), max_size=4)


@settings(max_examples=examples(150), deadline=None)
@given(FORMS, st.binary(max_size=12), st.sampled_from(["x", "", '"', "é", "x; a*=b"]))
def test_whatever_form_is_sent_is_read_or_refused(parts, tail, boundary):
    body = b"".join(b"--x\r\n" + head + b"\r\n\r\n" + data + b"\r\n" for head, data in parts) + b"--x--" + tail
    with contextlib.suppress(InvalidRequestError):
        read_form(f"multipart/form-data; boundary={boundary}", body)


@pytest.mark.parametrize("filename", [b"\xff\xfe", b"a\r\n b", b"\xed\xa0\x80", b"a" * 5000, b""])
def test_no_name_of_a_file_is_a_fault_of_the_server(server, filename):
    head = b'content-disposition: form-data; name="file"; filename="' + filename + b'"\r\n\r\n'
    purpose = b'\r\n--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--'
    reply = httpx.post(
        f"{server.url}/v1/files",
        content=b"--x\r\n" + head + b"content" + purpose,
        headers={"content-type": "multipart/form-data; boundary=x"},
    )
    assert reply.status_code in (200, 400), reply.text
    assert httpx.get(f"{server.url}/v1/files").status_code == 200


def test_a_full_disk_leaves_no_part_of_a_key_and_a_part_is_explained(tmp_path: Path):
    key = tmp_path / "kept.key"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (KEY_BYTES // 2, hard))
    try:
        with pytest.raises(ConfigError, match="File too large"):
            read_key(key)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    made = read_key(key)
    assert len(made) == KEY_BYTES
    assert read_key(key) == made
    assert key.stat().st_mode & 0o777 == 0o600
    for left in (0, 16):
        key.write_bytes(made[:left])
        with pytest.raises(ConfigError, match=rf"holds {left} of 32 bytes: it was cut short.* or delete it"):
            read_key(key)


def test_a_client_is_told_that_what_was_kept_is_damaged_and_of_other_errors_of_this_server_nothing():
    shown = public_error(DamagedError())
    assert (shown.status, shown.code) == (500, "damaged_file")
    assert public_error(CloisterError("The disk refuses.", code="storage_failed")).code == "storage_failed"
    assert public_error(CloisterError("a path")).message == INTERNAL.message


def test_an_error_of_storage_reaches_the_client_of_a_route_and_is_logged(caplog):
    async def fail(request):
        raise CloisterError("The disk refuses.", code="storage_failed")

    app = Starlette(routes=[Route("/", fail)], exception_handlers={CloisterError: _answer_error})
    with caplog.at_level("ERROR"):
        reply = TestClient(app).get("/")
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "storage_failed")
    assert len(caplog.records) == 1
