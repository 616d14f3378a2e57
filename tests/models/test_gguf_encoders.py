"""GGUF files of encoders, laid out as llama.cpp's converter does, against the directories that they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from safetensors.numpy import load_file

from cloister.models import load, read_pooling
from cloister.text import Tokenizer
from cloister.types.errors import ModelError
from cloister.types.request import EncoderInfo
from tests.encoder_factory import make_encoder
from tests.gguf_factory import finish
from tests.models.test_encoders import encode, expected

NAMES = {
    "embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q", "attention.self.key": "attn_k", "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output", "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up", "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm",
    "embeddings.tok_embeddings": "token_embd", "embeddings.norm": "token_embd_norm", "final_norm": "output_norm",
    "attn.Wqkv": "attn_qkv", "attn.Wo": "attn_output", "attn_norm": "attn_norm", "mlp.Wi": "ffn_up", "mlp.Wo": "ffn_down",
    "mlp_norm": "ffn_norm",
}  # fmt: skip
TEXTS = ("the cat sat on the mat, What is THAT?", "  \u00c9a \n\u6771\u4eac dog's hats zz", "", "e\u0301 the")


def convert(
    directory: Path,
    architecture: str,
    pooling: str = "cls",
    *,
    old: bool = False,
    labels: list[str] | None = None,
    **config: Any,
) -> Path:
    """Writes a random encoder to `directory`, and its GGUF file beside it.

    Args:
        labels: names of classes.
        old: with a token of class in place of BOS, and nothing about what is put around a text.
    """
    make_encoder(directory, architecture, pooling=pooling, **config)
    settings = json.loads((directory / "config.json").read_text())
    kind, offset = settings["model_type"], 2 if settings["model_type"] == "xlm-roberta" else 0  # of its first position
    file = directory.parent / f"{directory.name}.gguf"
    writer = GGUFWriter(file, "modern-bert" if kind == "modernbert" else "bert")
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_context_length(settings["max_position_embeddings"] - offset)
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(settings["num_attention_heads"])
    writer.add_causal_attention(False)
    writer.add_uint32(f"{writer.arch}.pooling_type", {"mean": 1, "cls": 2}[pooling])
    if kind != "modernbert":
        writer.add_layer_norm_eps(settings["layer_norm_eps"])
        writer.add_uint32("tokenizer.ggml.token_type_count", settings["type_vocab_size"])
    else:
        writer.add_layer_norm_rms_eps(settings["norm_eps"])
        writer.add_sliding_window(settings["local_attention"])
        writer.add_rope_freq_base(settings["rope_parameters"]["full_attention"]["rope_theta"])
        writer.add_float32("modern-bert.rope.freq_base_swa", settings["rope_parameters"]["sliding_attention"]["rope_theta"])
        writer.add_string("modern-bert.rope.scaling.type", "none")
        writer.add_string("modern-bert.hidden_activation", settings["hidden_activation"])
    if labels:
        writer.add_array(f"{writer.arch}.classifier.output_labels", labels)
    _WRITERS[kind](writer, json.loads((directory / "tokenizer.json").read_text()), old)
    for name, tensor in load_file(directory / "model.safetensors").items():
        module, _, last = name.rpartition(".")
        parts = [part for part in module.split(".") if part not in ("encoder", "layer", "layers", "model", "bert", "roberta")]
        target = NAMES.get(".".join(part for part in parts if not part.isdigit()))
        if target is not None:  # a bare encoder has a pooler, which converters leave out
            tensor = tensor[offset:] if target == "position_embd" else tensor
            writer.add_tensor(f"blk.{parts[0]}.{target}.{last}" if parts[0].isdigit() else f"{target}.{last}", tensor)
    finish(writer)
    return file


def _write_word_pieces(writer: GGUFWriter, tokenizer: dict[str, Any], old: bool) -> None:
    special = {token["content"] for token in tokenizer["added_tokens"]}
    pieces = [piece if piece in special else f"\u2581{piece}" for piece in _in_order(tokenizer)]
    _write_tokens(writer, "bert", [piece.removeprefix("\u2581##") for piece in pieces], special)
    _write_ends(writer, 2, 3, old=old)


def _write_byte_level(writer: GGUFWriter, tokenizer: dict[str, Any], _old: bool) -> None:
    _write_tokens(writer, "gpt2", _in_order(tokenizer), {token["content"] for token in tokenizer["added_tokens"]})
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]])
    _write_ends(writer, 2, 3)


def _write_unigram(writer: GGUFWriter, tokenizer: dict[str, Any], _old: bool) -> None:
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]} - {"<unk>"}
    _write_tokens(writer, "t5", [piece for piece, _ in vocab], special)
    writer.add_token_scores([*(score for _, score in vocab), *([-10000.0] * (320 - len(vocab)))])
    writer.add_add_space_prefix(True)
    writer.add_bool("tokenizer.ggml.remove_extra_whitespaces", True)
    _write_ends(writer, 0, 2)


_WRITERS = {"bert": _write_word_pieces, "modernbert": _write_byte_level, "xlm-roberta": _write_unigram}


def _in_order(tokenizer: dict[str, Any]) -> list[str]:
    vocab = tokenizer["model"]["vocab"]
    return sorted(vocab, key=vocab.__getitem__)


def _write_tokens(writer: GGUFWriter, kind: str, tokens: list[str], special: set[str]) -> None:
    filled = [*tokens, *(f"[PAD{number}]" for number in range(len(tokens), 320))]
    names = {**dict.fromkeys(special, TokenType.CONTROL), "<unk>": TokenType.UNKNOWN}
    normal = [names.get(token, TokenType.NORMAL) for token in tokens]
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(filled)
    writer.add_token_types([*normal, *([TokenType.UNUSED] * (320 - len(tokens)))])


def _write_ends(writer: GGUFWriter, first: int, last: int, *, old: bool = False) -> None:
    writer.add_sep_token_id(last)
    if old:
        writer.add_uint32("tokenizer.ggml.cls_token_id", first)
        return
    writer.add_bos_token_id(first)
    writer.add_eos_token_id(last)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.add_bool("tokenizer.ggml.add_sep_token", False)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "bert, old": ("BertModel", {"old": True, "pooling": "mean"}),
    "bert, of XLM-RoBERTa": ("XLMRobertaModel", {}),
    "modern-bert": ("ModernBertModel", {}),
    "modern-bert, biases": ("ModernBertModel", {"norm_bias": True, "attention_bias": True, "mlp_bias": True}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_file_encodes_as_its_directory(name: str, tmp_path: Path) -> None:
    architecture, config = VARIANTS[name]
    file = convert(tmp_path / "tiny", architecture, **config)
    assert load(file).info.encoder == EncoderInfo()
    assert np.abs(encode(file)[0] - expected(tmp_path / "tiny")[0]).max() <= 1e-5
    assert read_pooling(file, is_encoder=True).kind == config.get("pooling", "cls")
    ours, theirs = Tokenizer(file), Tokenizer(tmp_path / "tiny")
    for text in TEXTS if "XLM" not in architecture else [" ".join(text.split()) for text in TEXTS]:
        for add_special_tokens in (False, True):
            assert ours.encode(text, add_special_tokens) == theirs.encode(text, add_special_tokens), text


def test_a_head_of_classes_is_refused(tmp_path: Path) -> None:
    file = convert(tmp_path / "tiny", "BertModel", labels=["bad", "good"])
    with pytest.raises(ModelError, match=r"'classifier\.output_labels' that is not known here"):
        load(file)


def test_a_decoder_by_the_name_of_an_encoder_is_refused(tmp_path: Path) -> None:
    file = convert(tmp_path / "tiny", "BertModel")
    content = file.read_bytes()
    place = content.index(b"bert.attention.causal") + len(b"bert.attention.causal") + 4
    file.write_bytes(content[:place] + b"\x01" + content[place + 1 :])
    with pytest.raises(ModelError, match=r"'attention\.causal' .* is only supported as False"):
        load(file)
