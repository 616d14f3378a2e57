"""Grammars of forced calls: a model that chooses tokens at random writes calls that the family's parser reads."""

import json
import random

import jsonschema
import numpy as np
import pytest

from cloister.text import Tokenizer
from cloister.text.answer_parser import AnswerForm, AnswerParser
from cloister.text.grammar import GrammarCompiler
from cloister.text.parts import ParsedOutput
from cloister.text.tools import FAMILIES, Tool
from cloister.text.tools.base import literal
from cloister.types.request import Grammar, GrammarKind
from tests.text import models
from tests.thinning import cover

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "at": {"type": "array", "items": {"$ref": "#/$defs/hour"}, "maxItems": 3},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
}
PING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [Tool("weather", WEATHER), Tool("ping.host-2", PING)]


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    """A tokenizer in which the families' marks are letters, or control tokens."""
    config = {}
    if request.param:
        families = [FAMILIES.get(name) for name in FAMILIES.names()]
        marks = sorted({mark for family in families for mark in (*family.marks, *family.inner_marks)})
        start = Tokenizer(models.byte_level(tmp_path_factory.mktemp("plain"))).vocab_size
        config["added_tokens_decoder"] = {
            str(start + i): {"content": mark, "special": True, "normalized": False} for i, mark in enumerate(marks)
        }
    tokenizer = Tokenizer(models.byte_level(tmp_path_factory.mktemp("model"), **config))
    eos = tokenizer.token_id("<|im_end|>")
    return tokenizer, GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[eos]), eos


def write_at_random(model, source, chance, max_tokens=400):
    """Returns what a model without any knowledge writes under a grammar; None if it came to no end."""
    tokenizer, compiler, eos = model
    matcher = compiler.compile(Grammar(GrammarKind.LARK, source))
    mask = np.zeros((tokenizer.vocab_size + 31) // 32, np.uint32)
    text = b""
    for _ in range(max_tokens):
        if matcher.is_complete:
            return text.decode()
        assert matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: tokenizer.vocab_size])
        ending = [i for i in allowed if tokenizer.token_bytes(int(i))[:1] in (b'"', b"}", b"]", b"<")]
        token_id = int(chance.choice(ending if ending and chance.random() < 0.5 else allowed))
        if token_id == eos:
            return text.decode()
        assert matcher.accept([token_id])
        text += tokenizer.token_bytes(token_id)
    return None


def spell_for(tokenizer):
    def spell(mark):
        token_id = tokenizer.token_id(mark)
        return f"<[{token_id}]>" if token_id in tokenizer.special.control_ids else literal(mark)

    return spell


@pytest.mark.parametrize(
    ("model", "family", "is_one"), cover([False, True], FAMILIES.names(), [True, False]), indirect=["model"]
)
def test_whatever_is_chosen_under_the_grammar_is_calls_that_follow_their_schemas(model, family, is_one):
    source = FAMILIES.get(family).grammar(TOOLS, spell_for(model[0]), is_one=is_one)
    chance = random.Random(f"{family} {is_one}")
    tools = {tool.name: tool for tool in TOOLS}
    num_read = 0
    for _ in range(30):
        text = write_at_random(model, source, chance)
        if text is None:
            continue
        num_read += 1
        answer, parser = ParsedOutput(), AnswerParser(AnswerForm(family=FAMILIES.get(family), tools=tools))
        answer.add(parser.push(text) + parser.flush())
        assert answer.text == "", text
        assert len(answer.calls) == 1 if is_one else answer.calls
        for call in answer.calls.values():
            jsonschema.validate(json.loads(call.arguments), tools[call.name].parameters)
        if num_read == 5:
            break
    assert num_read > 2
