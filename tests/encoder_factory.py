"""Small random encoders in the directories that Hugging Face's transformers writes, each with a tokenizer of its own kind."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from tests.model_factory import randomise

_ENCODERS: Any = AutoModel  # their constructors carry no types
_CLASSIFIERS: Any = AutoModelForSequenceClassification
SENTENCES = (
    "the cat sat on the mat and the dog ran to the hat",
    "what is that, and then what was this? it is the long road to the sea",
) * 8
MODEL_TYPES = {
    "BertModel": "bert",
    "BertForSequenceClassification": "bert",
    "XLMRobertaModel": "xlm-roberta",
    "XLMRobertaForSequenceClassification": "xlm-roberta",
    "ModernBertModel": "modernbert",
    "ModernBertForSequenceClassification": "modernbert",
}
SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 300,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "bert": {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
    "xlm-roberta": {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1},
    "modernbert": {
        "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3, "num_hidden_layers": 4,
        "local_attention": 24,
    },
}  # fmt: skip


def make_encoder(directory: Path, architecture: str, *, pooling: str | None = None, seed: int = 0, **config: Any) -> Path:
    """Writes an encoder whose every tensor is random, norms and biases too, and returns its directory.

    Args:
        pooling: "cls" or "mean", as sentence-transformers files say it; None writes none.
        config: fields of config.json that differ from `SMALL`.
    """
    model_type = MODEL_TYPES[architecture]
    fields = {**SMALL, **OWN[model_type], **config}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = AutoConfig.for_model(model_type, architectures=[architecture], **fields)
        model = _class_of(architecture).from_config(made)
        randomise(model, tied=True)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(_TOKENIZERS[model_type]())
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    if pooling is not None:
        _write_modules(directory, pooling)
    return directory


def reference(
    path: Path, token_ids: list[int], token_types: list[int] | None = None
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
    """Returns what transformers computes in float32: hidden states [num_tokens, hidden], and scores [num_labels] of classes."""
    architecture = json.loads((path / "config.json").read_text())["architectures"][0]
    model = _class_of(architecture).from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    given = {} if token_types is None else {"token_type_ids": torch.tensor([token_types])}
    with torch.no_grad():
        output = model(input_ids=torch.tensor([token_ids]), output_hidden_states=True, **given)
    logits = output.get("logits")
    return output.hidden_states[-1][0].numpy(), None if logits is None else logits[0].numpy()


def _class_of(architecture: str) -> Any:
    return _CLASSIFIERS if architecture.endswith("Classification") else _ENCODERS


def _write_modules(directory: Path, pooling: str) -> None:
    steps = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for i, (folder, kind) in enumerate(steps)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    modes = {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_mean_tokens": pooling == "mean"}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))


@cache
def _word_piece() -> str:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return str(tokenizer.to_str())


@cache
def _unigram() -> str:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return str(tokenizer.to_str())


@cache
def _byte_level() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return str(tokenizer.to_str())


_TOKENIZERS = {"bert": _word_piece, "xlm-roberta": _unigram, "modernbert": _byte_level}
