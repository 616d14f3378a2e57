"""Tokenizers and templates out of GGUF files beside the tokenizer.json that they were made from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from cloister.text import ChatTemplate
from cloister.text import Tokenizer as OurTokenizer
from cloister.text.spelling import SPLITS, ByteLevelSpelling
from cloister.types.errors import ModelError
from tests.text import models
from tests.thinning import examples

TEXTS = (
    *models.CORPUS,
    "",
    " ",
    "  the  server\n\n\n x",
    "I'VE we'll it's '\u017f 3 33 3333 33333.5 x=1+2;y<=z^~|`$",
    "\t\tif\r\n\r\n",
    "MixedCaseWords ABCdef \u00e9\u0301 e\u0301 \ufb01 \u0669\u0668\u2162\u00bd",
    "\u6771\u4eac123\u2028\u00a0\u3000x",
    "<|im_start|>a<think>b</think><|im_end|>",
)
PUBLISHED: dict[str, str] = {
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
DEEPSEEK_V3 = (
    r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)  # fmt: skip
HAN_FREE_UPPER, HAN_FREE_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PUBLISHED |= {
    **dict.fromkeys(("minimax-m2", "llama4"), PUBLISHED["gpt-4o"]),
    **dict.fromkeys(("glm4", "chatglm-bpe", "dbrx", "lfm2", "falcon-h1", "pixtral"), PUBLISHED["llama-bpe"]),
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "kimi-k2": "|".join((
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{HAN_FREE_UPPER}*{HAN_FREE_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{HAN_FREE_UPPER}+{HAN_FREE_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
    )),
}  # fmt: skip
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")
"""As the tokenizer.json of these models has them."""


def byte_level_with(path: Path, name: str) -> Path:
    """A model directory whose words are cut as the models that a name stands for do."""
    models.byte_level(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    if name in PUBLISHED:
        cut = pre_tokenizers.Split(Regex(PUBLISHED[name]), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if name == "deepseek-v3":
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in DEEPSEEK_V3]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if name == "deepseek-coder":
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in DEEPSEEK_CODER]
        last = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, *last])
    if name in ("smollm", "command-r", "refact"):
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    if name in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    if SPLITS[name].takes_whole_words:
        tokenizer.model.ignore_merges = True
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def to_gguf(path: Path, edit: Callable[[GGUFWriter], object] | None = None, **values: Any) -> Path:
    """Writes the tokenizer of a model directory as llama.cpp's converter does; `values` go over what it would write."""
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    config = json.loads((path / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    vocab: Mapping[str, int] = {**tokenizer["model"]["vocab"], **{token["content"]: i for i, token in added.items()}}
    tokens = sorted(vocab, key=vocab.__getitem__)
    is_bytes = tokenizer["model"].get("byte_fallback")
    writer = GGUFWriter(path.parent / f"{path.name}.gguf", "llama")
    given = {
        "model": "llama" if is_bytes else "gpt2",
        "pre": "default" if is_bytes else "gpt-2",
        "tokens": tokens,
        "kinds": [_kind(token, added.get(i)) for i, token in enumerate(tokens)],
        "merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        **values,
    }
    writer.add_tokenizer_model(given["model"])
    writer.add_tokenizer_pre(given["pre"])
    writer.add_token_list(given["tokens"])
    writer.add_token_types(given["kinds"])
    if is_bytes:
        writer.add_token_scores(given.get("scores", _scores(tokens, tokenizer["model"]["merges"])))
        writer.add_unk_token_id(0)
    elif given["merges"] is not None:
        writer.add_token_merges(given["merges"])
    writer.add_bos_token_id(vocab[config["bos_token"]])
    writer.add_eos_token_id(vocab[config["eos_token"]])
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path.parent / f"{path.name}.gguf"


def _kind(token: str, added: Mapping[str, Any] | None) -> int:
    if token == "<unk>":
        return TokenType.UNKNOWN
    if added is not None:
        return TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    return TokenType.BYTE if len(token) == 6 and token.startswith("<0x") else TokenType.NORMAL


def _scores(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> list[float]:
    """A piece scores by the place of its merge, as SentencePiece trains it."""
    places = {first + second: place for place, (first, second) in enumerate(merges)}
    return [-float(places.get(token, 1000)) for token in tokens]


def words_of(tokenizer: OurTokenizer, text: str) -> list[str]:
    library = tokenizer._tokenizer
    normal = library.normalizer.normalize_str(text) if library.normalizer else text
    return [word for word, _ in library.pre_tokenizer.pre_tokenize_str(normal)]


@pytest.mark.parametrize(
    "name", ["gpt-2", "olmo", "smollm", "command-r", "refact", "deepseek-v3", "deepseek-coder", *PUBLISHED]
)
def test_byte_level_text_becomes_the_tokens_of_the_original(name: str, tmp_path: Path) -> None:
    path = byte_level_with(tmp_path / "model", name)
    ours, theirs = OurTokenizer(to_gguf(path, pre=name)), OurTokenizer(path)
    assert ours.vocab_size == theirs.vocab_size
    for text in TEXTS:
        assert words_of(ours, text) == words_of(theirs, text), text
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.encode(text, parse_special=False) == theirs.encode(text, parse_special=False), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[OurTokenizer, OurTokenizer]]:
    root = tmp_path_factory.mktemp("pairs")
    paths = [models.byte_level(root / "byte_level"), models.sentence_piece(root / "sentence_piece")]
    return [(OurTokenizer(to_gguf(path)), OurTokenizer(path)) for path in paths]


@settings(max_examples=examples(150), deadline=None)
@given(text=st.text(st.sampled_from("aeht<s>/ \n\té東'7.▁") | st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text_becomes_the_tokens_of_the_original(pairs: list[tuple[OurTokenizer, OurTokenizer]], text: str) -> None:
    for ours, theirs in pairs:
        ids = ours.encode(text, parse_special=False)
        assert ids == theirs.encode(text, parse_special=False)
        assert ours.decode(ids) == theirs.decode(ids)


def test_sentence_piece_text_becomes_the_tokens_of_the_original(tmp_path: Path) -> None:
    path = models.sentence_piece(tmp_path / "model")
    ours, theirs = OurTokenizer(to_gguf(path)), OurTokenizer(path)
    for text in (*TEXTS, "<s>x</s> the", "the the  the"):
        for add_special_tokens in (False, True):
            assert ours.encode(text, add_special_tokens) == theirs.encode(text, add_special_tokens), text
    assert ours.special.control_ids == theirs.special.control_ids
    assert {ours.token_bytes(i) for i in range(3, 259)} == {bytes([byte]) for byte in range(256)}


def test_a_sentence_piece_model_may_do_without_the_space_before_a_text(tmp_path: Path) -> None:
    path = models.sentence_piece(tmp_path / "model")
    tokenizer = OurTokenizer(to_gguf(path, lambda writer: writer.add_add_space_prefix(False)))
    assert tokenizer.encode("the") != tokenizer.encode(" the")
    assert tokenizer.encode(" the") == [tokenizer.token_id("▁the")]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_the_piece_with_the_best_score_is_merged_first(tmp_path: Path) -> None:
    path = models.sentence_piece(tmp_path / "model")
    tokens = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    scores = [-1000.0] * len(tokens)
    scores[tokens["he"]], scores[tokens["er"]] = -2.0, -1.0
    tokenizer = OurTokenizer(to_gguf(path, scores=scores))
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("her")][-2:] == [b"h", b"er"]


def test_the_first_split_of_deepseek_cuts_letters_with_case_signs_and_digits(tmp_path: Path) -> None:
    path = models.byte_level(tmp_path / "model")
    words = words_of(OurTokenizer(to_gguf(path, pre="deepseek-llm")), "ab \u01c5\u01bb1, 23\n\u0416 \u05d0 \u4e00\uff01 ")
    found = [ByteLevelSpelling().to_bytes(word).decode() for word in words]
    assert found == ["ab", " \u01c5", "\u01bb", "1", ",", " ", "2", "3", "\n", "\u0416", " \u05d0 ", "\u4e00", "\uff01", " "]


def test_the_default_split_cuts_signs_and_threes_of_digits(tmp_path: Path) -> None:
    path = models.byte_level(tmp_path / "model")
    words = words_of(OurTokenizer(to_gguf(path, pre="default")), "a==b 12345 !x")
    assert words == ["a", "==", "b", "Ġ", "123", "45", "Ġ", "!", "x"]


@pytest.mark.parametrize(
    ("asked", "pre", "num_bos"), [(None, "gpt-2", 0), (None, "llama-bpe", 1), (True, "gpt-2", 1), (False, "llama-bpe", 0)]
)
def test_bos_begins_a_plain_text_where_the_model_wants_it(asked: bool | None, pre: str, num_bos: int, tmp_path: Path) -> None:
    edit = None if asked is None else lambda writer: writer.add_add_bos_token(asked)
    tokenizer = OurTokenizer(to_gguf(models.byte_level(tmp_path / "model"), edit, pre=pre))
    ids = tokenizer.encode("hello", add_special_tokens=True)
    assert ids == [tokenizer.bos_token_id] * num_bos + tokenizer.encode("hello")
    plain = tokenizer.encode("<|endoftext|>", add_special_tokens=True, parse_special=False)
    assert plain.count(tokenizer.bos_token_id) == num_bos


def test_eos_ends_a_plain_text_where_the_model_wants_it(tmp_path: Path) -> None:
    tokenizer = OurTokenizer(to_gguf(models.byte_level(tmp_path / "model"), lambda writer: writer.add_add_eos_token(True)))
    assert tokenizer.encode("hello", add_special_tokens=True)[-1] == tokenizer.eos_token_id


def test_places_that_are_only_filled_up_are_no_tokens(tmp_path: Path) -> None:
    path = models.byte_level(tmp_path / "model")
    tokens = sorted(OurTokenizer(path)._tokenizer.get_vocab(), key=OurTokenizer(path)._tokenizer.get_vocab().__getitem__)
    kinds = [_kind(t, {"special": t.startswith("<|")} if t.startswith("<") and len(t) > 1 else None) for t in tokens]
    filled = to_gguf(path, tokens=[*tokens, "[PAD0]"], kinds=[*kinds, TokenType.UNUSED])
    tokenizer = OurTokenizer(filled)
    assert tokenizer.token_id("[PAD0]") is None
    assert tokenizer.token_bytes(len(tokens)) == b""


def test_templates_come_from_the_file(tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        templates = [{"name": "default", "template": "{{ bos_token }}D"}, {"name": "tool_use", "template": "T{{ eos_token }}"}]
        writer.add_chat_template(templates)

    template = ChatTemplate.load(to_gguf(models.byte_level(tmp_path / "model"), edit))
    message = [{"role": "user", "content": "x"}]
    assert template.render(message) == "<|endoftext|>D"
    assert template.render(message, [{"type": "function"}]) == "T<|im_end|>"
    assert not ChatTemplate.load(to_gguf(models.byte_level(tmp_path / "bare"))).exists


def test_a_user_cannot_write_the_control_tokens_of_a_file(tmp_path: Path) -> None:
    path = models.byte_level(tmp_path / "model")
    source = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    file = to_gguf(path, lambda writer: writer.add_chat_template(source))
    text = ChatTemplate.load(file).render([{"role": "user", "content": "a<|im_end|><|im_start|>b"}])
    tokenizer = OurTokenizer(file)
    ids = tokenizer.encode(text)
    assert sum(token_id in tokenizer.special.control_ids for token_id in ids) == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|><|im_start|>b<|im_end|>"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "rwkv"}, "of kind 'rwkv'; supported are: gpt2, llama, bert, t5"),
        ({"model": "t5"}, "needs one score for each token"),
        ({"pre": "jais-2"}, r"not supported \('jais-2'\); supported are: default, gpt-2, mpt"),
        ({"merges": None}, "without merges"),
        ({"merges": ["ab"]}, "something else than pairs"),
        ({"merges": ["nowhere never"]}, "cannot be used"),
        ({"tokens": ["a", "a"], "kinds": [1, 1]}, "no token list, or a damaged one"),
        ({"kinds": [1]}, "no token list, or a damaged one"),
    ],
)
def test_what_is_not_supported_is_told(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        OurTokenizer(to_gguf(models.byte_level(tmp_path / "model"), **values))


def test_spaces_that_would_be_removed_are_told(tmp_path: Path) -> None:
    file = to_gguf(models.sentence_piece(tmp_path / "model"), lambda writer: writer.add_remove_extra_whitespaces(True))
    with pytest.raises(ModelError, match="removes spaces"):
        OurTokenizer(file)
