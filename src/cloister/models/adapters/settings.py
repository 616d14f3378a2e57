"""adapter_config.json of PEFT, read field by field, so that nothing that changes an answer is ignored (rule 10)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cloister.models.config import ConfigFields, read_json
from cloister.types.errors import ModelError

SETTINGS_FILE: Final = "adapter_config.json"

# Fields that say how an adapter was trained, or where; which modules it changes is read from its tensors.
_HARMLESS: Final = (
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "target_modules",
    "exclude_modules", "lora_dropout", "fan_in_fan_out", "layers_to_transform", "layers_pattern", "megatron_config",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "monteclora_config",
    "runtime_config", "qalora_group_size", "ensure_weight_tying",
)  # fmt: skip

# Fields that would change the answers, what they must be, and what they ask for.
_ONLY: Final[Mapping[str, tuple[object, str]]] = {
    "use_dora": (False, "DoRA, whose magnitudes are no low-rank update"),
    "modules_to_save": (None, "whole modules beside the low-rank updates"),
    "trainable_token_indices": (None, "changed embeddings"),
    "alora_invocation_tokens": (None, "an adapter that begins in the middle of a text"),
    "use_qalora": (False, "QA-LoRA"),
    "use_bdlora": (None, "block-diagonal adapters"),
    "kasa_config": (None, "KaSA"),
    "arrow_config": (None, "routing among adapters"),
    "layer_replication": (None, "repeated layers"),
    "lora_bias": (False, "biases in the low-rank updates"),
    "target_parameters": (None, "updates of parameters that are no products"),
    "rank_pattern": (None, "ranks that differ by module"),
    "alpha_pattern": (None, "scales that differ by module"),
    "bias": ("none", "trained biases"),
}
_CHANGE_THE_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
_MOST_RANK: Final = 4096


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What an adapter's config says.

    Attributes:
        rank: inner size of its updates.
        scale: lora_alpha / r, or lora_alpha / sqrt(r) for rank-stabilised ones (Kalajdzievski 2023, equation 6).
    """

    rank: int
    scale: float


def read_settings(path: Path) -> AdapterSettings:
    """Reads adapter_config.json in an adapter's directory.

    Raises:
        ModelError: it is missing or damaged, or asks for more than plain LoRA; the message names the field.
    """
    values = {name: value for name, value in _read(path).items() if name not in _HARMLESS}
    fields = ConfigFields(values, SETTINGS_FILE)
    _check_kind(fields)
    rank, alpha = fields.take_size("r", 8), fields.take("lora_alpha", float, 8.0)
    stabilised = fields.take("use_rslora", bool, False)
    if rank > _MOST_RANK or not math.isfinite(alpha):
        raise ModelError(f"'r' and 'lora_alpha' in {SETTINGS_FILE} must be finite, and r at most {_MOST_RANK}", param="r")
    fields.finish()
    return AdapterSettings(rank, alpha / (math.sqrt(rank) if stabilised else rank))


def _read(path: Path) -> dict[str, Any]:
    if not (path / SETTINGS_FILE).is_file():
        raise ModelError(f"the adapter has no {SETTINGS_FILE}; give the directory that PEFT's save_pretrained wrote")
    return read_json(path / SETTINGS_FILE)


def _check_kind(fields: ConfigFields) -> None:
    kind = fields.take("peft_type", str)
    if kind != "LORA":
        raise ModelError(f"the adapter is of the kind {kind!r}; supported is LORA", param="peft_type")
    task = fields.take("task_type", str, "CAUSAL_LM")
    if task != "CAUSAL_LM":
        raise ModelError(f"the adapter is for the task {task!r}; supported is CAUSAL_LM", param="task_type")
    start = fields.take_any("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_THE_BASE):
        raise ModelError(
            f"the adapter began as {start!r}, which changes the base model's weights; convert it to plain LoRA with PEFT's "
            "path_initial_model_for_weight_conversion",
            param="init_lora_weights",
        )
    for name, (only, what) in _ONLY.items():
        value = fields.take_any(name)
        if value and value != only:
            raise ModelError(f"the adapter asks for {what} ({name!r} in {SETTINGS_FILE}), which is not supported", param=name)
