"""The classes of an encoder that classifies: their names, and what makes probabilities of their scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from cloister.backends.encoder_spec import EncoderSpec
from cloister.types.errors import ModelError
from cloister.types.request import EncoderInfo

Activation = Literal["softmax", "sigmoid", "none"]
_OF_PROBLEMS: Final[Mapping[str, Activation]] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_OF_MODULES: Final[Mapping[str, Activation]] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}


def read_encoder(config: Mapping[str, Any], spec: EncoderSpec) -> EncoderInfo:
    """Returns what config.json says of a model's classes.

    What makes probabilities is, in this order: `problem_type`; the module of torch that sentence-transformers names
    (`sentence_transformers.activation_fn`, or `sbert_ce_default_activation_function` in older configs); a sigmoid for one
    class, and a softmax over several.

    Raises:
        ModelError: a field has a value that is not known here.
    """
    if spec.classifier is None:
        return EncoderInfo()
    count = spec.classifier.num_labels
    activation = _read_activation(config)
    if activation is None or (activation == "softmax" and count == 1):  # which would always be 1
        activation = "sigmoid" if count == 1 else "softmax"
    return EncoderInfo(labels=_read_labels(config, count), activation=activation)


def _read_labels(config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    labels = config.get("id2label") or {f"{number}": f"LABEL_{number}" for number in range(count)}
    if not isinstance(labels, dict) or set(map(str, labels)) != set(map(str, range(count))):
        raise ModelError(f"id2label in config.json must name the classes 0 to {count - 1}", param="id2label")
    return tuple(str(labels[str(number)]) for number in range(count))


def _read_activation(config: Mapping[str, Any]) -> Activation | None:
    problem = config.get("problem_type")
    if problem is not None:
        if problem not in _OF_PROBLEMS:
            raise ModelError(f"problem_type in config.json must be one of: {', '.join(_OF_PROBLEMS)}", param="problem_type")
        return _OF_PROBLEMS[problem]
    section = config.get("sentence_transformers")
    named = section.get("activation_fn") if isinstance(section, dict) else None
    module = named or config.get("sbert_ce_default_activation_function")
    if module is None:
        return None
    name = str(module).rpartition(".")[2]
    if name not in _OF_MODULES:
        raise ModelError(
            f"config.json names an activation of scores that is not computed here; known: {', '.join(_OF_MODULES)}",
            param="sentence_transformers",
        )
    return _OF_MODULES[name]
