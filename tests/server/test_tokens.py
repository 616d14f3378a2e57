"""/tokenize, /detokenize and /version."""

from __future__ import annotations

import httpx
import pytest

import cloister
from tests.server.running_server import MODEL, ScriptedEngine, says, serving_script, write_model

HELLO = {"role": "user", "content": "Grüße"}


def post(client, path, **fields):
    reply = client.post(path, json=fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_text_is_its_tokens(client):
    answer = post(client, "/tokenize", model=MODEL, prompt="Grüße")
    assert answer == {"count": 7, "max_model_len": 256, "tokens": list("Grüße".encode()), "token_strs": None}


def test_tokens_can_be_named(client):
    answer = post(client, "/tokenize", prompt="aü", return_token_strs=True)
    assert answer["token_strs"] == ["a", "\ufffd", "\ufffd"]


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    """A client of a server whose template has a switch for the beginning of the answer, as most have."""
    path = write_model(tmp_path_factory.mktemp("prompted"))
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    (path / "chat_template.jinja").write_text(template)
    (path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    with serving_script(path, ScriptedEngine(says("x"))) as server, httpx.Client(base_url=server.url) as client:
        yield client


@pytest.mark.parametrize(("fields", "end"), [({}, "assistant:"), ({"add_generation_prompt": False}, "")])
def test_a_chat_is_rendered_first(prompted, fields, end):
    answer = post(prompted, "/tokenize", messages=[HELLO], **fields)
    assert bytes(answer["tokens"]).decode() == f"user: Grüße\n{end}"


def test_tokens_become_text_again_with_control_tokens_in_it(client):
    answer = post(client, "/detokenize", model=MODEL, tokens=[*"Grüße".encode(), 256])
    assert answer == {"prompt": "Grüße<eos>", "content": "Grüße<eos>"}
    assert post(client, "/detokenize", tokens=[]) == {"prompt": "", "content": ""}


def test_a_text_may_be_called_content_as_clients_of_llamacpp_do(client):
    assert post(client, "/tokenize", content="Grüße")["tokens"] == list("Grüße".encode())
    assert post(client, "/tokenize", content="a<eos>")["tokens"] == [97, 256]
    assert post(client, "/tokenize", content="a<eos>", parse_special=False)["tokens"] == list(b"a<eos>")
    pieces = post(client, "/tokenize", content="aü", add_special=False, with_pieces=True)["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xBC, "piece": [0xBC]}]


def test_content_has_the_tokens_around_a_text_only_where_they_are_asked_for(tmp_path):
    path = write_model(tmp_path)
    (path / "tokenizer_config.json").write_text('{"bos_token": "<eos>", "add_bos_token": true}')
    with serving_script(path, ScriptedEngine(says("x"))) as server, httpx.Client(base_url=server.url) as client:
        assert post(client, "/tokenize", content="a")["tokens"] == [97]
        assert post(client, "/tokenize", content="a", add_special=True)["tokens"] == [256, 97]


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [HELLO]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"prompt": 1}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "a"}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "with_pieces": True}, 400, "with_pieces"),
        ("/tokenize", {"messages": [HELLO], "parse_special": True}, 400, "parse_special"),
        ("/tokenize", {"content": "a", "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [257]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_what_has_no_meaning_is_refused_by_its_field(client, path, fields, status, param):
    reply = client.post(path, json=fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


def test_the_ends_of_a_text_are_told_where_there_are_some(client, prompted):
    none = {"bos_token": None, "eos_token": None, "vocab_size": 257, "max_model_len": 256}
    assert client.get("/tokenizer_info").json() == none
    assert prompted.get("/tokenizer_info").json() == {**none, "eos_token": "<eos>"}


def test_the_version_is_the_packages(client):
    assert client.get("/version").json() == {"version": cloister.__version__}
