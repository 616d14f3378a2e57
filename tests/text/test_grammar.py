"""Grammars of answers: what is compiled lets nothing else pass, and what cannot be followed is refused by name."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cloister.models import locate
from cloister.text import Tokenizer
from cloister.text.grammar import GrammarCompiler, check_grammar, check_schema
from cloister.types.errors import InvalidRequestError
from cloister.types.request import Grammar, GrammarKind
from tests.thinning import examples

SCHEMAS = json.loads((Path(__file__).parents[2] / "benchmarks" / "structured_schemas.json").read_text(encoding="utf-8"))
SECRET = "zanzibar"
EOS = (1, 0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(locate("cloister-5m"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=4096, eos_token_ids=EOS)


def schema_grammar(schema: object) -> Grammar:
    return check_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), "schema")


def allowed(mask) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


class TooMuchWorkError(Exception):
    """The matcher gave up, as it may by its limits."""


def walk(compiler: GrammarCompiler, grammar: Grammar, seed: int, max_tokens: int = 400) -> tuple[list[int], bool]:
    """Returns tokens drawn evenly among those that may follow, and whether they are whole; ends as soon as it may."""
    matcher = compiler.compile(grammar)
    mask = np.zeros(compiler.num_words, np.uint32)
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        if not matcher.fill(mask):
            raise TooMuchWorkError
        ids = allowed(mask)
        assert ids, "a dead end"
        if ids[0] in EOS:
            assert set(ids) >= set(EOS), "every end token ends an answer"
            return tokens, True
        tokens.append(int(rng.choice(ids)))
        assert matcher.accept([tokens[-1]])
        if matcher.is_complete:
            return tokens, True
    return tokens, False


def fits(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether a text is a whole answer, cut into tokens as the tokenizer cuts it."""
    matcher = compiler.compile(grammar)
    mask = np.zeros(compiler.num_words, np.uint32)
    for token in tokenizer.encode(text, parse_special=False):
        assert matcher.fill(mask)
        if token not in allowed(mask):
            return False
        assert matcher.accept([token])
    if matcher.is_complete:
        return True
    assert matcher.fill(mask)
    return EOS[0] in allowed(mask)


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_a_schema_lets_pass_is_valid(compiler, tokenizer, name):
    validator = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    num_whole = 0
    for seed in range(20):
        tokens, whole = walk(compiler, schema_grammar(SCHEMAS[name]), seed)
        if whole:
            validator.validate(json.loads(tokenizer.decode(tokens, skip_special_tokens=False)))
            num_whole += 1
        if num_whole == 6:
            break
    assert num_whole >= 5


VALUES = [None, True, False, 0, 1, -1, 2, 7, 100, 0.5, 1.25, -3.75, "", "a", "abc", "größe", "x1y", "2024-02-29", "2023-02-29",
          [], [1], [1, 2, 3], ["a", 1, True], {}, {"a": 1}, {"a": 1, "b": 2}, {"a": {"a": {}}}, {"kind": "x"},
          {"n_ab": 1}]  # fmt: skip
PAIRS = [
    {"type": "integer"}, {"type": "number"}, {"type": ["string", "null"]}, {"enum": [1, "a", None, [1], {"a": 1}]},
    {"const": 0.5},
    {"type": "integer", "minimum": 0, "maximum": 7}, {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1.25},
    {"type": "integer", "multipleOf": 2},
    {"type": "string", "minLength": 1, "maxLength": 3}, {"type": "string", "pattern": "[0-9]"},
    {"type": "string", "pattern": "^a+"},
    {"type": "string", "format": "date"}, {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]},
    {"type": "array", "prefixItems": [True], "items": False},
    {"type": "object", "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "object", "minProperties": 1, "maxProperties": 1},
    {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
    {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer", "minimum": 5}]},
    {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 7}]},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
    {"properties": {"kind": {"const": "x"}}}, {"minimum": 1}, {"minLength": 2}, {"items": {"type": "integer"}}, {}, True,
]  # fmt: skip


@pytest.mark.parametrize("schema", PAIRS, ids=json.dumps)
def test_a_schema_lets_pass_exactly_what_is_valid(compiler, tokenizer, schema):
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    grammar = schema_grammar(schema)
    for value in VALUES:
        text = json.dumps(value, ensure_ascii=False)
        assert fits(compiler, tokenizer, grammar, text) == validator.is_valid(value), text


REFUSED = [
    ({"not": {}}, "`not`"), ({"if": {}, "then": {}}, "`if`"), ({"type": "array", "uniqueItems": True}, "`uniqueItems`"),
    ({"type": "array", "contains": {}}, "`contains`"), ({"propertyNames": {"pattern": "a"}}, "`propertyNames`"),
    ({"dependentRequired": {"a": ["b"]}}, "`dependentRequired`"), ({"unevaluatedProperties": False}, "`unevaluatedProperties`"),
    ({"$dynamicRef": "#a"}, "`$dynamicRef`"), ({"type": "string", "nullable": True}, "`nullable`"),
    ({"type": "string", "format": SECRET}, "`format`"), ({"type": SECRET}, "`type`"), ({SECRET: 1}, "entry 1"),
    ({"properties": {SECRET: {"items": {"not": {}}}}}, "`properties[0].items`"), ({"x-guidance": {"lenient": True}}, "entry 1"),
    ({"type": "string", "pattern": f"(?={SECRET})"}, "looks around"), ({"type": "string", "pattern": "(a)\\1"}, "back"),
    ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "`oneOf`"),
    ({"type": "integer", "minimum": 4, "maximum": 2}, "satisfied"),
    ({"$ref": "#/$defs/a"}, "names nothing"), ({"$ref": f"http://{SECRET}/a"}, "leads out"), ({"anyOf": []}, "at least one"),
    ({"multipleOf": 20_001}, "`multipleOf`"), ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, "`allOf[1].multipleOf`"),
    ({"multipleOf": 0}, "`multipleOf`"), ({"minimum": 2**53}, "`minimum`"), ({"minLength": -1}, "`minLength`"),
    ({"maxItems": True}, "`maxItems`"), ({"required": "a"}, "`required`"), ({"properties": []}, "`properties`"),
    ({"minProperties": 2}, "`minProperties`"), ({"pattern": "a" * 5000}, "4096"),
    ({"patternProperties": {"a" * 5000: {}}}, "4096"), ([], "is no schema"), ("string", "is no schema"), (False, "satisfied"),
    ({"properties": {f"p{i}": True for i in range(1001)}}, "1000 properties"), ({"enum": list(range(5001))}, "5000 values"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_not_enforced_is_refused_by_name(schema, words):
    with pytest.raises(InvalidRequestError) as caught:
        schema_grammar(schema)
    assert caught.value.param == "schema"
    assert words in caught.value.message
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("is_open", [False, True])
def test_as_many_properties_as_a_schema_may_have_may_all_be_optional(compiler, tokenizer, is_open):
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "maxLength": 8} for i in range(1000)},
        "additionalProperties": is_open,
    }
    grammar = check_grammar(schema_grammar(schema), "schema")
    assert fits(compiler, tokenizer, grammar, '{"p0": "a", "p999": "b"}')
    assert not fits(compiler, tokenizer, grammar, '{"p0": "a", "p999": 1}')


def test_deep_schemas_are_refused():
    schema: object = {"type": "string"}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequestError, match="32 deep"):
        check_schema(schema, "schema")


def test_annotations_demand_nothing():
    schema = {"type": "integer", "title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c", "x-order": 1}
    assert check_schema(schema, "schema") == {"type": "integer"}


def test_a_union_told_apart_by_a_constant_is_a_union():
    branch = {"type": "object", "required": ["k"]}
    one, two = ({**branch, "properties": {"k": {"const": value}}} for value in "ab")
    assert check_schema({"oneOf": [one, two]}, "schema") == {"anyOf": [one, two]}
    same = {"oneOf": [one, {**two, "required": []}]}
    assert check_schema(same, "schema") == same


CHOICES = ["yes", 'a "quoted" one', "back\\slash", "zwei\nZeilen", "größe 漢字 😀", "<|end|>", "tab\t", "a/b|c"]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_is_taken_letter_by_letter(compiler, tokenizer, choice):
    grammar = check_grammar(Grammar(GrammarKind.CHOICE, json.dumps(CHOICES)), "choice")
    assert fits(compiler, tokenizer, grammar, choice)
    assert not fits(compiler, tokenizer, grammar, choice + "!")


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        (r"\d{3}-[a-z]+", ["123-abc"], ["12-abc", "123-", "123-abC"]),
        ("yes|no", ["yes", "no"], ["yesno", ""]),
        (r"[^\n]*x", ["öx", "x"], ["a\nx"]),
        ("a/b", ["a/b"], ["ab"]),
        ("(?i)abc", ["aBC"], ["abd"]),
        ("a&b~", ["a&b~"], ["a"]),
    ],
)
def test_a_regular_expression_matches_the_whole_answer(compiler, tokenizer, regex, good, bad):
    grammar = check_grammar(Grammar(GrammarKind.REGEX, regex), "regex")
    assert all(fits(compiler, tokenizer, grammar, text) for text in good)
    assert not any(fits(compiler, tokenizer, grammar, text) for text in bad)


LARK = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/'
GBNF = 'root ::= number ("+" number)*\nnumber ::= [0-9]+'


@pytest.mark.parametrize("source", [LARK, GBNF], ids=["lark", "gbnf"])
def test_a_context_free_grammar_is_followed(compiler, tokenizer, source):
    grammar = check_grammar(Grammar(GrammarKind.LARK, source), "grammar")
    assert fits(compiler, tokenizer, grammar, "1+22+333")
    assert not fits(compiler, tokenizer, grammar, "1+")


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.REGEX, "("), (GrammarKind.REGEX, ""), (GrammarKind.REGEX, r"\bfoo\b"), (GrammarKind.REGEX, "x" * 70_000),
        (GrammarKind.CHOICE, "[]"), (GrammarKind.CHOICE, '[""]'), (GrammarKind.CHOICE, "[1]"), (GrammarKind.CHOICE, '"a"'),
        (GrammarKind.CHOICE, json.dumps(["a"] * 1001)), (GrammarKind.LARK, ""), (GrammarKind.LARK, f"start: {SECRET}"),
        (GrammarKind.LARK, "start: <|end|>"), (GrammarKind.LARK, 'start: <[5]> "a"'), (GrammarKind.LARK, "root ::= ("),
        (GrammarKind.LARK, '%llguidance {"test_trace": true}\nstart: "a"'),
        (GrammarKind.LARK, '%import common.INT\nstart: "a"'),
        (GrammarKind.JSON_SCHEMA, "{"), (GrammarKind.JSON_SCHEMA, '{"minimum": NaN}'),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(kind, source):
    with pytest.raises(InvalidRequestError) as caught:
        check_grammar(Grammar(kind, source), "field")
    assert caught.value.message.startswith("`field`")
    assert SECRET not in str(caught.value)


def test_control_tokens_are_no_part_of_a_text(compiler, tokenizer):
    anything = check_grammar(Grammar(GrammarKind.REGEX, "(.|\n)+"), "regex")
    matcher = compiler.compile(anything)
    mask = np.zeros(compiler.num_words, np.uint32)
    assert matcher.fill(mask)
    assert not set(allowed(mask)) & tokenizer.special.control_ids
    assert matcher.accept(tokenizer.encode("a"))
    assert matcher.fill(mask)
    assert set(allowed(mask)) & tokenizer.special.control_ids == set(EOS)


def test_a_copy_goes_its_own_way(compiler, tokenizer):
    grammar = check_grammar(Grammar(GrammarKind.CHOICE, '["ab", "cd"]'), "choice")
    first = compiler.compile(grammar)
    other = first.copy()
    assert first.accept(tokenizer.encode("ab"))
    assert first.is_complete
    assert not other.is_complete
    assert other.accept(tokenizer.encode("cd"))


@pytest.mark.parametrize("vocab_size", [4096, 4100, 4128, 5000])
@pytest.mark.parametrize("eos", [(1,), ()])
def test_a_model_may_have_more_columns_than_tokens_and_no_end(tokenizer, vocab_size, eos):
    compiler = GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_token_ids=eos)
    matcher = compiler.compile(Grammar(GrammarKind.REGEX, "(.|\n)+"))
    mask = np.zeros(compiler.num_words, np.uint32)
    assert matcher.accept(tokenizer.encode("a"))
    assert matcher.fill(mask)
    ids = [token for token in allowed(mask) if token < vocab_size]
    assert max(ids) < 4096
    assert set(ids) & {0, 1, 2, 3, 4, 5} == set(eos)


HOSTILE = [
    {"type": "string", "pattern": "^((((a{1,100}){1,100}){1,100}){1,100}){1,100}$"},
    {"type": "string", "pattern": "^(a|b)*a(a|b){60}$"},
    {"type": "string", "pattern": "^.*x.{1000}y.{1000}z.{1000}$"},
    {"type": "string", "minLength": 100_000, "maxLength": 10**9},
    {"type": "array", "items": {"type": "array", "items": {"type": "string"}, "minItems": 10**6}, "minItems": 10**6},
    {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
    {"allOf": [{"$ref": "#"}]},
    {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(16)]},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}},
    {"enum": [f"value {i * 7919}" for i in range(5000)]},
    {"type": "integer", "multipleOf": 19_997, "minimum": -(2**50), "maximum": 2**50},
    {"$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(30)} | {"30": {}}, "$ref": "#/$defs/0"},
]  # fmt: skip


@pytest.mark.parametrize(
    "target",
    [{"type": 5}, {"type": [[]]}, {"type": "object", "required": ["a"], "properties": 5}, {"type": "object", "required": 5}],
)
def test_branches_may_lead_to_what_is_no_schema(target):
    branches = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]
    with pytest.raises(InvalidRequestError):
        schema_grammar({"properties": {"x": {"oneOf": branches}}, "$defs": {"a": target, "b": target}})


@pytest.mark.parametrize(
    "schema",
    [{"anyOf": [{"$ref": "#/anyOf/" + "1" * 5000}]}, {"const": 10**3000}, {"enum": [10**3000]}],
    ids=["place", "constant", "value"],
)
def test_numbers_may_have_any_number_of_digits(schema):
    with pytest.raises(InvalidRequestError):
        schema_grammar(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"properties": {"x": {"$ref": "#/properties/x"}}},
    ],
    ids=["root", "circle", "itself"],
)
def test_references_that_only_lead_to_references_are_refused(schema):
    with pytest.raises(InvalidRequestError, match="leads back to itself"):
        schema_grammar(schema)


@pytest.mark.parametrize("source", ["\n" * 16_000 + "x", "start: " + " " * 16_000 + "x", "\n \t" * 5_000 + "x"])
def test_empty_lines_of_a_grammar_are_passed_at_once(source):
    began_s = time.process_time()
    with pytest.raises(InvalidRequestError):
        check_grammar(Grammar(GrammarKind.LARK, source), "grammar")
    assert time.process_time() - began_s < 1


@pytest.mark.parametrize("schema", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_schemas_end_soon(compiler, schema):
    """Refused, or compiled; then followed, or given up: nothing of it may take long."""
    started = time.process_time()
    try:
        matcher = compiler.compile(schema_grammar(schema))
    except InvalidRequestError:
        return
    finally:
        assert time.process_time() - started < 3
    mask = np.zeros(compiler.num_words, np.uint32)
    rng = np.random.default_rng(0)
    for _ in range(40):
        started = time.process_time()
        is_good = matcher.fill(mask)
        assert time.process_time() - started < 0.5
        if not is_good or matcher.is_complete or not matcher.accept([int(rng.choice(allowed(mask)))]):
            return


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(number=st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70))
@example(1.9999999998835847)  # the library reads 1.999999999883585
@example(10**30)
@example(1e-30)
def test_a_number_is_met_exactly_or_refused(compiler, tokenizer, number):
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"enum": [{"a": [number]}]}))
    try:
        check_grammar(grammar, "schema")
    except InvalidRequestError:
        assert abs(number) >= 2**53 or len(repr(number)) > 16 or abs(number) < 1e-6
        return
    tokens, whole = walk(compiler, grammar, seed=0)
    assert whole
    assert json.loads(tokenizer.decode(tokens, skip_special_tokens=False)) == {"a": [number]}


SCALARS = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(-1e6, 1e6) | st.text(max_size=8)
KEYWORDS = st.sampled_from(
    ["type", "enum", "const", "anyOf", "allOf", "oneOf", "items", "prefixItems", "properties", "patternProperties", "required",
     "additionalProperties", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
     "exclusiveMinimum", "multipleOf", "minProperties", "maxProperties", "$ref", "$defs", "not", "foo"]
)  # fmt: skip
JUNK = st.recursive(
    SCALARS | st.sampled_from(["string", "object", "integer", "array", "#", "#/$defs/a", "date", "^a+$", "(a|b){3}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@settings(
    max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(schema=st.dictionaries(KEYWORDS, JUNK, max_size=4))
def test_whatever_is_sent_is_refused_or_followed(compiler, tokenizer, schema):
    try:
        grammar = schema_grammar(schema)
        compiler.compile(grammar)
    except InvalidRequestError:
        return
    try:
        tokens, whole = walk(compiler, grammar, seed=0, max_tokens=60)
    except TooMuchWorkError:  # its request fails; that the mask and the matcher disagree fails this test
        return
    if whole and "$ref" not in json.dumps(schema):
        jsonschema.Draft202012Validator(schema).validate(json.loads(tokenizer.decode(tokens, skip_special_tokens=False)))


HARD = [f"(a|b)*a(a|b){{{i}}}$" for i in range(1, 19)]


def hard(number: int) -> dict[str, object]:
    return {"type": "string", "pattern": HARD[number]}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "allOf": [{"pattern": pattern} for pattern in HARD]},
        {"allOf": [{"properties": {"x": {"type": "string", "pattern": pattern}}} for pattern in HARD]},
        {"$defs": {f"d{i}": {"pattern": HARD[i]} for i in range(18)}, "allOf": [{"$ref": f"#/$defs/d{i}"} for i in range(18)]},
        {
            "$defs": {f"d{i}": {"$anchor": f"a{i}", "pattern": HARD[i]} for i in range(18)},
            "type": "string",
            "allOf": [{"$ref": f"#a%3{i}" if i < 10 else f"#a{i}"} for i in range(18)],
        },
        {
            "$defs": {
                **{f"d{i}": {"$anchor": f"a{i}", "pattern": HARD[i]} for i in range(18)},
                "z": {"const": [{"$anchor": f"a{i}"} for i in range(18)]},
            },
            "type": "string",
            "allOf": [{"$ref": f"#a{i}"} for i in range(18)],
        },
        {
            "$defs": {
                **{f"p{i}": {**hard(i), "items": {"$ref": f"#/$defs/q{i}"}} for i in range(18)},
                **{f"q{i}": {"$ref": f"#/$defs/p{i}"} for i in range(18)},
            },
            "properties": {
                "a": {"anyOf": [{"$ref": f"#/$defs/p{i}"} for i in range(18)]},
                "b": {"allOf": [{"$ref": f"#/$defs/q{i}"} for i in range(18)]},
            },
            "required": ["b"],
        },
        {
            "$defs": {
                f"d{i}": {**hard(i), **({"$ref": f"#/$defs/d{i + 1}", "title": "t"} if i < 17 else {})} for i in range(18)
            },
            "$ref": "#/$defs/d0",
        },
        {
            "$defs": {f"d{i}": {"properties": {"v": hard(i), "next": {"$ref": f"#/$defs/d{i}"}}} for i in range(18)},
            "allOf": [{"$ref": f"#/$defs/d{i}"} for i in range(18)],
        },
        {"type": "string", "allOf": [{"anyOf": [{"anyOf": [hard(i)]}, {"type": "null"}]} for i in range(18)]},
        {"type": "string", "allOf": [{"oneOf": [hard(i), {"type": "null"}]} for i in range(18)]},
        {"allOf": [{"items": hard(i)} if i % 2 else {"prefixItems": [{}, hard(i)]} for i in range(18)]},
        {
            "allOf": [
                {"items": [hard(i)]} if i % 2 else {"items": [{}], "additionalItems": hard(i), "prefixItems": [hard(i)]}
                for i in range(18)
            ]
        },
        {"allOf": [{"properties": {"x": hard(i)}} if i % 2 else {"additionalProperties": hard(i)} for i in range(18)]},
        {"allOf": [{"properties": {"x": hard(i)}} if i % 2 else {"patternProperties": {"^x": hard(i)}} for i in range(18)]},
        {"allOf": [{"additionalProperties": hard(i)} if i % 2 else {"patternProperties": {"^x": hard(i)}} for i in range(18)]},
        {"allOf": [{"properties": {"x": {"items": {"properties": {"y": hard(i)}}}}} for i in range(18)]},
        {
            "allOf": [
                {"anyOf": [{"properties": {"x": {"anyOf": [hard(i), {"const": 1}]}}}, {"properties": {"z": {}}}]}
                for i in range(9)
            ]
        },
    ],
    ids=[
        "together", "in properties of one name", "by reference", "by anchor", "by anchors that constants have too",
        "in a cycle that was counted before it was known", "beside references", "in lists that go on", "in unions",
        "in exclusive unions", "in items", "in listed items", "in further properties", "in properties by pattern",
        "in further properties by pattern", "deep inside", "in properties of unions",
    ],
)  # fmt: skip
def test_many_patterns_at_once_are_refused_and_not_searched_for_minutes(schema):
    with pytest.raises(InvalidRequestError, match="match 8 patterns and formats at once"):
        check_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), "schema")


def test_many_patterns_at_once_are_refused_in_a_schema_inside_a_grammar_too():
    schema = {
        "$defs": {f"d{i}": {**hard(i), "items": {"$ref": f"#/$defs/d{i}"}} for i in range(18)},
        "anyOf": [{"$ref": "#/$defs/d0/items"}, {"allOf": [{"$ref": f"#/$defs/d{i}/items"} for i in range(18)]}],
    }
    with pytest.raises(InvalidRequestError, match="match 8 patterns and formats at once"):
        check_grammar(Grammar(GrammarKind.LARK, f"start: %json {json.dumps(schema)}"), "grammar")


def dated(*names: str) -> dict[str, object]:
    return {"type": "object", "properties": {name: {"type": "string", "format": "date-time"} for name in names}}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [dated("created"), dated("updated"), dated("due")]},
        {
            "$defs": {
                "a": dated("created", "updated"),
                "b": {"allOf": [{"$ref": "#/$defs/a"}, dated("due", "seen")]},
                "c": {"allOf": [{"$ref": "#/$defs/b"}, dated("paid", "sent")]},
            },
            "allOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/a"}, dated("closed")],
        },
        {"allOf": [dated("created") for _ in range(7)]},
        {"allOf": [{"type": "array", "prefixItems": [{} for _ in range(i)] + [hard(i)]} for i in range(9)]},
        {"anyOf": [{"properties": {"x": hard(i), "n": {"const": i}}, "required": ["n"]} for i in range(18)]},
        {
            "$defs": {"n": {"anyOf": [{"properties": {"v": hard(i), "n": {"$ref": "#/$defs/n"}}} for i in range(18)]}},
            "properties": {f"p{i}": {"$ref": "#/$defs/n"} for i in range(100)},
        },
    ],
    ids=["merged", "inherited", "repeated", "at other positions", "in a union", "in a recursive union"],
)
def test_patterns_that_do_not_meet_in_one_text_do_not_add_up(schema):
    check_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), "schema")


@pytest.mark.parametrize(
    "schema",
    [
        {
            "$defs": {
                **{f"d{i}": {"anyOf": [{"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for _ in range(2)]} for i in range(30)},
                "d30": {},
            },
            "$ref": "#/$defs/d0",
        },
        {"patternProperties": {f"(a|b)*a(a|b){{6}}x{{{i}}}$": {} for i in range(1, 200)}},
        {
            "$defs": {"d": {"patternProperties": {f"(a|b)*a(a|b){{6}}x{{{i}}}$": {} for i in range(1, 9)}}},
            "allOf": [{"$ref": "#/$defs/d"} if i % 2 else {"title": str(i), "minProperties": 0} for i in range(2000)],
        },
    ],
    ids=["unions of unions", "patterns of names", "patterns of names again and again"],
)
def test_what_multiplies_is_refused_at_once(schema):
    with pytest.raises(InvalidRequestError, match="combine into too much"):
        check_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), "schema")


def test_a_few_patterns_of_names_are_taken():
    kinds = {"patternProperties": {f"^{i}_": {} for i in range(20)}, "additionalProperties": False}
    check_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"properties": {f"p{i}": kinds for i in range(10)}})), "schema")


def test_many_patterns_of_different_texts_and_dates_are_taken():
    names = {f"p{i}": {"type": "string", "pattern": HARD[i]} for i in range(18)}
    schema = {"type": "object", "properties": {**names, "day": {"type": "string", "format": "date"}, "next": {"$ref": "#"}}}
    check_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), "schema")


@pytest.mark.parametrize(
    "terminal",
    [
        " & ".join(f"/{pattern[:-1]}/" for pattern in HARD),
        "~(" + " | ".join(f"~/{pattern[:-1]}/" for pattern in HARD) + ")",
        '/"/ & A & B & "c" & A & B & A & B & A & B & A',
        '/a\\\\/ & "/" & A & B & A & "\\"" & A & B & A & B & A & "x"',
        '/[&~]/ & A // "\n & B & A # "\n & B & A /* & */ & B & A & B & A & B',
    ],
)
def test_many_intersections_of_a_grammar_are_refused(terminal):
    with pytest.raises(InvalidRequestError, match="8 of the signs"):
        check_grammar(Grammar(GrammarKind.LARK, f'start: X\nA: "a"\nB: "b"\nX: {terminal}'), "grammar")


@pytest.mark.parametrize(
    "source",
    [
        'start: D~4 "-" D~2 "-" D~2 "T" D~2 ":" D~2 ":" D~2 "." D~1..9 "+" D ~ 2 ":" D~2 "!" D~1\nD: /[0-9]/',
        "start: X\nX: /[A-Za-z0-9._~:?#@!$&'()*+,;=%-]+&[&~]*&[&~]*&[&~]*&[&~]*/",
        'start: "a" // & & & & & & & & & ~\n# & & & & & & & & & ~',
        'start: "/" "&&&&&&&&&" "/"',
        "root ::= " + " ".join("[^&<]*" for _ in range(9)),
    ],
    ids=["repetitions", "regular expressions", "comments", "a text between slashes", "classes in llama.cpp's notation"],
)
def test_signs_that_join_nothing_are_as_many_as_one_likes(source):
    check_grammar(Grammar(GrammarKind.LARK, source), "grammar")


@pytest.mark.parametrize(
    ("regex", "good", "bad"), [("a&b", "a&b", "ab"), ("a~b", "a~b", "ab"), ("[&~]+", "&~", "a"), ("~(a)", "~a", "b")]
)
def test_signs_in_regular_expressions_of_a_grammar_are_letters(compiler, tokenizer, regex, good, bad):
    grammar = check_grammar(Grammar(GrammarKind.LARK, f"start: X\nX: /{regex}/"), "grammar")
    assert fits(compiler, tokenizer, grammar, good)
    assert not fits(compiler, tokenizer, grammar, bad)


def test_signs_in_texts_of_a_grammar_are_no_intersections():
    operators = " | ".join(f'"{sign}"' for sign in ("&", "&&", "&=", "~", "&amp;", "&lt;", "&gt;", "~=", "&~", "~&"))
    check_grammar(Grammar(GrammarKind.LARK, f"start: {operators} | X\nX: /a+/ & /(aa)+/"), "grammar")


@pytest.mark.parametrize(
    ("inside", "match"),
    [
        ('{"type": "integer", "multipleOf": 1000000007}', "multiply to"),
        ("{" + '"allOf": [{"not": {}}]' + "}", "not enforced here"),
        ('{"$ref": "http://example.com/x"}', "leads out of the schema"),
        ("[1]", "without a schema"),
        ("{", "without a schema"),
        ('{"a":' * 2000, "without a schema"),
    ],
)
def test_a_schema_inside_a_grammar_is_held_to_what_a_schema_is(inside, match):
    with pytest.raises(InvalidRequestError, match=match):
        check_grammar(Grammar(GrammarKind.LARK, f'start: "a" %json {inside}'), "grammar")


@pytest.mark.parametrize("space", ["", " ", "\n", "\r\n", "\t \r\n\r\n"])
def test_a_schema_inside_a_grammar_may_be_on_a_line_of_its_own(compiler, tokenizer, space):
    grammar = check_grammar(Grammar(GrammarKind.LARK, f'start: "a" %json{space}{{"const": true}}\r\n'), "grammar")
    assert fits(compiler, tokenizer, grammar, "atrue")
    with pytest.raises(InvalidRequestError, match="not enforced here"):
        check_grammar(Grammar(GrammarKind.LARK, f'start: "a" %json{space}{{"not": {{}}}}\r\n'), "grammar")


def test_a_directive_in_a_text_or_comment_of_a_grammar_is_none(compiler, tokenizer):
    source = 'start: "%json" X // as %json does\nX: /%json x/ # %json\n'
    grammar = check_grammar(Grammar(GrammarKind.LARK, source), "grammar")
    assert fits(compiler, tokenizer, grammar, "%json%json x")


@pytest.mark.parametrize("before", ['"\\""', '/"/', '/\\/"/', '"//" "#"', '// "\n'], ids=repr)
def test_no_schema_hides_behind_what_looks_like_a_text(before):
    with pytest.raises(InvalidRequestError, match="not enforced here"):
        check_grammar(Grammar(GrammarKind.LARK, f'start: {before} %json {{"not": {{}}}} "x"'), "grammar")


def test_schemas_inside_a_grammar_are_followed(compiler, tokenizer):
    inside = {"type": "object", "properties": {"%json": {"const": 1}}, "required": ["%json"], "title": "left out"}
    schema = json.dumps(inside)
    grammar = check_grammar(Grammar(GrammarKind.LARK, f'start: "a" %json {schema} "b" %json {{"const": true}}'), "grammar")
    assert "left out" not in grammar.source
    matcher = compiler.compile(grammar)
    assert matcher.accept(tokenizer.encode('a{"%json": 1}btrue'))
    assert matcher.is_complete


def test_a_grammar_has_a_number_of_schemas():
    with pytest.raises(InvalidRequestError, match="16 schemas"):
        check_grammar(
            Grammar(GrammarKind.LARK, "start: " + " | ".join('%json {"multipleOf": 7}' for _ in range(17))), "grammar"
        )


def test_a_panic_of_the_library_is_an_error_of_the_request(monkeypatch):
    class Panic(BaseException):
        pass

    def fail(*args, **options):
        raise Panic("with the client's words")

    monkeypatch.setattr("cloister.text.grammar.checking.LLMatcher.validate_grammar_with_warnings", fail)
    with pytest.raises(InvalidRequestError, match="can be followed here") as found:
        check_grammar(Grammar(GrammarKind.REGEX, "[a-f]+"), "guided_regex")
    assert "client" not in str(found.value)
