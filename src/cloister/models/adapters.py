"""LoRA adapters (Hu et al. 2021) on disk: PEFT's directories (adapter_config.json, adapter_model.safetensors), opened
without torch."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from cloister.backends.adapters import AdapterWeights, target_shapes
from cloister.backends.base import FloatArray
from cloister.backends.spec import DecoderSpec
from cloister.models.checkpoint import source_of, stored_name
from cloister.models.config import ConfigFields, read_json
from cloister.models.families import FAMILIES
from cloister.models.family import Family
from cloister.models.safetensors import FLOATS, TensorEntry, read_header
from cloister.models.sources import TensorSlice, find_place, num_heads_of
from cloister.types.documents import MAX_LINKS
from cloister.types.errors import ModelError

# PEFT's adapter_config.json, read field by field; an unread field is an error.


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
    """The settings in an adapter's config.

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


# Maps a checkpoint's module names, which adapters use, to the projections of a decoder.


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """One product that a module computes, or a part of what it computes.

    Attributes:
        product: its canonical name, such as "layers.0.q".
        inputs: of the module.
        stored_outputs: of the module.
        place: where the product's rows are among the module's.
    """

    product: str
    inputs: int
    stored_outputs: int
    place: TensorSlice

    def rows_of(self, stored: FloatArray) -> FloatArray:
        """Returns the rows of a module's matrix [stored_outputs, rank] that are this product's."""
        start, outputs = self.place.start, self.place.shape[0]
        return self.place.take_turns(stored) if self.place.num_heads else stored[start : start + outputs]


def find_targets(spec: DecoderSpec) -> Mapping[str, tuple[AdapterTarget, ...]]:
    """Returns module in the checkpoint -> the products that it computes.

    Raises:
        ModelError: the model's family is not known by name.
    """
    family = next((family for family in FAMILIES.values() if family.name == spec.family), None)
    if family is None:
        raise ModelError(f"adapters need a model of a known family, and this one is {spec.family!r}")
    shapes = {f"{product}.weight": shape for product, shape in target_shapes(spec).items()}
    found: dict[str, tuple[AdapterTarget, ...]] = {}
    for name in shapes:
        module = stored_name(family, name).removesuffix(".weight")
        found[module] = (*found.get(module, ()), _target(family, spec, name, shapes))
    return found


def _target(family: Family, spec: DecoderSpec, name: str, shapes: Mapping[str, tuple[int, ...]]) -> AdapterTarget:
    num_heads = num_heads_of(spec.layers[int(name.split(".")[1])])
    place = find_place(source_of(family, name), name, shapes, num_heads)
    stored = place.stored_shape[::-1] if place.source.transposed else place.stored_shape
    return AdapterTarget(name.removesuffix(".weight"), inputs=stored[1], stored_outputs=stored[0], place=place)


# LoRA adapters (Hu et al. 2021) as PEFT saves them: adapter_config.json and adapter_model.safetensors.


WEIGHTS_FILE: Final = "adapter_model.safetensors"
LINKS_FILE: Final = "link_tokens.safetensors"
"""What link tokens read, beside the updates or alone: one tensor, `link_tokens`, [num_links, hidden] (KVLink, Yang et al. 2025,
arXiv:2502.16002, section 3.2)."""
_NAME: Final = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter, read into memory.

    Attributes:
        digest: SHA-256 of updates and links (hex): what prefix keys and requests know it by, whatever name it has.
        links: [num_links, hidden] float32: what the link tokens of documents read, as the first layer reads it; None for none.
        created_s: when it was written, in seconds since 1970.
    """

    weights: AdapterWeights
    digest: str
    links: FloatArray | None = None
    created_s: int = 0


def read_adapter(path: Path, spec: DecoderSpec, *, max_rank: int, note_progress: Callable[[], None] = lambda: None) -> Adapter:
    """Reads an adapter's directory.

    Args:
        spec: of the model that it shall change.
        max_rank: memory is there for adapters up to it.
        note_progress: called after each product that was read.

    Raises:
        ModelError: something is missing, damaged or not supported, or does not fit the model; the message names it.
    """
    links = _read_links(path, spec)
    if links is not None and not (path / SETTINGS_FILE).exists():
        return Adapter(AdapterWeights({}), _digest({}, links), links, _read_age(path))
    settings = read_settings(path)
    if settings.rank > max_rank:
        raise ModelError(
            f"the adapter has the rank {settings.rank}, and there is room for {max_rank}; raise --max-lora-rank",
            param="max_lora_rank",
        )
    entries, targets = _entries(path), find_targets(spec)
    updates: dict[str, tuple[FloatArray, FloatArray]] = {}
    for module in sorted({module for module, _ in entries}):
        for target in _targets_of(module, targets):
            updates[target.product] = _update(module, target, entries, settings)
            note_progress()
    if not updates:
        raise ModelError(f"{WEIGHTS_FILE} has no low-rank update; save the adapter again")
    return Adapter(AdapterWeights(updates), _digest(updates, links), links, _read_age(path))


def read_rank(path: Path) -> int:
    """Returns an adapter's rank, 0 if it has link tokens only (`read_settings` says what is raised)."""
    return 0 if _has_only_links(path) else read_settings(path).rank


def _read_age(path: Path) -> int:
    return int((path / (LINKS_FILE if _has_only_links(path) else SETTINGS_FILE)).stat().st_mtime)


def _has_only_links(path: Path) -> bool:
    return (path / LINKS_FILE).is_file() and not (path / SETTINGS_FILE).exists()


def _read_links(path: Path, spec: DecoderSpec) -> FloatArray | None:
    if not (path / LINKS_FILE).is_file():
        return None
    entries = read_header(path / LINKS_FILE)
    if entries.keys() != {"link_tokens"}:
        raise ModelError(f"{LINKS_FILE} must have one tensor, 'link_tokens'; write it again")
    entry = entries["link_tokens"]
    if entry.dtype not in FLOATS:
        raise ModelError(f"the link tokens have the type {entry.dtype}; supported are: {', '.join(FLOATS)}")
    num_links = entry.shape[0] if len(entry.shape) == 2 else 0
    if not 0 < num_links <= MAX_LINKS or entry.shape[1] != spec.hidden_size:
        raise ModelError(
            f"the link tokens have the shape {list(entry.shape)}; the model asks for [K, {spec.hidden_size}] with K from 1 to "
            f"{MAX_LINKS}; train them for this model"
        )
    links = np.array(entry.read(), np.float32)
    if not np.isfinite(links).all():
        raise ModelError("the link tokens have values that are not finite numbers; train them again")
    return links


def _entries(path: Path) -> Mapping[tuple[str, str], TensorEntry]:
    """Returns the tensors by (module in the checkpoint, "A" or "B")."""
    if not (path / WEIGHTS_FILE).is_file():
        raise ModelError(f"the adapter's directory has no {WEIGHTS_FILE}; save the adapter in the safetensors format")
    found = {}
    for name, entry in read_header(path / WEIGHTS_FILE).items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ModelError(f"the adapter has a tensor {name!r}, which is no low-rank update; only plain LoRA is supported")
        if entry.dtype not in FLOATS:
            raise ModelError(f"the adapter's tensor {name!r} has the type {entry.dtype}; supported are: {', '.join(FLOATS)}")
        found[match["module"], match["side"]] = entry
    return found


def _targets_of(module: str, targets: Mapping[str, tuple[AdapterTarget, ...]]) -> tuple[AdapterTarget, ...]:
    if module not in targets:
        raise ModelError(
            f"the adapter changes {module!r}, which is none of the model's products that an adapter may change (q, k, v, o "
            "and the feed-forward of its layers)",
            param="target_modules",
        )
    return targets[module]


def _update(
    module: str, target: AdapterTarget, entries: Mapping[tuple[str, str], TensorEntry], settings: AdapterSettings
) -> tuple[FloatArray, FloatArray]:
    """Returns A and B of one product, the scale in B."""
    sides = [entries.get((module, side)) for side in "AB"]
    shapes = [None if side is None else side.shape for side in sides]
    wanted = [(settings.rank, target.inputs), (target.stored_outputs, settings.rank)]
    if shapes != wanted:
        raise ModelError(f"the adapter's tensors for {module!r} have the shapes {shapes}, the model asks for {wanted}")
    a, b = (np.ascontiguousarray(side.read(), np.float32) for side in sides if side is not None)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ModelError(f"the adapter's tensors for {module!r} have values that are not finite numbers; train it again")
    return a, np.ascontiguousarray(target.rows_of(b)) * np.float32(settings.scale)


def _digest(updates: Mapping[str, tuple[FloatArray, FloatArray]], links: FloatArray | None) -> str:
    digest = hashlib.sha256(b"cloister/adapter/1\0")
    for product, pair in sorted(updates.items()):
        for matrix in pair:
            digest.update(f"{product} {matrix.shape}\0".encode() + matrix.tobytes())
    if links is not None:
        digest.update(f"links {links.shape}\0".encode() + links.tobytes())
    return digest.hexdigest()
