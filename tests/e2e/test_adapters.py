"""LoRA adapters from the request to the tokens: chosen by model name, loaded and unloaded while requests run."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloister.engine import EngineClient, EngineCore, ProcessTransport, ThreadTransport
from cloister.executor.adapters import plan_room
from cloister.launch import ENGINE_ENTRY, build_engine, resolve_settings
from cloister.policy import Credentials
from cloister.types.config import EngineConfig, ServerConfig
from cloister.types.errors import CloisterError, ConfigError, MemoryBudgetError, ModelError, PolicyError
from cloister.types.events import AdapterReply, LoadAdapter, Outputs, Scheduled, Submit, UnloadAdapter
from cloister.types.request import FinishReason, Request, SamplingParams, SequenceOutput
from tests.adapter_factory import write_adapter
from tests.model_factory import make_model
from tests.server.running_server import RunningServer, make_gate, serving

PROMPT = list(range(20, 90))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: str(write_adapter(root / name, model, seed=seed)) for seed, name in enumerate(("ann", "ben", "cid"), start=1)}


def configure(model: Path, **settings: Any) -> EngineConfig:
    chosen = {"model": str(model), "max_model_len": 512, "num_threads": 1, "weights_cache": "", **settings}
    return resolve_settings(chosen, listens=False).engine.config


class Driven:
    """An engine that is stepped by hand."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.outputs: list[SequenceOutput] = []
        self.replies: dict[str, AdapterReply] = {}
        self.num_cached: dict[str, int] = {}

    def submit(self, name: str, adapter: str | None, *, max_tokens: int = 8, n: int = 1) -> None:
        sampling = SamplingParams(temperature=0.0 if n == 1 else 1.0, seed=1, max_tokens=max_tokens, ignore_eos=True, n=n)
        self.core.input_queue.put(Submit(Request(request_id=name, token_ids=PROMPT, sampling=sampling, adapter=adapter)))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self._take(self.core.step())

    def finish(self) -> None:
        while (outputs := self.core.step()) is not None:
            self._take(outputs)

    def answer(self, name: str, index: int = 0) -> list[int]:
        return [token for out in self.outputs if (out.request_id, out.index) == (name, index) for token in out.token_ids]

    def ends(self, name: str) -> list[FinishReason]:
        return [out.finish_reason for out in self.outputs if out.request_id == name and out.finish_reason is not None]

    def _take(self, outputs: Outputs | None) -> None:
        if outputs is None:
            return
        self.outputs += outputs.outputs
        self.replies |= {reply.call_id: reply for reply in outputs.replies}
        self.num_cached |= {e.request_id: e.num_cached_tokens for e in outputs.events if isinstance(e, Scheduled)}


def start(model: Path, **settings: Any) -> Driven:
    return Driven(build_engine(configure(model, **settings)))


def load(engine: Driven, name: str, path: str) -> AdapterReply:
    engine.core.input_queue.put(LoadAdapter(f"load {name} {path}", name, path))
    engine.step()
    return engine.replies[f"load {name} {path}"]


def digest_of(engine: Driven, name: str) -> str:
    return next(adapter.digest for adapter in engine.core.adapters.loaded if adapter.name == name)


def test_each_request_has_its_own_adapter_and_the_answer_it_has_alone(model: Path, adapters: dict[str, str]) -> None:
    lora = ",".join(f"{name}={path}" for name, path in adapters.items())
    alone = {}
    for name in (None, *adapters):
        engine = start(model, lora=lora)
        engine.submit("r", None if name is None else digest_of(engine, name))
        engine.finish()
        alone[name] = engine.answer("r")
    assert len({tuple(answer) for answer in alone.values()}) == 4
    engine = start(model, lora=lora)
    for name in (None, *adapters):
        engine.submit(f"r {name}", None if name is None else digest_of(engine, name))
    engine.finish()
    assert {name: engine.answer(f"r {name}") for name in (None, *adapters)} == alone


def test_preemption_and_forks_keep_the_adapter(model: Path, adapters: dict[str, str]) -> None:
    """Room for little more than one sequence: they take turns, and the answers stay those of much room."""
    found = {}
    for kv_memory_mb in (8.0, 0.3):
        engine = start(model, lora=f"ann={adapters['ann']}", kv_memory_mb=kv_memory_mb, prefix_cache=False, max_model_len=128)
        for name, adapter in (("a", digest_of(engine, "ann")), ("b", None), ("c", digest_of(engine, "ann"))):
            engine.submit(name, adapter, max_tokens=40, n=2)
        engine.finish()
        found[kv_memory_mb] = [engine.answer(name, index) for name in "abc" for index in range(2)]
        assert all(len(answer) == 40 for answer in found[kv_memory_mb])
    assert found[8.0] == found[0.3]


def test_a_prefix_is_found_with_the_same_weights_only(model: Path, adapters: dict[str, str], tmp_path: Path) -> None:
    engine = start(model, runtime_adapters=True)
    load(engine, "ann", adapters["ann"])
    load(engine, "ben", adapters["ben"])
    load(engine, "twin", adapters["ann"])
    for number, name in enumerate(["ann", None, "ben", "ann", "twin"]):
        engine.submit(f"{number}", None if name is None else digest_of(engine, name))
        engine.finish()
    assert [engine.num_cached[f"{number}"] > 0 for number in range(5)] == [False, False, False, True, True]
    # other weights under the old name
    engine.core.input_queue.put(UnloadAdapter("gone", "ben"))
    engine.step()
    load(engine, "ben", str(write_adapter(tmp_path, model, seed=9)))
    engine.submit("last", digest_of(engine, "ben"))
    engine.finish()
    assert engine.num_cached["last"] == 0
    assert engine.answer("last") != engine.answer("2")


def test_unloading_waits_for_running_requests_and_takes_no_new_ones(model: Path, adapters: dict[str, str]) -> None:
    engine = start(model, runtime_adapters=True, max_loras=1)
    digest = load(engine, "ann", adapters["ann"]).adapter.digest  # type: ignore[union-attr]
    engine.submit("running", digest, max_tokens=6)
    engine.step(2)
    engine.core.input_queue.put(UnloadAdapter("unload", "ann"))
    engine.submit("late", digest)
    engine.step()
    assert engine.ends("late") == [FinishReason.REJECTED]
    assert "unload" not in engine.replies
    assert "room" in (load(engine, "ben", adapters["ben"]).error or "")
    engine.finish()
    assert engine.ends("running") == [FinishReason.LENGTH]
    assert engine.replies["unload"].error is None
    assert load(engine, "ben", adapters["ben"]).error is None


def test_what_cannot_be_loaded_is_told(model: Path, adapters: dict[str, str], tmp_path: Path) -> None:
    engine = start(model, runtime_adapters=True)
    assert "adapter_config.json" in (load(engine, "none", str(tmp_path)).error or "")
    assert "max-lora-rank" in (load(engine, "wide", str(write_adapter(tmp_path / "w", model, rank=32))).error or "")
    assert load(engine, "ann", adapters["ann"]).error is None
    assert "already" in (load(engine, "ann", adapters["ben"]).error or "")
    engine.core.input_queue.put(UnloadAdapter("x", "nobody"))
    engine.step()
    assert "no adapter" in (engine.replies["x"].error or "")


@pytest.mark.parametrize("path", ["~nobody-of-that-name/adapter", "/tmp/" + 300 * "a"])
def test_a_path_that_leads_nowhere_ends_nobody_elses_request(model: Path, path: str) -> None:
    engine = start(model, runtime_adapters=True)
    engine.submit("r", None)
    reply = load(engine, "x", path)
    assert "path" in (reply.error or "")
    engine.finish()
    assert len(engine.answer("r")) == 8


def test_adapters_given_at_start_stay_where_nobody_may_change_them(model: Path, adapters: dict[str, str]) -> None:
    engine = start(model, lora=f"ann={adapters['ann']}")
    assert "runtime-adapters" in (load(engine, "ben", adapters["ben"]).error or "")
    engine.core.input_queue.put(UnloadAdapter("x", "ann"))
    engine.step()
    assert "runtime-adapters" in (engine.replies["x"].error or "")
    assert [adapter.name for adapter in engine.core.adapters.loaded] == ["ann"]


def test_settings_that_cannot_be_meant_are_told(model: Path, adapters: dict[str, str]) -> None:
    for settings, error in (
        ({"lora": "ann"}, ConfigError),
        ({"lora": f"a={adapters['ann']},b={adapters['ben']}", "max_loras": 1}, ConfigError),
        ({"lora": f"a={adapters['ann']}", "max_lora_rank": 4}, ModelError),
        ({"lora": "a=/nowhere/at/all"}, ConfigError),
        ({"runtime_adapters": True, "max_loras": 1_000_000, "max_lora_rank": 4096}, MemoryBudgetError),
        ({"runtime_adapters": True, "profile": "private"}, PolicyError),
    ):
        with pytest.raises(error):  # type: ignore[call-overload]
            start(model, **settings)


def test_room_for_adapters_is_an_item_of_the_budget(model: Path, adapters: dict[str, str]) -> None:
    plain, with_room = start(model), start(model, runtime_adapters=True, max_loras=3, max_lora_rank=8)
    assert "adapters" not in dict(plain.core.memory)
    per_layer = 64 + 64 + 2 * (64 + 32) + 64 + 64 + 3 * (64 + 100)
    in_a_step = 1024 * 4 * (2 * 112 + 32)  # gate and up of every token, in whole sixteens
    assert dict(with_room.core.memory)["adapters"] == 3 * 2 * 4 * 8 * per_layer + in_a_step


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    with serve(model) as running:
        yield running


def serve(model: Path, **options: Any) -> Any:
    config = configure(model, runtime_adapters=True, max_loras=2)

    async def begin() -> EngineClient:
        engine = EngineClient(ThreadTransport(build_engine(config)), config)
        await engine.start()
        return engine

    return serving(model, begin, **options)


def ask(url: str, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=300)


def call(url: str, verb: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/{verb}_lora_adapter", json=body, timeout=300)


def test_an_adapter_is_a_model_of_its_own_over_http(server: RunningServer, adapters: dict[str, str]) -> None:
    url, base = server.url, server.engine.model.name
    assert call(url, "load", lora_name="ann", lora_path=adapters["ann"]).status_code == 200
    listed = {entry["id"]: entry for entry in httpx.get(f"{url}/v1/models").json()["data"]}
    assert (listed[base]["parent"], listed["ann"]["parent"]) == (None, base)
    assert adapters["ann"] not in str(listed)
    assert httpx.get(f"{url}/v1/models/ann").json()["id"] == "ann"
    plain, changed = ask(url, base).json(), ask(url, "ann").json()
    assert changed["choices"][0]["text"] != plain["choices"][0]["text"]
    assert (plain["model"], changed["model"]) == (base, "ann")
    assert changed["system_fingerprint"].startswith(plain["system_fingerprint"])
    assert changed["system_fingerprint"] != plain["system_fingerprint"]
    assert call(url, "unload", lora_name="ann").status_code == 200
    assert ask(url, "ann").status_code == 404
    assert [entry["id"] for entry in httpx.get(f"{url}/v1/models").json()["data"]] == [base]


def test_vectors_and_scores_are_those_of_the_adapter_that_is_named(server: RunningServer, adapters: dict[str, str]) -> None:
    base = server.engine.model.name
    assert call(server.url, "load", lora_name="ann", lora_path=adapters["ann"]).status_code == 200

    def vector(model: str) -> list[float]:
        reply = httpx.post(f"{server.url}/v1/embeddings", json={"model": model, "input": [PROMPT]})
        assert reply.json()["model"] == model
        return list(reply.json()["data"][0]["embedding"])

    def score(model: str) -> float:
        reply = httpx.post(f"{server.url}/v1/score", json={"model": model, "text_1": "a cat", "text_2": "the dog ran"})
        return float(reply.json()["data"][0]["score"])

    plain, changed = vector(base), vector("ann")
    assert plain != changed
    assert (vector(base), vector("ann")) == (plain, changed)  # nothing of one is left for the other
    assert score(base) != score("ann")
    assert call(server.url, "unload", lora_name="ann").status_code == 200


@pytest.mark.parametrize(("body", "status", "param"), [
    ({"lora_name": "x", "lora_path": "/nowhere"}, 400, None), ({"lora_name": "x"}, 400, "lora_path"),
    ({"lora_name": "a,b", "lora_path": "/x"}, 400, "lora_name"), ({"lora_name": "x", "lora_path": "/x,y"}, 400, "lora_path"),
    ({"lora_name": "x", "lora_path": "/x", "load_inplace": True}, 400, None),
])  # fmt: skip
def test_bad_calls_are_answered_with_what_is_wrong(
    server: RunningServer, body: dict[str, Any], status: int, param: str | None
) -> None:
    reply = call(server.url, "load", **body)
    assert reply.status_code == status
    assert param is None or reply.json()["error"]["param"] == param


def test_the_models_own_name_is_no_name_for_an_adapter(server: RunningServer, adapters: dict[str, str]) -> None:
    assert call(server.url, "load", lora_name=server.engine.model.name, lora_path=adapters["ann"]).status_code == 400


def test_nor_is_another_name_of_it(model: Path, adapters: dict[str, str]) -> None:
    with serve(model, config=ServerConfig(port=0, served_model_name="first, second")) as server:
        for name in ("first", "second"):
            assert call(server.url, "load", lora_name=name, lora_path=adapters["ann"]).json()["error"]["param"] == "lora_name"


def test_unloading_what_is_not_there_is_answered_404(server: RunningServer) -> None:
    assert call(server.url, "unload", lora_name="nobody").status_code == 404


def test_adapters_come_and_go_under_load_and_every_request_ends_once(server: RunningServer, adapters: dict[str, str]) -> None:
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            for name in ("ann", "ben"):
                assert call(server.url, "load", lora_name=name, lora_path=adapters[name]).status_code == 200
            for name in ("ann", "ben"):
                assert call(server.url, "unload", lora_name=name).status_code == 200

    with ThreadPoolExecutor(5) as pool:
        changes = pool.submit(change)
        names, statuses = ["ann", "ben", server.engine.model.name] * 10, list[int]()
        give_up_s = time.monotonic() + 300
        while 200 not in statuses[0::3] and time.monotonic() < give_up_s:  # it may be away whenever it is asked for
            statuses += pool.map(lambda name: ask(server.url, name).status_code, names)
        stop.set()
        changes.result(300)
    assert set(statuses) <= {200, 400, 404}
    assert set(statuses[2::3]) == {200}
    assert 200 in statuses[0::3]


def test_with_keys_only_an_operators_key_may_change_adapters(model: Path, adapters: dict[str, str]) -> None:
    credentials, user = Credentials.empty().add("ann")
    credentials, operator = credentials.add("root", is_operator=True)
    config = ServerConfig(port=0, api_keys="keys.json", drain_timeout_s=1.0)
    with serve(model, gate=make_gate("team", credentials), config=config) as server:
        body = {"lora_name": "ann", "lora_path": adapters["ann"]}
        for key, status in ((user, 403), (operator, 200)):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, headers=headers).status_code == status
        headers = {"authorization": f"Bearer {user}"}
        answered = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "ann", "prompt": PROMPT, "max_tokens": 2},
            headers=headers,
            timeout=300,
        )
        assert answered.status_code == 200


def test_an_engine_that_is_started_again_has_its_adapters_again(model: Path, adapters: dict[str, str]) -> None:
    async def answer(engine: EngineClient, name: str) -> list[int]:
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        digest = engine.adapters.loaded[name].digest
        request = Request(request_id=os.urandom(8).hex(), token_ids=PROMPT, sampling=sampling, adapter=digest)
        return [token async for output in engine.generate(request) for token in output.token_ids]

    async def live() -> None:
        engine = EngineClient(
            ProcessTransport(ENGINE_ENTRY), configure(model, runtime_adapters=True, lora=f"ann={adapters['ann']}")
        )
        await engine.start()
        try:
            await engine.adapters.load("ben", adapters["ben"])
            await engine.adapters.unload("ann")
            before = await answer(engine, "ben")
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            for _ in range(600):
                await asyncio.sleep(0.1)
                try:
                    after = await answer(engine, "ben")
                    break
                except CloisterError:
                    continue
            assert after == before
            assert list(engine.adapters.loaded) == ["ben"]
        finally:
            await engine.drain(1.0)

    asyncio.run(live())


def test_a_folder_that_is_not_there_is_named_as_it_was_given() -> None:
    with pytest.raises(ConfigError, match=r"--lora a=\./nope: there is no such folder; give the one"):
        plan_room(EngineConfig(lora="a=./nope"))
