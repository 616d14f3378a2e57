"""Answers with a form over HTTP, by the embedded model: valid whatever it would rather say, or a 400 that names the field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import jsonschema
import openai
import pydantic
import pytest

from cloister.engine import EngineClient, ThreadTransport
from cloister.launch import build_engine
from cloister.models import locate
from cloister.types.config import EngineConfig
from tests.server.running_server import RunningServer, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = {"messages": [{"role": "user", "content": "Invent a person."}], "max_tokens": 600, "temperature": 1}
"""One answer in some hundred likes white space so much that it takes more than 200 tokens."""
SECRET = "zanzibar"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    async def start() -> EngineClient:
        config = EngineConfig(model="cloister-5m", num_threads=1, kv_memory_mb=64)
        engine = EngineClient(ThreadTransport(build_engine(config)), config)
        await engine.start()
        return engine

    with serving(Path(locate("cloister-5m")), start) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=300) as client:
        yield client


def ask(client: httpx.Client, **fields: object) -> list[str]:
    """Returns the texts of a chat that must end by itself."""
    reply = client.post(CHAT, json=ASK | fields)
    assert reply.status_code == 200, reply.text
    choices = reply.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["message"]["content"] for choice in choices]


def json_schema(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": json_schema(PERSON)},
        {"structured_outputs": {"json": PERSON}},
        {"structured_outputs": {"json": json.dumps(PERSON)}},
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_schema_holds_whichever_field_brings_it(client, fields):
    for text in ask(client, n=4, **fields):
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": r"\d{3}-[a-z]{2}"}, r"\d{3}-[a-z]{2}"),
        ({"structured_outputs": {"regex": "x{5,9}"}}, "x{5,9}"),
        ({"guided_choice": ["red", "dark green"]}, "red|dark green"),
        ({"structured_outputs": {"choice": ["größe"]}}, "größe"),
        ({"guided_grammar": 'start: "a" "b"+ "c"\n'}, "ab+c"),
        ({"structured_outputs": {"grammar": 'start: /[0-9]{4}/ "!"'}}, "[0-9]{4}!"),
        ({"grammar": 'root ::= "yes" | "no" digit\ndigit ::= [0-9]'}, "yes|no[0-9]"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_other_forms_hold(client, fields, pattern):
    for text in ask(client, n=3, **fields):
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_object_will_do(client, fields):
    reply = client.post(CHAT, json=ASK | {"temperature": 0, **fields}).json()["choices"][0]
    assert reply["finish_reason"] == "length" or isinstance(json.loads(reply["message"]["content"]), dict)


def test_the_form_text_is_no_form(client):
    free, text = (ask(client, temperature=0, response_format=form) for form in (None, {"type": "text"}))
    assert free == text


def test_completions_have_forms_too(client):
    body = {"prompt": ["A number: ", "Another: "], "n": 2, "max_tokens": 20, "guided_regex": "[0-9]{3}", "echo": True}
    reply = client.post(TEXT, json=body)
    texts = [choice["text"] for choice in reply.json()["choices"]]
    assert len(texts) == 4
    assert all(re.fullmatch("(A number|Another): [0-9]{3}", text) for text in texts)


def test_a_schema_needs_no_name(client):
    fields = {"response_format": json_schema(PERSON), "seed": 3}
    named = ask(client, **fields)
    fields["response_format"]["json_schema"].pop("name")
    assert ask(client, **fields) == named


def test_a_stream_is_the_same_answer(client):
    fields = {"response_format": json_schema(PERSON), "seed": 3}
    (whole,) = ask(client, **fields)
    streamed = ""
    with client.stream("POST", CHAT, json=ASK | fields | {"stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                streamed += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    assert streamed == whole


def test_greedy_seeds_bias_and_logprobs_combine(client):
    form = {"response_format": json_schema(PERSON)}
    assert ask(client, temperature=0, **form) == ask(client, temperature=0, **form)
    assert ask(client, seed=5, **form) == ask(client, seed=5, **form)
    body = ASK | form | {"logprobs": True, "top_logprobs": 2, "logit_bias": {"98": -100}, "top_p": 0.9, "top_k": 20}
    choice = client.post(CHAT, json=body).json()["choices"][0]
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == choice["message"]["content"]


def test_a_cut_says_length(client):
    reply = client.post(CHAT, json=ASK | {"response_format": json_schema(PERSON), "max_tokens": 3})
    assert reply.json()["choices"][0]["finish_reason"] == "length"


def test_the_openai_package_parses_its_own_models(server):
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=20)
        age: int = pydantic.Field(ge=0, le=130)
        nickname: str | None = pydantic.Field(max_length=5)

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        reply = api.chat.completions.parse(
            model="cloister-5m", messages=[{"role": "user", "content": "Who?"}], response_format=Person, max_tokens=200, seed=1
        )
    assert isinstance(reply.choices[0].message.parsed, Person)


def test_many_forms_at_once_do_not_disturb_each_other(server):
    import concurrent.futures

    def one(number: int) -> bool:
        with httpx.Client(base_url=server.url, timeout=300) as client:
            (text,) = ask(client, guided_regex=f"{number}-[a-z]{{5}}")
            return re.fullmatch(f"{number}-[a-z]{{5}}", text) is not None

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(24)))


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": json_schema({"not": {}})}, "response_format.json_schema.schema", "`not`"),
        ({"response_format": json_schema({"properties": {SECRET: {"if": {}}}})}, "response_format.json_schema.schema", "`if`"),
        ({"response_format": json_schema({SECRET: 1})}, "response_format.json_schema.schema", "unknown keyword"),
        ({"response_format": json_schema({"multipleOf": 99_999_989})}, "response_format.json_schema.schema", "`multipleOf`"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": {"type": "text", "json_schema": {"name": "a"}}}, "response_format.json_schema", "only there"),
        ({"response_format": {"type": SECRET}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, "response_format.json_schema.name", ""),
        ({"guided_json": {"uniqueItems": True}}, "guided_json", "`uniqueItems`"),
        ({"guided_json": "{" + SECRET}, "guided_json", "not valid JSON"),
        ({"guided_regex": f"(?={SECRET})"}, "guided_regex", "looks around"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "too large"),
        ({"guided_choice": []}, "guided_choice", "choices"),
        ({"guided_choice": ["", SECRET]}, "guided_choice", "none of them empty"),
        ({"guided_grammar": f"start: {SECRET}"}, "guided_grammar", "rule"),
        ({"guided_grammar": "start: <|end|>"}, "guided_grammar", "special tokens"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "regular expression"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "one of them"),
        ({"grammar": "a", "response_format": {"type": "json_object"}}, "grammar", "one of them"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_what_cannot_be_followed_is_a_400_that_names_the_field(client, route, fields, param, words):
    body = {"messages": ASK["messages"]} if route == CHAT else {"prompt": "a"}
    reply = client.post(route, json=body | fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert SECRET not in reply.text


def test_a_hostile_form_holds_nobody_up(client):
    """Its request may fail, by its own fault, and others are answered."""
    hostile = {"type": "string", "pattern": "^((((a{1,100}){1,100}){1,100}){1,100}){1,100}$"}
    reply = client.post(CHAT, json=ASK | {"response_format": json_schema(hostile)})
    assert reply.status_code in (200, 400), reply.text
    assert ask(client, guided_choice=["fine"]) == ["fine"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_inside_a_character_ends_with_the_one_before(client: httpx.Client, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "é漢字"}}}
    cut_inside = 0
    for num_tokens in range(1, 14):
        body = ASK | {"max_tokens": num_tokens, "response_format": form, "stream": stream, "logprobs": True}
        reply = client.post(CHAT, json=body)
        assert reply.status_code == 200, reply.text
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines] if stream else reply.json()["choices"]
        text = "".join((choice.get("delta") or choice.get("message") or {}).get("content") or "" for choice in choices)
        entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        said = bytes(byte for entry in entries for byte in entry["bytes"])
        assert '"é漢字"'.startswith(text)
        assert text == said.decode("utf-8", "ignore")
        cut_inside += text.encode() != said
    assert cut_inside > 0


def test_a_schema_of_a_response_needs_no_name(client: httpx.Client) -> None:
    schema = {"enum": ["yes", "no"]}
    body = {"input": "Yes or no?", "max_output_tokens": 20, "text": {"format": {"type": "json_schema", "schema": schema}}}
    reply = client.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["text"]["format"]["name"] == "answer"
    assert json.loads(reply.json()["output"][0]["content"][0]["text"]) in ("yes", "no")
