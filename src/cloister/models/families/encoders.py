"""BERT (Devlin et al. 2019), XLM-RoBERTa (Conneau et al. 2020) and ModernBERT (Warner et al. 2024): embedders, and classifiers
of texts and of pairs of texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Literal, cast

from cloister.backends.encoder_spec import ClassifierActivation, ClassifierSpec, EncoderSpec
from cloister.backends.spec import DecoderSpec, RopeSpec
from cloister.models.config import ConfigFields
from cloister.models.family import Bias, Family
from cloister.models.rope import RopeReader
from cloister.models.sources import Source
from cloister.types.errors import ModelError

_MOST_LABELS = 65536
OF_SENTENCE_TRANSFORMERS = frozenset(("sentence_transformers", "sbert_ce_default_activation_function"))
"""Read in `models.classes`."""


def _encoder(spec: DecoderSpec, **more: object) -> EncoderSpec:
    shared = {field.name: getattr(spec, field.name) for field in fields_of(DecoderSpec)}
    return EncoderSpec(**{**shared, **more})


def _count_labels(fields: ConfigFields) -> int:
    """transformers writes the names of classes, and not their number; without them it makes two."""
    labels, count = fields.take_any("id2label"), fields.take_size("num_labels", 2)
    count = count if labels is None else len(labels) if isinstance(labels, dict) else 0
    if not 1 <= count <= _MOST_LABELS:
        raise ModelError(f"id2label in config.json must name 1 to {_MOST_LABELS} classes", param="id2label")
    return count


# BERT: learned positions, token types, norms after residual sums.


def _read_bert(fields: ConfigFields, spec: DecoderSpec) -> EncoderSpec:
    return _encoder(spec, num_token_types=fields.take_size("type_vocab_size", 2), residual_norm=True)


def _classifies(read: Callable[[ConfigFields, DecoderSpec], EncoderSpec]) -> Callable[[ConfigFields, DecoderSpec], EncoderSpec]:
    """Returns a reader of the same encoder with a layer of tanh before its classes."""

    def read_classifier(fields: ConfigFields, spec: DecoderSpec) -> EncoderSpec:
        return replace(read(fields, spec), classifier=ClassifierSpec(_count_labels(fields)))

    return read_classifier


_BERT_LAYER = "bert.encoder.layer.{}."
_BERT_TENSORS: Mapping[str, Source] = {
    "embed": Source("bert.embeddings.word_embeddings"),
    "positions": Source("bert.embeddings.position_embeddings"),
    "token_types": Source("bert.embeddings.token_type_embeddings"),
    "embed_norm": Source("bert.embeddings.LayerNorm"),
    "q": Source(_BERT_LAYER + "attention.self.query"),
    "k": Source(_BERT_LAYER + "attention.self.key"),
    "v": Source(_BERT_LAYER + "attention.self.value"),
    "o": Source(_BERT_LAYER + "attention.output.dense"),
    "attention_norm": Source(_BERT_LAYER + "attention.output.LayerNorm"),
    "up": Source(_BERT_LAYER + "intermediate.dense"),
    "down": Source(_BERT_LAYER + "output.dense"),
    "mlp_norm": Source(_BERT_LAYER + "output.LayerNorm"),
    "head": Source("cls.predictions.decoder"),
    "classifier_dense": Source("bert.pooler.dense"),
    "classifier": Source("classifier"),
}
_UNUSED = r"\.(pooler\.dense\.(weight|bias)|embeddings\.(position_ids|token_type_ids))"
"""The pooler of a bare encoder, which nothing reads, and buffers."""

BERT = Family(
    name="bert",
    architecture="BertModel",
    model_type="bert",
    max_positions=512,
    names={"rms_norm_eps": ("layer_norm_eps",)},
    defaults={"hidden_act": "gelu", "rms_norm_eps": 1e-12, "tie_word_embeddings": True},
    only={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    # of training, and of exports that nothing reads any more
    harmless=frozenset((
        "hidden_dropout_prob", "attention_probs_dropout_prob", "gradient_checkpointing", "output_past", "directionality",
        "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type",
    )) | OF_SENTENCE_TRANSFORMERS,
    qkv_bias=Bias.ALWAYS,
    output_bias=Bias.ALWAYS,
    mlp_bias=Bias.ALWAYS,
    norm="layer",
    norm_bias=True,
    pre_norm=False,
    gated=False,
    grouped=False,
    learned_positions=True,
    encoder=_read_bert,
    tensors=_BERT_TENSORS,
    prefix="bert.",
    buffers=re.compile("bert" + _UNUSED),
)  # fmt: skip
BERT_CLASSIFIER = replace(BERT, architecture="BertForSequenceClassification", encoder=_classifies(_read_bert))


# XLM-RoBERTa: the same, with positions that begin behind that of padding.


_PADDING = 1
"""The id of the padding token; positions are numbered from the next number on."""


def _read_xlm_roberta(fields: ConfigFields, spec: DecoderSpec) -> EncoderSpec:
    num_positions = spec.max_positions - _PADDING - 1
    if num_positions < 1:
        raise ModelError("max_position_embeddings in config.json must be more than 2", param="max_position_embeddings")
    return replace(_read_bert(fields, spec), max_positions=num_positions)


XLM_ROBERTA = replace(
    BERT,
    name="xlm_roberta",
    architecture="XLMRobertaModel",
    model_type="xlm-roberta",
    only={**BERT.only, "pad_token_id": _PADDING},
    encoder=_read_xlm_roberta,
    tensors={
        **{module: Source("roberta." + source.name.removeprefix("bert.")) for module, source in _BERT_TENSORS.items()},
        "positions": Source("roberta.embeddings.position_embeddings", skip=_PADDING + 1),
        "head": Source("lm_head"),
        "classifier_dense": Source("classifier.dense"),
        "classifier": Source("classifier.out_proj"),
    },
    prefix="roberta.",
    buffers=re.compile("roberta" + _UNUSED),
)
XLM_ROBERTA_CLASSIFIER = replace(
    XLM_ROBERTA, architecture="XLMRobertaForSequenceClassification", encoder=_classifies(_read_xlm_roberta)
)


# ModernBERT: norms before each part, rotary positions, gates, and a window in two of three layers.


_EVERY = 3
_ACTIVATIONS: Mapping[str, ClassifierActivation] = {
    "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "tanh": "tanh",
}  # fmt: skip
_KINDS = ("full_attention", "sliding_attention")


def _see_by_layer(fields: ConfigFields, num_layers: int) -> Sequence[int | None]:
    """Local layers see half of `local_attention` on each side."""
    window = fields.take_size("local_attention", 128) // 2 + 1
    every = fields.take_size("global_attn_every_n_layers", _EVERY)
    kinds = fields.take_any("layer_types") or [_KINDS[bool(number % every)] for number in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(_KINDS):
        raise ModelError(f"layer_types must list {' or '.join(_KINDS)} for each of num_hidden_layers", param="layer_types")
    return [None if kind == _KINDS[0] else window for kind in kinds]


def _turn_by_layer(fields: ConfigFields, reader: RopeReader, windows: Sequence[int | None]) -> Sequence[RopeSpec | None]:
    """Reads `rope_parameters` by kind of layer; or `global_rope_theta` and `local_rope_theta`, as on the hub."""
    bases = fields.take("global_rope_theta", float, 160000.0), fields.take("local_rope_theta", float, 10000.0)
    given = fields.take_any("rope_parameters") or {}
    if not isinstance(given, dict) or not set(given) <= set(_KINDS):
        raise ModelError(f"rope_parameters of this family are given for {' and '.join(_KINDS)}", param="rope_parameters")
    ropes = [reader.read_parameters(given.get(kind) or {}, base) for kind, base in zip(_KINDS, bases, strict=True)]
    return [ropes[window is not None] for window in windows]


def _read_modern_bert(fields: ConfigFields, spec: DecoderSpec) -> EncoderSpec:
    return _encoder(spec, norm_bias=fields.take("norm_bias", bool, False), first_norm=False, final_norm=True)


def _read_modern_classifier(fields: ConfigFields, spec: DecoderSpec) -> EncoderSpec:
    pooling = fields.take("classifier_pooling", str, "cls")
    if pooling not in ("cls", "mean"):
        raise ModelError(f"classifier_pooling in config.json is cls or mean, not {pooling!r}", param="classifier_pooling")
    activation = fields.take("classifier_activation", str, "gelu")
    if activation not in _ACTIVATIONS:
        raise ModelError(
            f"classifier_activation {activation!r} is not supported; known: {', '.join(_ACTIVATIONS)}",
            param="classifier_activation",
        )
    classifier = ClassifierSpec(
        num_labels=_count_labels(fields),
        pooling=cast(Literal["cls", "mean"], pooling),
        activation=_ACTIVATIONS[activation],
        dense_bias=fields.take("classifier_bias", bool, False),
        norm=True,
    )
    return replace(_read_modern_bert(fields, spec), classifier=classifier)


_MODERN_LAYER = "model.layers.{}."
_QKV = Source(_MODERN_LAYER + "attn.Wqkv", ("q", "k", "v"))
_GATE_UP = Source(_MODERN_LAYER + "mlp.Wi", ("gate", "up"))
_OF_CLASSIFIER = frozenset(("classifier_pooling", "classifier_activation", "classifier_bias"))

MODERN_BERT = Family(
    name="modernbert",
    architecture="ModernBertModel",
    model_type="modernbert",
    max_positions=8192,
    names={"hidden_act": ("hidden_activation",), "rms_norm_eps": ("norm_eps",)},
    defaults={"hidden_act": "gelu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    only={"position_embedding_type": "absolute"},  # written by the first of these models, and read by nothing
    # of training, of the language model's head, and of kernels of transformers
    harmless=frozenset((
        "initializer_cutoff_factor", "embedding_dropout", "mlp_dropout", "decoder_bias", "deterministic_flash_attn",
        "sparse_prediction", "sparse_pred_ignore_index", "reference_compile", "repad_logits_with_grad", "layer_norm_eps",
    )) | OF_SENTENCE_TRANSFORMERS | _OF_CLASSIFIER,
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    mlp_bias=Bias.FIELD,
    norm="layer",
    grouped=False,
    windows=_see_by_layer,
    ropes=_turn_by_layer,
    encoder=_read_modern_bert,
    tensors={
        "embed": Source("model.embeddings.tok_embeddings"),
        "embed_norm": Source("model.embeddings.norm"),
        "q": _QKV,
        "k": _QKV,
        "v": _QKV,
        "o": Source(_MODERN_LAYER + "attn.Wo"),
        "attention_norm": Source(_MODERN_LAYER + "attn_norm"),
        "gate": _GATE_UP,
        "up": _GATE_UP,
        "down": Source(_MODERN_LAYER + "mlp.Wo"),
        "mlp_norm": Source(_MODERN_LAYER + "mlp_norm"),
        "norm": Source("model.final_norm"),
        "head": Source("decoder"),
        "classifier_dense": Source("head.dense"),
        "classifier_norm": Source("head.norm"),
        "classifier": Source("classifier"),
    },
    buffers=re.compile(r"(?!)"),
)  # fmt: skip
MODERN_BERT_CLASSIFIER = replace(
    MODERN_BERT,
    architecture="ModernBertForSequenceClassification",
    harmless=MODERN_BERT.harmless - _OF_CLASSIFIER,
    encoder=_read_modern_classifier,
)
