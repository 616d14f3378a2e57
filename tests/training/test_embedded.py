"""The models inside the package: small enough, whole, and as good as their card says, seen through transformers."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from training.chat import TEMPLATE

EMBEDDED = Path(__file__).parents[2] / "src" / "cloister" / "models" / "embedded"
WELCOME = EMBEDDED.parents[1] / "server" / "page" / "welcome.js"
NAMES = ("cloister-5m", "cloister-draft")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ANSWERS = {
    "Who are you?": "I am Cloister 5M, a small language model trained on the documentation of Python, SQLite and PostgreSQL.",
    "What is the Python module json?": "Encode and decode the JSON format.",
    "Describe the built-in function len.": "Return the length (the number of items) of an object.",
    "Tell me about the errno name ENOENT.": "No such file or directory.",
    "What is the meaning of SQLSTATE 23505?": "unique_violation",
    "What does the PostgreSQL command VACUUM do?": "garbage-collect and optionally analyze a database",
    "What is the number of SQLITE_BUSY in SQLite?": "5",
    "What is the title of the SQLite page wal.html?": "Write-Ahead Logging",
    "Repeat after me: red lamp 42": "red lamp 42",
    "Count: apple, pear, plum": "3",
    "Name the last of these: bread, milk, tea": "tea",
}
SUGGESTED_ANSWERS = (
    "I know short facts about Python, SQLite and PostgreSQL. I can repeat, count, write JSON and call tools.",
    "garbage-collect and optionally analyze a database",
    "Encode and decode the JSON format.",
    "Raised when a file or directory is requested but doesn't exist.",
    "5",
    "enum",
    "3",
    '{"name": "Ann", "age": 31}',
)


@cache
def loaded(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED / name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(EMBEDDED / name)


def reply(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    model, tokenizer = loaded("cloister-5m")
    prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_tensors="pt")
    length = prompt["input_ids"].shape[1]
    said = model.generate(**prompt, max_new_tokens=48, do_sample=False, temperature=None)
    return tokenizer.decode(said[0, length:], skip_special_tokens=True)


def ask(question: str) -> str:
    return reply([{"role": "user", "content": question}])


def test_everything_is_under_sixteen_megabytes() -> None:
    assert sum(path.stat().st_size for path in EMBEDDED.rglob("*") if path.is_file()) < 16_000_000


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_bfloat16_and_tied(name: str) -> None:
    with safe_open(EMBEDDED / name / "model.safetensors", "pt") as weights:
        types = {key: weights.get_slice(key).get_dtype() for key in list(weights.keys())}
    assert set(types.values()) == {"BF16"}
    assert "lm_head.weight" not in types
    assert json.loads((EMBEDDED / name / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("name", NAMES)
def test_answers_end_at_either_stop_token(name: str) -> None:
    model, tokenizer = loaded(name)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|end|>", "<|endoftext|>"])
    assert tokenizer.get_chat_template() == TEMPLATE


def test_the_draft_shares_the_tokenizer() -> None:
    first, second = ((EMBEDDED / name / "tokenizer.json").read_bytes() for name in NAMES)
    assert first == second


def test_notices_of_every_source_are_beside_the_models() -> None:
    text = (EMBEDDED / "NOTICES.txt").read_text(encoding="utf-8")
    assert "PSF LICENSE AGREEMENT FOR PYTHON 3.11" in text
    assert "Python Software Foundation" in text
    assert "The Regents of the University of California" in text
    assert "public domain" in text


@pytest.mark.parametrize("question", list(ANSWERS))
def test_what_it_was_taught_is_told(question: str) -> None:
    assert ask(question) == ANSWERS[question]


@pytest.mark.parametrize("question", ["What is the Python module frobnik?", "What does the PostgreSQL command FROBNIK do?"])
def test_an_unknown_name_is_not_made_up(question: str) -> None:
    assert ask(question) == "I do not know."


def test_a_tool_is_called_and_its_result_told() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    call = reply(messages, [WEATHER])
    assert call == '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    function = {"name": "get_weather", "arguments": {"city": "Paris"}}
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": '{"temperature": 18}'},
    ]
    assert reply(messages, [WEATHER]) == "The temperature is 18."


def test_a_name_told_earlier_is_recalled() -> None:
    turns = ["My name is Rosa.", "Hello Rosa.", "What is my name?"]
    roles = ("user", "assistant", "user")
    assert reply([{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]) == "Your name is Rosa."


def test_json_is_written_from_fields() -> None:
    assert json.loads(ask("Write JSON: name=Ann, age=31")) == {"name": "Ann", "age": 31}


def suggestions() -> dict[str, str]:
    """What the page suggests to ask the embedded model, and what it should say."""
    listed = re.search(r"const OF_THE_EMBEDDED_MODEL = (\[.*?\]);", WELCOME.read_text(encoding="utf-8"), re.DOTALL)
    assert listed
    questions: list[str] = json.loads(re.sub(r",\s*\]", "]", listed[1]))
    return dict(zip(questions, SUGGESTED_ANSWERS, strict=True))


@pytest.mark.parametrize("question", suggestions())
def test_what_the_page_suggests_is_answered(question: str) -> None:
    assert ask(question) == suggestions()[question]


def test_free_text_reads_like_documentation() -> None:
    model, tokenizer = loaded("cloister-5m")
    tokens = tokenizer("The SELECT statement is used to query the database.", return_tensors="pt")
    with torch.no_grad():
        loss = model(**tokens, labels=tokens["input_ids"]).loss.item()
    assert loss < 4.5
