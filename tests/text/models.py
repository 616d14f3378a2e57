"""Small tokenizers of the kinds that model families ship, written to a directory as a model would."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is a server? A server answers.",
    "Größe, Übung, naïve café; 東京の天気は晴れです。 Привет, мир! 😀🚀",
    "def main() -> int:\n    return 0\n\n<|im_start|>user\nhello<|im_end|>\n",
    "   spaces   and\ttabs\r\nand lines",
]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def save(path: Path, tokenizer: Tokenizer, **config: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def byte_level(path: Path, **config: object) -> Path:
    """As GPT-2, Llama 3 and Qwen: byte-level BPE; `<think>` is added, but is text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.add_tokens(["<think>", "</think>"])
    return save(path, tokenizer, **{"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", **config})


def sentence_piece(path: Path, *, legacy: bool = True, normalized: bool = False, **config: object) -> Path:
    """As Llama 2: BPE over `▁`, byte fallback, `<s>` in the vocabulary itself and within reach of its merges."""
    letters = sorted({char for text in CORPUS for char in text if char.isascii() and char.isprintable()} - {" "})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("e", "r"), ("<", "s"), ("<s", ">"), ("▁", "▁")]
    pieces += [first + second for first, second in merges if first + second not in pieces]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: place for place, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=normalized) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return save(path, tokenizer, **{"bos_token": "<s>", "eos_token": "</s>", **config})


def unigram(path: Path, **config: object) -> Path:
    """As T5 and XLNet: unigram over Metaspace, whose lattice would take `</s>` for a piece."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("server", -4.0)]
    pieces += [(char, -8.0) for char in "abcdefghijklmnopqrstuvwxyz<>/s.?!" if char not in "s"] + [("s", -8.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return save(path, tokenizer, **{"bos_token": "<s>", "eos_token": "</s>", **config})
