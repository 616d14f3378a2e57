"""Several models from one file: each answers under its name, one at a time in memory."""

import asyncio

import httpx
import pytest

from cloister.launch import resolve_settings
from cloister.types.errors import ConfigError
from tests.serving import ServeProcess, find_processes

FILE = """
kv_memory_mb = 32
num_threads = 1

[models.facts]
model = "cloister-5m"

[models.draft]
model = "cloister-draft"
max_model_len = 512
"""
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "models.toml"
    path.write_text(FILE)
    running = ServeProcess("--config", str(path))
    yield running
    status, _ = running.stop()
    assert status == 0


def ask(server: ServeProcess, **fields: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json={**HELLO, **fields}, timeout=300)


def test_each_model_answers_under_its_name_and_the_other_leaves_memory(server):
    prints = {}
    for name in ("facts", "draft", "facts"):
        reply = ask(server, model=name).json()
        assert reply["model"] == name
        assert prints.setdefault(name, reply["system_fingerprint"]) == reply["system_fingerprint"]
        assert [len(find_processes(server.process.pid, kind)) for kind in ("engine", "template")] == [1, 1]
    assert len(set(prints.values())) == 2


def test_a_request_that_names_none_goes_to_the_one_in_memory(server):
    ask(server, model="draft")
    assert ask(server).json()["model"] == "draft"


def test_all_are_listed_and_one_that_was_loaded_says_its_length(server):
    ask(server, model="draft")
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [(model["id"], model["root"]) for model in listed] == [("facts", "cloister-5m"), ("draft", "cloister-draft")]
    assert listed[1]["max_model_len"] == 512
    assert httpx.get(f"{server.url}/v1/models/facts").json()["id"] == "facts"


def test_questions_about_models_take_get_only_and_count_for_their_route(server):
    for path in ("/v1/models", "/v1/models/facts"):
        assert httpx.delete(f"{server.url}{path}").status_code == 405
    assert httpx.get(f"{server.url}/v1/models/draft").status_code == 200
    assert 'http_replies_total{route="/v1/models/{model_id:path}",status="200"}' in httpx.get(f"{server.url}/metrics").text


def test_an_unknown_name_is_refused_and_changes_nothing(server):
    ask(server, model="facts")
    reply = ask(server, model="secret-name")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert "secret-name" not in reply.text
    assert ask(server).json()["model"] == "facts"


def test_a_storm_for_both_gets_every_answer(server):
    async def storm() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            names = ["facts", "draft"] * 8
            return await asyncio.gather(*(client.post("/v1/chat/completions", json={**HELLO, "model": name}) for name in names))

    replies = asyncio.run(storm())
    assert [reply.json()["model"] for reply in replies] == ["facts", "draft"] * 8


@pytest.mark.parametrize(
    ("body", "code"), [(b"{", "invalid_json"), (b'{"model": "facts", "x": ' + b"[" * 100_000, "too_many_parts")]
)
def test_a_body_that_cannot_be_read_is_a_clear_error(server, body, code):
    reply = httpx.post(f"{server.url}/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('model = "cloister-5m"\n[models.a]\nmodel = "cloister-5m"\n', "model"),
        ('[models.a]\nquant = "int8"\n', "no model"),
        ('[models.a]\nmodel = "x"\nprofile = "open"\n', "profile"),
        ('[models.a]\nmodel = "x"\nport = 1\n', "port"),
        ('models = ["a"]\n', "tables"),
    ],
)
def test_a_file_that_makes_no_sense_says_so(tmp_path, text, said):
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        resolve_settings(config_file=path)


def test_the_table_of_one_model_may_have_groups(tmp_path):
    path = tmp_path / "models.toml"
    path.write_text('[models.a.model]\nmodel = "cloister-5m"\n[models.a.memory]\nblock_size = 8\n')
    assert resolve_settings(config_file=path).models["a"].config.block_size == 8


def test_only_a_server_takes_several_models(tmp_path):
    path = tmp_path / "models.toml"
    path.write_text(FILE)
    with pytest.raises(ConfigError, match="serve"):
        resolve_settings(config_file=path, listens=False)


def test_ollamas_clients_find_all_of_them_and_ask_for_one_by_its_tag(server):
    listed = httpx.get(f"{server.url}/api/tags").json()["models"]
    assert [model["name"] for model in listed] == ["facts", "draft"]
    assert all(len(model["digest"]) >= 12 for model in listed)  # `ollama list` shows the first twelve
    body = {"model": "draft:latest", "messages": HELLO["messages"], "stream": False, "options": {"num_predict": 3}}
    reply = httpx.post(f"{server.url}/api/chat", json=body, timeout=300).json()
    assert (reply["model"], reply["eval_count"]) == ("draft", 3)
    assert [model["name"] for model in httpx.get(f"{server.url}/api/ps").json()["models"]] == ["draft"]
    shown = httpx.post(f"{server.url}/api/show", json={"model": "draft"}, timeout=300).json()
    assert shown["model_info"]["general.parameter_count"] > 100_000
    assert shown["details"]["parameter_size"].endswith(("K", "M"))
