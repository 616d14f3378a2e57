"""tokenizer.model beside the sentencepiece library, on models that it trained here, and beside transformers."""

import io
import itertools
import json
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.text import Tokenizer
from cloister.types.errors import ModelError
from tests.text.models import CORPUS
from tests.thinning import examples

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the library's wrapper has types without a module
    import sentencepiece

WORDS = ["server", "model", "token", "cache"]
SENTENCES = [
    *CORPUS,
    *(f"the {a} of a {b} is {c} than {a}s of {b}s" for a, b, c in itertools.permutations(WORDS, 3)),
    "newer newest lower lowest wider widest", "ａｂｃ ①② ﬁne", "x = y + 12345; // done", "aaaa aaaaa bbbb abab",
]  # fmt: skip
TEXTS = [
    *SENTENCES, "", " ", "   ", "a", " a", "a ", "  a  b  ", "\n", "a\n\n\nb", "a\tb", "é", "日本語 text", "😀", "\u200b",
    "ﬁ ①",    "a<sep>b", "a::=::=b", "<sep>", "<sep>a", "a <sep> b", "<sep><sep>x", "\n\n\n\n", "    indented",
    "the▁model", "<0x0A>", "&lt;",
]  # fmt: skip


def train(kind: str, **options: object) -> bytes:
    """Returns the bytes of a model that the library trained."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4), model_writer=written, model_type=kind, minloglevel=2,
        hard_vocab_limit=False, num_threads=1, **{"vocab_size": 400 if options.get("byte_fallback") else 150, **options},
    )  # fmt: skip
    return written.getvalue()


def write(path: Path, model: bytes, **config: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.model").write_bytes(model)
    if config:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def open_both(path: Path, model: bytes) -> tuple[Tokenizer, "sentencepiece.SentencePieceProcessor"]:
    return Tokenizer(write(path, model)), sentencepiece.SentencePieceProcessor(model_proto=model)


LLAMA = {
    "byte_fallback": True,
    "add_dummy_prefix": True,
    "remove_extra_whitespaces": False,
    "normalization_rule_name": "identity",
}
GEMMA = {
    "byte_fallback": True, "add_dummy_prefix": False, "remove_extra_whitespaces": False, "normalization_rule_name": "identity",
    "user_defined_symbols": ["\n\n", "\n\n\n", "▁▁", "▁▁▁▁", "<sep>"],
}  # fmt: skip
PLAIN = {"normalization_rule_name": "nmt_nfkc"}
SYMBOLS = {"byte_fallback": True, "normalization_rule_name": "nmt_nfkc", "user_defined_symbols": ["<sep>", "::="]}
KINDS = {
    f"{kind}-{name}": (kind, options)
    for kind in ("bpe", "unigram")
    for name, options in (("llama", LLAMA), ("gemma", GEMMA), ("plain", PLAIN), ("symbols", SYMBOLS))
}


@pytest.fixture(scope="module", params=KINDS)
def both(request, tmp_path_factory):
    kind, options = KINDS[request.param]
    return open_both(tmp_path_factory.mktemp(request.param), train(kind, **options))


def is_symbol_alone(text: str) -> bool:
    """The one text that differs: a symbol of the makers' and nothing beside it gets no space before it."""
    return text in ("<sep>", "::=")


def test_every_text_becomes_the_pieces_that_the_library_makes(both):
    ours, theirs = both
    for text in TEXTS:
        if not is_symbol_alone(text):
            assert ours.encode(text) == theirs.encode(text), text


@settings(max_examples=examples(100), deadline=None)
@given(text=st.text(st.sampled_from("ab elrstw  <sep>\n\n12é日①ﬁ▁"), max_size=30))
def test_any_text_becomes_the_pieces_that_the_library_makes(both, text):
    ours, theirs = both
    if not is_symbol_alone(text):
        assert ours.encode(text, parse_special=False) == theirs.encode(text)


def test_tokens_become_the_text_that_the_library_makes(both):
    ours, theirs = both
    for text in TEXTS:
        ids = theirs.encode(text)
        if theirs.unk_id() not in ids:  # an unknown letter is ⁇ there, and a control token here
            assert ours.decode(ids) == theirs.decode(ids), text


def test_names_of_the_tokens_come_from_the_file(both):
    ours, theirs = both
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_id(), theirs.eos_id())
    assert ours.vocab_size == theirs.vocab_size()


def test_a_text_is_tokenized_as_by_transformers(tmp_path):
    from transformers import LlamaTokenizer

    model = train("bpe", **LLAMA)
    path = write(tmp_path / "m", model, tokenizer_class="LlamaTokenizer", legacy=False)
    theirs, ours = LlamaTokenizer.from_pretrained(path), Tokenizer(path)
    for text in [*SENTENCES, "<s>the model</s>the cache", "a</s> b"]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


def test_each_stretch_between_control_tokens_is_a_text_of_its_own(tmp_path):
    ours, theirs = open_both(tmp_path, train("bpe", **LLAMA))
    assert ours.encode("<s>the model</s>the cache") == [1, *theirs.encode("the model"), 2, *theirs.encode("the cache")]


def test_a_user_cannot_write_a_control_token_or_a_byte_piece(tmp_path):
    for kind in ("bpe", "unigram"):
        ours, theirs = open_both(tmp_path / kind, train(kind, **LLAMA))
        assert ours.encode("<s>a</s>", parse_special=False) == theirs.encode("<s>a</s>")
        assert theirs.piece_to_id("<0x41>") not in ours.encode("see <0x41> there")
        assert ours.decode(ours.encode("see <0x41> there")) == "see <0x41> there"


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [({}, [1], []), ({"add_bos_token": False}, [], []), ({"add_eos_token": True}, [1], [2]),
     ({"add_bos_token": True, "add_eos_token": False}, [1], []), ({"add_bos_token": False, "add_eos_token": True}, [], [2])],
)  # fmt: skip
def test_a_plain_text_gets_the_ends_that_its_config_asks_for(tmp_path, config, before, after):
    model = train("bpe", **LLAMA)
    tokenizer = Tokenizer(write(tmp_path, model, **config))
    plain = tokenizer.encode("the model")
    assert tokenizer.encode("the model", add_special_tokens=True) == [*before, *plain, *after]
    assert tokenizer.encode("<s>the model", add_special_tokens=True)[:2] != [1, 1]


def test_tokenizer_json_goes_before_tokenizer_model(tmp_path, sentence_piece):
    path = write(tmp_path, train("unigram", **PLAIN))
    (path / "tokenizer.json").write_bytes((sentence_piece._path / "tokenizer.json").read_bytes())
    assert Tokenizer(path).encode("the") == sentence_piece.encode("the")


def test_a_damaged_file_is_told(tmp_path):
    model = train("unigram", **PLAIN)
    for data in (b"", b"not a model", model[: len(model) // 2], b"\xff" * 40):
        with pytest.raises(ModelError, match=r"tokenizer\.model"):
            Tokenizer(write(tmp_path, data))


@pytest.mark.parametrize(("kind", "options", "what"), [
    ("word", {}, "word"), ("unigram", {"treat_whitespace_as_suffix": True}, "behind words"),
])  # fmt: skip
def test_what_is_not_supported_is_told(tmp_path, kind, options, what):
    with pytest.raises(ModelError, match=what):
        Tokenizer(write(tmp_path, train(kind, **options)))


def field(number, content):
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def varint(number):
    return (bytes([number & 127 | 128]) + varint(number >> 7)) if number > 127 else bytes([number])


def piece(text, kind=1):
    return field(1, field(1, text.encode()) + bytes([3 << 3, kind]))


UNIGRAM, BPE = field(2, bytes([3 << 3, 1])), field(2, bytes([3 << 3, 2]))


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (piece("<unk>", 2) + piece("a") + UNIGRAM + field(3, field(2, b"\xfc\xff\xff\xff" + bytes(60))), "damaged"),
        (piece("<unk>", 2) + field(1, b"") + UNIGRAM, "damaged"),
        (piece("<unk>", 2) + piece(20_000 * "a") + BPE, "1024 letters"),
        (piece("a") + UNIGRAM, "unknown letters"),
    ],
    ids=["a table that is larger than the file", "a piece without a text", "an endless piece", "no unknown piece"],
)
def test_a_hostile_file_is_told_before_memory_is_taken_for_it(tmp_path, model, what):
    with pytest.raises(ModelError, match=what):
        Tokenizer(write(tmp_path, model))
