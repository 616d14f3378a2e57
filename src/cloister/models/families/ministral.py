"""Ministral (Mistral AI 2024): Mistral with a window in some layers; Ministral 3 (2025): with YaRN, and queries that grow with
their position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cloister.backends.spec import AttentionSpec, QueryGrowth, RopeSpec
from cloister.models.config import MAX_SIZE, ConfigFields
from cloister.models.families.mistral import MISTRAL
from cloister.models.rope import RopeReader, see_typed_windows
from cloister.types.errors import ModelError

MINISTRAL = replace(
    MISTRAL,
    name="ministral",
    architecture="MinistralForCausalLM",
    model_type="ministral",
    windows=see_typed_windows,
)

_BETA, _PERIOD = "llama_4_scaling_beta", "original_max_position_embeddings"
_YARN = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, _PERIOD: 16384, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, _BETA: 0.1,
}  # fmt: skip
"""When the config says nothing of rotation."""


def _look(fields: ConfigFields) -> Mapping[str, Any]:
    given = fields.look("rope_parameters")
    if not isinstance(given, dict):
        raise ModelError("rope_parameters in config.json must be an object", param="rope_parameters")
    return given


def _turn(fields: ConfigFields, reader: RopeReader, windows: Sequence[int | None]) -> Sequence[RopeSpec | None]:
    plain = {name: value for name, value in _look(fields).items() if name not in (_BETA, "max_position_embeddings")}
    return [reader.read_parameters(plain, 1000000.0)] * len(windows)


def _grow(fields: ConfigFields, layers: list[AttentionSpec]) -> list[AttentionSpec]:
    beta, period = (_look(fields).get(name) for name in (_BETA, _PERIOD))
    fields.take_any("rope_parameters")
    if beta is None:
        return layers
    if not isinstance(beta, int | float) or not isinstance(period, int) or not 0 < period <= MAX_SIZE:
        raise ModelError(f"{_BETA} must be a number, and {_PERIOD} beside it an integer of 1 to {MAX_SIZE}", param=_BETA)
    growth = QueryGrowth(float(beta), period)
    return [replace(layer, query_growth=growth) for layer in layers]


MINISTRAL3 = replace(
    MISTRAL,
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    max_positions=262144,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_parameters": _YARN},
    ropes=_turn,
    refine=_grow,
)
