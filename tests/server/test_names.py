"""Under which paths and names the model is found."""

import httpx
import pytest

from cloister.types.config import ServerConfig
from tests.server.running_server import MODEL, serving, start_speaking

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(model_path):
    config = ServerConfig(port=0, served_model_name="server, org/alias")
    with (
        serving(model_path, lambda: start_speaking(model_path), config=config) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        yield client


def test_every_name_is_listed_and_answers_under_itself(client):
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["server", "org/alias"]
    for name in ("server", "org/alias"):
        assert client.get(f"/v1/models/{name}").json()["id"] == name
        reply = client.post("/v1/chat/completions", json={"model": name, "messages": HELLO, "max_tokens": 1})
        assert reply.json()["model"] == name


def test_a_request_without_a_name_is_answered_under_the_first(client):
    assert client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1}).json()["model"] == "server"


def test_the_models_own_name_is_not_served_beside_others(client):
    reply = client.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses"])
def test_a_base_url_without_v1_works_too(client, path):
    asked = {"messages": HELLO} if "chat" in path else {"prompt": "a"} if path == "/completions" else {"input": "a"}
    whole, short = (client.post(prefix + path, json=asked).json() for prefix in ("/v1", ""))
    assert short["object"] == whole["object"]
    assert short["model"] == "server"


def test_the_list_of_models_is_there_without_v1(client):
    assert client.get("/models").json() == client.get("/v1/models").json()


def test_other_paths_keep_their_place(client):
    assert client.get("/policy").status_code == 404
