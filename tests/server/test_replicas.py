"""`/v1/replicas` over HTTP, and `cloister cluster` as an operator runs it, before two engines behind one client."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from starlette.applications import Starlette
from starlette.routing import Route

from cloister.cli import cluster, main
from cloister.cluster import ROUTERS, ReplicaSet
from cloister.cluster.replica_states import ReplicaStates
from cloister.cluster.rolling_update import EngineRelease
from cloister.cluster.routers import Router, RouterContext
from cloister.engine import EngineClient, ThreadTransport
from cloister.kv import PrefixKeys
from cloister.policy import Credentials, Gate
from cloister.private.serving import HealthEndpoint, handlers
from cloister.server.calls import HttpCalls
from cloister.server.logs import line_of
from cloister.types.request import ModelInfo
from tests.engine.replica import BLOCK_SIZE, SpeakingRunner, make_config, make_replica
from tests.loopback import serve
from tests.server.running_server import RunningServer, make_gate, serving
from tests.server.test_bad_input import check_error
from tests.server.test_floods import wait_until

PATH = "/v1/replicas"


def make_router(model: ModelInfo, name: str = "least_load") -> Router:
    return ROUTERS.get(name)(RouterContext(PrefixKeys(model.fingerprint, BLOCK_SIZE), random.Random(0)))


@contextmanager
def served_by_two(path: Path, gate: Gate | None = None, *, router: str = "least_load") -> Iterator[RunningServer]:
    def make(model: str, index: int = 0, lora: str | None = None) -> EngineClient:
        weights, says = (0, "ok") if model == "old" else (1, "new")
        core = make_replica(path, SpeakingRunner(says), weights=weights).core
        return EngineClient(ThreadTransport(core), make_config(path))

    def make_release(model: str) -> EngineRelease:
        return EngineRelease(model, partial(make, model))

    async def start() -> ReplicaSet:
        replicas = ReplicaSet(
            [make("old"), make("old")],
            partial(make_router, name=router),
            release=make_release("old"),
            make_release=make_release,
        )
        await replicas.start()
        return replicas

    with serving(path, start, gate=gate) as server:
        yield server


@pytest.fixture(scope="module")
def two(model_path: Path) -> Iterator[RunningServer]:
    with served_by_two(model_path) as server:
        yield server


def list_replicas(server: RunningServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(server.url + PATH).json()["data"]
    return found


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[object, str, str]:
    """Returns exit status, standard output and standard error."""
    with pytest.raises(SystemExit) as caught:
        main(["cluster", *args])
    return caught.value.code or 0, *capsys.readouterr()


def test_an_operator_sees_what_each_replica_does(two: RunningServer) -> None:
    body = {"model": "history", "prompt": "a", "max_tokens": 1}
    assert [httpx.post(f"{two.url}/v1/completions", json=body).status_code for _ in range(4)] == [200] * 4
    document = httpx.get(f"{two.url}/openapi.json").json()
    reply = httpx.get(two.url + PATH).json()
    schema = document["paths"][PATH]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    Draft202012Validator({**schema, "components": document["components"]}).validate(reply)
    found = reply["data"]
    assert [(each["replica"], each["role"], each["state"]) for each in found] == [(i, "mixed", "running") for i in (0, 1)]
    assert sum(each["load"]["num_routed"] for each in found) == 4
    assert {each["load"]["num_running"] + each["load"]["num_waiting"] for each in found} == {0}
    assert all(0 <= each["load"]["num_used_blocks"] <= each["load"]["num_total_blocks"] for each in found)
    states = [line for line in httpx.get(f"{two.url}/metrics").text.splitlines() if line.startswith("cloister_replica_state{")]
    assert states == [f'cloister_replica_state{{replica="{index}",state="running"}} 1.0' for index in (0, 1)]


def test_a_drained_replica_says_so_until_it_is_returned(two: RunningServer) -> None:
    assert httpx.post(f"{two.url}{PATH}/1/drain").json() == {"replica": 1, "num_requests": 0}
    assert [each["state"] for each in list_replicas(two)] == ["running", "drained"]
    assert 'cloister_replica_actions_total{action="drain"} 1.0' in httpx.get(f"{two.url}/metrics").text.splitlines()
    assert httpx.post(f"{two.url}{PATH}/1/return").status_code == 200
    assert [each["state"] for each in list_replicas(two)] == ["running", "running"]


@pytest.mark.parametrize("action", ["drain", "return"])
def test_an_index_of_thousands_of_digits_is_no_route(two: RunningServer, action: str, caplog: pytest.LogCaptureFixture) -> None:
    for index in ("7" * 19, "7" * 5000):
        assert check_error(httpx.post(f"{two.url}{PATH}/{index}/{action}"), 404)["code"] == "unknown_route"
    assert not caplog.records


@pytest.mark.parametrize("state", ["stalled", "lost", "starting", "suspicious"])
def test_the_last_replica_that_is_well_is_not_drained(two: RunningServer, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ReplicaStates._state
    monkeypatch.setattr(ReplicaStates, "_state", lambda self, index, is_so: state if index == 0 else own(self, index, is_so))
    error = check_error(httpx.post(f"{two.url}{PATH}/1/drain"), 400)
    assert f"replica 0 is {state}" in error["message"]
    assert [each["state"] for each in list_replicas(two)] == [state, "running"]
    assert httpx.post(f"{two.url}{PATH}/0/drain").status_code == 200  # it serves nobody as it is
    assert httpx.post(f"{two.url}{PATH}/0/return").status_code == 200


def test_a_slow_or_an_idle_replica_may_be_left(two: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ReplicaStates._state
    for state in ("slow", "idle"):
        monkeypatch.setattr(
            ReplicaStates, "_state", lambda self, i, is_so, state=state: state if i == 0 else own(self, i, is_so)
        )
        assert httpx.post(f"{two.url}{PATH}/1/drain").status_code == 200
        assert httpx.post(f"{two.url}{PATH}/1/return").status_code == 200


def test_statistics_of_a_request_name_the_replicas_that_had_it(two: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(
        HttpCalls, "_end_if_over", lambda self, call: lines.append(line_of(call)) if call.num_open == 0 else None
    )
    body = {"model": "history", "prompt": "a", "max_tokens": 1}
    for index in (0, 1):
        httpx.post(f"{two.url}{PATH}/{index}/drain")
        httpx.post(f"{two.url}/v1/completions", json=body)
        httpx.post(f"{two.url}{PATH}/{index}/return")
    found = [line["replicas"] for line in lines if line["route"] == "/v1/completions" and "replicas" in line]
    assert found[0] == [1]
    assert found[-1] == [0]


def test_one_engine_is_one_replica(client: httpx.Client) -> None:
    (only,) = client.get(PATH).json()["data"]
    assert (only["replica"], only["role"], only["state"]) == (0, "mixed", "running")
    assert "cloister_replica_state" not in client.get("/metrics").text


@pytest.mark.parametrize("profile", ["team", "private"])
def test_only_operators_see_replicas_and_a_strict_profile_shows_no_load(model_path: Path, profile: str) -> None:
    credentials, key = Credentials.empty().add("ann")
    credentials, operator_key = credentials.add("boss", is_operator=True)
    with served_by_two(model_path, make_gate(profile, credentials)) as server:
        refused = httpx.get(server.url + PATH, headers={"authorization": f"Bearer {key}"})
        assert "only an operator" in check_error(refused, 403)["message"]
        by_operator = {"authorization": f"Bearer {operator_key}"}
        found = httpx.get(server.url + PATH, headers=by_operator).json()["data"]
        assert [each["state"] for each in found] == ["running", "running"]
        assert [each["load"] is not None for each in found] == [profile == "team"] * 2
        shown = [httpx.get(f"{server.url}/metrics", headers=headers).text for headers in ({}, by_operator)]
        assert ["cloister_replica_" in text for text in shown] == [False, profile == "team"]


@pytest.mark.parametrize("what", ["update", "0/drain", "0/return"])
def test_a_command_takes_no_fields_and_does_nothing_if_it_has_some(two: RunningServer, what: str) -> None:
    error = check_error(httpx.post(f"{two.url}{PATH}/{what}", json={"weights": "new"}), 400)
    assert error["message"] == "This request takes no body and no fields; leave them out."
    assert httpx.get(two.url + PATH).json()["update"] is None
    assert [replica["state"] for replica in list_replicas(two)] == ["running", "running"]


@pytest.mark.parametrize("profile", ["team", "private"])
def test_only_operators_update_replicas_and_strict_profiles_refuse_it(model_path: Path, profile: str) -> None:
    credentials, key = Credentials.empty().add("ann")
    credentials, operator_key = credentials.add("boss", is_operator=True)
    with served_by_two(model_path, make_gate(profile, credentials)) as server:
        url = f"{server.url}{PATH}/update"
        for user, why in (
            (key, "only an operator"),
            *([(operator_key, "T6.closed-source.update")] if profile == "private" else []),
        ):
            headers = {"authorization": f"Bearer {user}"}
            for refused in (
                httpx.post(url, headers=headers),
                httpx.post(f"{url}_weights", json={"model": "cloister-5m"}, headers=headers),
            ):
                assert why in check_error(refused, 403)["message"]
        by_operator = httpx.post(url, headers={"authorization": f"Bearer {operator_key}"})
        if profile == "private":
            assert check_error(by_operator, 403)["message"].startswith("T6.closed-source.update.private")
        else:
            assert by_operator.json() == {"state": "running", "num_updated": 0, "num_replicas": 2, "error": None}


def test_the_command_line_updates_all_replicas_and_says_how_that_ended(
    model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served_by_two(model_path) as server:
        status, out, _ = run(capsys, "update", server.url)
        assert (status, out.splitlines()[-1]) == (0, "2 of 2 replicas have a new engine")
        assert httpx.get(server.url + PATH).json()["update"] == {
            "state": "done",
            "num_updated": 2,
            "num_replicas": 2,
            "error": None,
        }
        assert "update done, 2 of 2 replicas" in run(capsys, "status", server.url)[1]
        body = {"model": "history", "prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        httpx.post(f"{server.url}{PATH}/0/drain")
        assert run(capsys, "update", server.url)[0] == 0
        assert [each["state"] for each in list_replicas(server)] == ["drained", "running"]


def write_model_with(path: Path, source: Path, **tokenizer_config: object) -> Path:
    shutil.copytree(source, path)
    settings = json.loads((path / "tokenizer_config.json").read_text()) if (path / "tokenizer_config.json").exists() else {}
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, **tokenizer_config}))
    return path


def test_the_command_line_names_other_weights_and_answers_say_which_they_are_of(
    model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"model": "history", "prompt": "a", "max_tokens": 3}
    chat = {"model": "history", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    with served_by_two(model_path) as server:

        def ask(route: str, body: dict[str, object]) -> tuple[str, str]:
            reply = httpx.post(f"{server.url}/v1/{route}", json=body).json()
            (choice,) = reply["choices"]
            return reply["system_fingerprint"], choice.get("text") or choice["message"]["content"]

        assert ask("completions", body)[1] == "oko"
        new = write_model_with(tmp_path / "new", model_path)
        status, out, _ = run(capsys, "update", server.url, "--model", str(new))
        assert (status, out.splitlines()[-1]) == (0, "2 of 2 replicas have a new engine")
        assert ask("completions", body) == ("weights 1", "new")
        assert ask("chat/completions", chat) == ("weights 1", "new")
        lines = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": True}).text.splitlines()
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert {piece["system_fingerprint"] for piece in pieces} == {"weights 1"}
        assert 'fingerprint="weights 1"' in httpx.get(f"{server.url}/metrics").text
        status, _, err = run(capsys, "update", server.url, "--model", str(new))  # they are served already
        assert status == 1
        assert "the same weights and formats as the others" in err


def test_weights_that_are_not_here_or_read_text_otherwise_are_refused_before_anything_starts(
    model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_model_with(tmp_path / "other", model_path, add_bos_token=True)
    (other / "chat_template.jinja").write_text("{{ messages }}!")
    with served_by_two(model_path) as server:
        err = " ".join(run(capsys, "update", server.url, "--model", str(other))[2].split())
        assert "has another tokenizer and another chat template than the served model" in err
        assert "there is no model 'nowhere'" in run(capsys, "update", server.url, "--model", "nowhere")[2]
        error = check_error(httpx.post(f"{server.url}{PATH}/update_weights", json={"weights": "new"}), 400)
        assert "`model` is missing" in error["message"]
        assert httpx.get(server.url + PATH).json()["update"] is None


def test_ctrl_c_ends_the_command_and_not_the_update(
    model_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster, "time", SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
    with served_by_two(model_path) as server:
        status, out, _ = run(capsys, "update", server.url)
        assert (status, "the update continues in the server" in out) == (130, True)
        wait_until(lambda: httpx.get(server.url + PATH).json()["update"]["state"] == "done")


def test_a_single_engine_is_not_updated(client: httpx.Client) -> None:
    assert "one engine" in check_error(client.post(f"{PATH}/update"), 400)["message"]


def test_the_command_line_lists_drains_and_returns_replicas(two: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "drain", "0", two.url)
    assert (status, out) == (0, "replica 0 is drained\n")
    status, out, _ = run(capsys, "status", two.url)
    assert status == 0
    (first,) = [line for line in out.splitlines() if "drained" in line]
    assert "mixed" in first
    assert "running" in out
    assert "2 or more is slow" in out
    status, out, _ = run(capsys, "status", two.url, "--json")
    assert [each["state"] for each in json.loads(out)["data"]] == ["drained", "running"]
    status, out, err = run(capsys, "drain", "1", two.url)
    assert status == 1
    assert err == "error: no other replica is left; return a drained one first\n"
    assert run(capsys, "return", "0", two.url)[:2] == (0, "replica 0 gets requests again\n")
    assert run(capsys, "return", "0", two.url)[:2] == (0, "replica 0 was not drained: it gets requests as before\n")
    assert [each["state"] for each in list_replicas(two)] == ["running", "running"]


def test_the_command_line_says_what_is_wrong(
    two: RunningServer, model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for address, what in (
        ("http://127.0.0.1:9", "no server answers at"),
        ("here", "http://127.0.0.1:8000"),
        ("localhost:80", "give http://localhost:80,"),
    ):
        status, _, err = run(capsys, "status", address)
        assert (status, err.count("\n")) == (1, 1)
        assert what in err
    credentials, key = Credentials.empty().add("boss", is_operator=True)
    with served_by_two(model_path, make_gate("team", credentials)) as server:
        for wrong in ("", "the key is\nclo-abc\n"):
            file = tmp_path / "wrong"
            file.write_text(wrong)
            assert "does not hold an API key" in run(capsys, "status", server.url, "--api-key-file", str(file))[2]
        assert "--api-key-file" in run(capsys, "status", server.url)[2]
        file = tmp_path / "key"
        file.write_text(f"{key}\n")
        assert "running" in run(capsys, "status", server.url, "--api-key-file", str(file))[1]


def test_the_command_line_tells_a_busy_server_from_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "DRAIN_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as busy:  # its kernel accepts
        url = f"http://127.0.0.1:{busy.getsockname()[1]}"
        status, _, err = run(capsys, "drain", "0", url)
    assert (status, err) == (
        1,
        f"error: the server at {url} did not answer within 0.2 s; it may be busy, so try again in a moment\n",
    )


def test_the_command_line_says_that_a_sealed_node_has_no_interface_for_operators(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(Starlette(routes=[Route("/health", HealthEndpoint())], exception_handlers=handlers())) as url:
        for command in (("status",), ("drain", "0"), ("return", "0"), ("update",)):
            status, _, err = run(capsys, *command, url)
            assert (status, err.count("\n")) == (1, 1)
            assert "is a sealed node, or its gateway or relay; these have no operator's interface" in err


def test_a_table_without_load_says_that_the_profile_withholds_it(
    model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    credentials, key = Credentials.empty().add("boss", is_operator=True)
    file = tmp_path / "key"
    file.write_text(key)
    with served_by_two(model_path, make_gate("private", credentials)) as server:
        status, out, err = run(capsys, "status", server.url, "--api-key-file", str(file))
    assert status == 0
    assert out.count("running") == 2
    assert "the server's profile hides the load of its replicas" in err


def test_requests_with_one_prompt_cache_key_go_to_one_replica(model_path: Path) -> None:
    numbers = itertools.count()
    with served_by_two(model_path, router="prefix_aware") as server:

        def ask_some(path: str, prompt_cache_key: str | None = None) -> set[int]:
            """Sends prompts that have nothing in common; returns which replicas got them."""
            before = [each["load"]["num_routed"] for each in list_replicas(server)]
            for _ in range(10):
                text = f"{next(numbers)} " * 20
                prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
                body = {"input": text} if "responses" in path else {**prompt, "max_tokens": 1}
                reply = httpx.post(server.url + path, json={**body, "prompt_cache_key": prompt_cache_key})
                assert reply.status_code == 200, reply.text
            return {each["replica"] for each in list_replicas(server) if each["load"]["num_routed"] > before[each["replica"]]}

        assert ask_some("/v1/completions") == {0, 1}
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            [home] = ask_some(path, f"a conversation over {path}")
            assert ask_some(path, f"a conversation over {path}") == {home}
