"""One BOS, also where template, user and tokenizer all write it; for each form that a tokenizer comes in."""

from pathlib import Path

import pytest

from cloister.text import ChatTemplate, Tokenizer
from tests.text import models
from tests.text.test_gguf import to_gguf
from tests.text.test_sentencepiece import LLAMA, train, write

TEMPLATE = "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"


@pytest.fixture(params=["tokenizer.json", "tokenizer.model", "GGUF"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "tokenizer.json":
        return models.sentence_piece(tmp_path, chat_template=TEMPLATE)
    if request.param == "tokenizer.model":
        return write(tmp_path, train("bpe", **LLAMA), chat_template=TEMPLATE)
    return to_gguf(models.sentence_piece(tmp_path / "model"), lambda writer: writer.add_chat_template(TEMPLATE))


def test_a_template_that_writes_bos_gets_no_second_one(path: Path) -> None:
    tokenizer, template = Tokenizer(path), ChatTemplate.load(path)
    ids = tokenizer.encode(template.render([{"role": "user", "content": "the model"}]))
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


def test_a_prompt_that_begins_with_bos_gets_no_second_one(path: Path) -> None:
    tokenizer = Tokenizer(path)
    once = tokenizer.encode("the model", add_special_tokens=True)
    assert once[0] == tokenizer.bos_token_id
    assert tokenizer.encode("<s>the model", add_special_tokens=True) == once


@pytest.mark.parametrize(("adds_bos", "adds_eos"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("form", ["tokenizer.json", "tokenizer.model"])
def test_the_config_says_what_is_put_around_a_prompt(form: str, adds_bos: bool, adds_eos: bool, tmp_path: Path) -> None:
    config = {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
    if form == "tokenizer.json":
        path = models.sentence_piece(tmp_path, **config)
    else:
        path = write(tmp_path, train("bpe", **LLAMA), **config)
    tokenizer = Tokenizer(path)
    plain = tokenizer.encode("the model")
    assert tokenizer.encode("the model", add_special_tokens=True) == [1] * adds_bos + plain + [2] * adds_eos
