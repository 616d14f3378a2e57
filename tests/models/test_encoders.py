"""BERT, XLM-RoBERTa and ModernBERT against transformers, in float32, with every tensor random and every field changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cloister.backends.base import Wants
from cloister.backends.encoder_spec import EncoderSpec
from cloister.backends.native import limits as native_limits
from cloister.backends.torch.cuda import limits as cuda_limits
from cloister.bench.roofline_operators import Numbers, Work, list_operators
from cloister.models import load, read_pooling
from cloister.models.config import HARMLESS
from cloister.models.families import FAMILIES
from cloister.types.errors import ConfigError, ModelError
from tests.driving import build
from tests.encoder_factory import MODEL_TYPES, make_encoder, reference
from tests.model_factory import make_model

TOKENS = np.random.default_rng(2).integers(4, 320, 150).tolist()
TYPES = [0] * 60 + [1] * 90
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("BertModel", {}),
    "BERT, relu, one layer": ("BertModel", {"hidden_act": "relu", "num_hidden_layers": 1}),
    "BERT, three classes": ("BertForSequenceClassification", {"num_labels": 3}),
    "XLM-R": ("XLMRobertaModel", {}),
    "XLM-R, two types": ("XLMRobertaModel", {"type_vocab_size": 2}),
    "XLM-R, one class": ("XLMRobertaForSequenceClassification", {"num_labels": 1}),
    "ModernBERT": ("ModernBertModel", {}),
    "ModernBERT, biases": ("ModernBertModel", {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
    "ModernBERT, classes of the first token": (
        "ModernBertForSequenceClassification",
        {"num_labels": 2, "classifier_bias": True},
    ),
    "ModernBERT, classes of the mean": (
        "ModernBertForSequenceClassification",
        {"num_labels": 4, "classifier_pooling": "mean", "classifier_activation": "tanh", "norm_bias": True},
    ),
}


def encode(path: Path, *, chunk: int = 150) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Returns hidden states of `TOKENS`, [num_tokens, hidden], and scores of classes, [num_labels], if there are any."""
    model = load(path)
    assert isinstance(model.spec, EncoderSpec)
    driver = build(model.spec, model.weights)
    wants = Wants(hidden=True, logits=model.spec.classifier is not None)
    for start in range(0, len(TOKENS), chunk):
        part = TOKENS[start : start + chunk]
        rows = [len(part) - 1] if start + chunk >= len(TOKENS) else []
        batch = driver.plan({"a": part}, rows)
        output = driver.program.step(replace(batch, token_types=np.array(TYPES[start : start + chunk], np.int32)), wants)
    return output.hidden, output.logits.reshape(-1)


def expected(path: Path) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
    config = json.loads((path / "config.json").read_text())
    return reference(path, TOKENS, TYPES if config.get("type_vocab_size", 0) > 1 else None)


@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_and_classes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    architecture, config = VARIANTS[name]
    path = make_encoder(tmp_path, architecture, **config)
    (hidden, scores), (states, logits) = encode(path), expected(path)
    assert np.abs(hidden - states).max() <= 1e-4
    assert (logits is None) == (not len(scores))
    if logits is not None:
        assert np.abs(scores - logits).max() <= 1e-4


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_a_text_in_chunks_is_the_same_text(architecture: str, tmp_path: Path) -> None:
    path = make_encoder(tmp_path, architecture)
    whole, parts = encode(path), encode(path, chunk=7)
    assert all((one == other).all() for one, other in zip(whole, parts, strict=True))


IDENTITY = "torch.nn.modules.linear.Identity"
EPS = {"layer_norm_eps": 0.5}
# architecture -> field (a dot goes into an object) -> another value that transformers computes with the same tensors
HONOURED: dict[str, dict[str, Any]] = {
    "BertForSequenceClassification": {**EPS, "hidden_act": "relu", "num_attention_heads": 8},
    "XLMRobertaForSequenceClassification": {**EPS, "hidden_act": "relu", "num_attention_heads": 8},
    "ModernBertForSequenceClassification": {
        "norm_eps": 0.5, "hidden_activation": "relu", "num_attention_heads": 8, "local_attention": 8,
        "classifier_pooling": "mean", "classifier_activation": "tanh",
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters.full_attention": {"rope_type": "default", "rope_theta": 300.0},
        "rope_parameters.sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
}  # fmt: skip
_SIZES = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64, "is_encoder_decoder": True,
    "quantization_config": {"quant_method": "gptq"}, "position_embedding_type": "relative_key",
    "id2label": {"0": "a", "1": "b", "2": "c"}, "problem_type": "guessing", "kv_lora_rank": 4,
    "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Mish"}, "tie_word_embeddings": "yes",
}  # fmt: skip
_OF_BERT = {"is_decoder": True, "add_cross_attention": True, "type_vocab_size": 3, "max_position_embeddings": 299}
REFUSED: dict[str, dict[str, Any]] = {
    "BertForSequenceClassification": {**_SIZES, **_OF_BERT},
    "XLMRobertaForSequenceClassification": {**_SIZES, **_OF_BERT, "pad_token_id": 3},
    "ModernBertForSequenceClassification": {
        **_SIZES, "attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True,
        "classifier_pooling": "max", "classifier_activation": "mish", "layer_types": ["full_attention"],
        "rope_parameters.chunked_attention": {}, "rope_parameters": [1], "hidden_activation": "mish",
    },
}  # fmt: skip
READ_ELSEWHERE = {"pad_token_id", "max_position_embeddings"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made = {name: make_encoder(tmp_path_factory.mktemp(name), name) for name in HONOURED}
    return made.__getitem__


@pytest.fixture
def copy(base: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    def link(name: str) -> Path:
        for file in base(name).iterdir():
            if file.name == "config.json":
                (tmp_path / file.name).write_bytes(file.read_bytes())
            else:
                (tmp_path / file.name).symlink_to(file)
        return tmp_path

    return link


def change(path: Path, field: str, value: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    place, *inner = field.split(".")
    if inner:
        config[place][inner[0]] = value
    else:
        config[field] = value
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("name", "field"), [(name, field) for name in HONOURED for field in HONOURED[name]])
def test_a_field_changes_the_scores_as_it_does_in_transformers(
    name: str, field: str, base: Callable[[str], Path], copy: Callable[[str], Path]
) -> None:
    path = copy(name)
    change(path, field, HONOURED[name][field])
    changed = np.concatenate([part.reshape(-1) for part in encode(path)])
    before = np.concatenate([part.reshape(-1) for part in encode(base(name))])
    states, logits = expected(path)
    assert logits is not None
    assert np.abs(changed - before).max() > 1e-2
    assert np.abs(changed - np.concatenate([states.reshape(-1), logits])).max() <= 1e-4


@pytest.mark.parametrize(("name", "field"), [(name, field) for name in REFUSED for field in REFUSED[name]])
def test_a_field_that_cannot_be_honoured_is_refused(name: str, field: str, copy: Callable[[str], Path]) -> None:
    path = copy(name)
    change(path, field, REFUSED[name][field])
    with pytest.raises(ModelError):
        load(path)


@pytest.mark.parametrize("name", HONOURED)
def test_every_field_that_transformers_writes_is_honoured_refused_or_known_as_harmless(
    name: str, base: Callable[[str], Path]
) -> None:
    written = set(json.loads((base(name) / "config.json").read_text()))
    tested = {field.split(".")[0] for field in (*HONOURED[name], *REFUSED[name])} | READ_ELSEWHERE
    assert written - tested - HARMLESS - FAMILIES[name].harmless == set()


@pytest.mark.parametrize("name", HONOURED)
def test_a_field_that_is_taken_for_harmless_changes_no_score_of_transformers(name: str, copy: Callable[[str], Path]) -> None:
    path = copy(name)
    before, spec = expected(path), load(path).spec
    config = json.loads((path / "config.json").read_text())
    for field in sorted(FAMILIES[name].harmless & set(config)):
        change(path, field, type(config[field])(not config[field]))
        assert load(path).spec == spec
    assert all((one == other).all() for one, other in zip(before, expected(path), strict=True))  # type: ignore[union-attr]


def test_the_fields_of_the_hub_mean_the_same(copy: Callable[[str], Path]) -> None:
    path = copy("ModernBertForSequenceClassification")
    before, config = load(path).spec, json.loads((path / "config.json").read_text())
    for name in ("rope_parameters", "layer_types"):
        del config[name]
    hub = {
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "reference_compile": False,
        "position_embedding_type": "absolute", "layer_norm_eps": 1e-05, "repad_logits_with_grad": False,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps({**config, **hub}))
    assert load(path, strict=True).spec == before
    (path / "config.json").write_text(json.dumps({**config, **hub, "global_attn_every_n_layers": 2}))
    assert load(path).spec != before
    (path / "config.json").write_text(json.dumps({**config, **hub, "local_rope_theta": 20.0}))
    assert load(path).spec != before


def test_positions_of_xlm_roberta_begin_behind_padding(copy: Callable[[str], Path]) -> None:
    assert load(copy("XLMRobertaForSequenceClassification")).info.max_model_len == 298


@pytest.mark.parametrize(
    ("fields", "labels", "activation"),
    [
        ({"id2label": {"0": "no"}}, ("no",), "sigmoid"),
        ({"id2label": {"0": "no"}, "problem_type": "regression"}, ("no",), "none"),
        ({"id2label": {"0": "no"}, "problem_type": "single_label_classification"}, ("no",), "sigmoid"),
        ({"id2label": {"0": "x"}, "sbert_ce_default_activation_function": IDENTITY}, ("x",), "none"),
        (
            {"id2label": {"0": "x"}, "sentence_transformers": {"activation_fn": IDENTITY}},
            ("x",),
            "none",
        ),
        ({"id2label": {"1": "no", "0": "yes"}}, ("yes", "no"), "softmax"),
        ({"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}, ("a", "b"), "sigmoid"),
        ({"id2label": None}, ("LABEL_0", "LABEL_1"), "softmax"),
    ],
)
def test_classes_have_names_and_an_activation(
    fields: dict[str, Any], labels: tuple[str, ...], activation: str, tmp_path: Path
) -> None:
    path = make_encoder(tmp_path, "BertForSequenceClassification", num_labels=len(labels))
    for field, value in fields.items():
        change(path, field, value)
    encoder = load(path).info.encoder
    assert encoder is not None
    assert (encoder.labels, encoder.activation) == (labels, activation)


def test_an_embedder_has_no_classes_and_a_decoder_is_no_encoder(tmp_path: Path) -> None:
    encoder = load(make_encoder(tmp_path, "BertModel")).info.encoder
    assert encoder is not None
    assert encoder.labels == ()
    assert load(make_model(tmp_path / "decoder", "llama")).info.encoder is None


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_pooling_is_what_the_files_of_sentence_transformers_say(pooling: str, tmp_path: Path) -> None:
    path = make_encoder(tmp_path, "BertModel", pooling=pooling)
    assert read_pooling(path, is_encoder=True).kind == pooling
    assert read_pooling(path, "mean", is_encoder=True).kind == "mean"


def test_the_first_token_of_a_decoder_knows_of_no_other() -> None:
    with pytest.raises(ModelError, match="cls"):
        read_pooling(Path("nowhere"), "cls")


def test_kernels_that_read_in_one_direction_refuse_an_encoder(tmp_path: Path) -> None:
    spec = load(make_encoder(tmp_path, "ModernBertModel")).spec
    with pytest.raises(ConfigError, match=r"both directions.*modernbert.*--backend torch"):
        native_limits.check_computable(spec, "float32")
    with pytest.raises(ConfigError, match=r"encoders.*device cpu"):
        cuda_limits.check_computable(spec)
    with pytest.raises(ConfigError, match="decoders only"):
        list_operators(spec, Work.decode(9, 1), Numbers())
