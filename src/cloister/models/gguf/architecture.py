"""Maps GGUF metadata to the fields of a config.json, and those to a `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.backends.spec import DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from cloister.backends.tensors import dequantized
from cloister.models.config import ConfigFields
from cloister.models.decoder import read_fields
from cloister.models.families.gemma import GEMMA2, GEMMA3
from cloister.models.families.gpt import GPT2, GPT_NEOX
from cloister.models.families.gpt_oss import GPT_OSS
from cloister.models.families.llama import GRANITE, LLAMA, OLMO2, PHI3, SMOLLM3
from cloister.models.families.mistral import MIXTRAL
from cloister.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from cloister.models.family import Family
from cloister.models.gguf.tensors import find_entry
from cloister.models.sources import Source, module_of
from cloister.types.errors import ModelError
from cloister.types.gguf import GGUFFile

# The families by `general.architecture` of a GGUF file.


_LAYER: Mapping[str, str] = {
    "attention_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "attention_post_norm": "post_attention_norm", "mlp_norm": "ffn_norm", "gate": "ffn_gate",
    "up": "ffn_up", "down": "ffn_down", "mlp_post_norm": "post_ffw_norm", "router": "ffn_gate_inp",
    "experts.gate": "ffn_gate_exps", "experts.up": "ffn_up_exps", "experts.down": "ffn_down_exps",
    "shared.gate": "ffn_gate_shexp", "shared.up": "ffn_up_shexp", "shared.down": "ffn_down_shexp",
    "shared_router": "ffn_gate_inp_shexp",
}  # fmt: skip
SOURCES: Mapping[str, Source] = {
    "embed": Source("token_embd"),
    "positions": Source("position_embd"),
    "norm": Source("output_norm"),
    "head": Source("output"),
    **{module: Source(f"blk.{{}}.{name}") for module, name in _LAYER.items()},
}
_QKV = {module: Source("blk.{}.attn_qkv", ("q", "k", "v")) for module in "qkv"}
_GATE_UP = {module: Source("blk.{}.ffn_up", ("gate", "up")) for module in ("gate", "up")}

NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("embedding_length",),
    "num_hidden_layers": ("block_count",),
    "max_position_embeddings": ("context_length",),
    "intermediate_size": ("feed_forward_length",),
    "num_attention_heads": ("attention.head_count",),
    "num_key_value_heads": ("attention.head_count_kv",),
    "head_dim": ("attention.key_length",),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
}
"""What GGUF calls the fields of every config."""
_EXPERTS: Mapping[str, tuple[str, ...]] = {
    "num_experts": ("expert_count",), "num_experts_per_tok": ("expert_used_count",),
    "moe_intermediate_size": ("expert_feed_forward_length",),
    "shared_expert_intermediate_size": ("expert_shared_feed_forward_length",),
}  # fmt: skip
_WINDOW: Mapping[str, tuple[str, ...]] = {"sliding_window": ("attention.sliding_window",)}
_GRANITE: Mapping[str, tuple[str, ...]] = {
    "attention_multiplier": ("attention.scale",), "embedding_multiplier": ("embedding_scale",),
    "residual_multiplier": ("residual_scale",), "logits_scaling": ("logit_scale",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """What an architecture stands for.

    Attributes:
        paired: the rows of q and k are stored for rotation of neighbours.
        names: what it calls fields that only some families have.
        fixed: fields that its files do not hold, and that are always so.
        sources: where modules lie, where that is not as in `SOURCES`.
        rope: what its YaRN says beside what files hold.
        unread: entries that only say again what others say.
        root_of_head: what llama.cpp scales scores by when there are that many layers: the root of hidden_size by heads in place
            of the size of a head (the 27B sizes of Gemma, whose files do not say so).
    """

    family: Family
    paired: bool = False
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    root_of_head: int = 0


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(LLAMA, paired=True),
    "qwen2": Architecture(QWEN2),
    "qwen3": Architecture(QWEN3),
    "qwen2moe": Architecture(QWEN2_MOE, names=_EXPERTS),
    "qwen3moe": Architecture(QWEN3_MOE, names=_EXPERTS, fixed={"norm_topk_prob": True}),
    "gemma2": Architecture(GEMMA2, names=_WINDOW, root_of_head=46),
    "gemma3": Architecture(GEMMA3, names=_WINDOW, root_of_head=62),
    "phi3": Architecture(PHI3, names=_WINDOW, sources={**_QKV, **_GATE_UP}),
    "gpt2": Architecture(GPT2, sources=_QKV),
    "gptneox": Architecture(GPT_NEOX, sources=_QKV),
    "smollm3": Architecture(SMOLLM3, paired=True),
    "granite": Architecture(GRANITE, paired=True, names=_GRANITE),
    "olmo2": Architecture(OLMO2),
    "gpt-oss": Architecture(
        GPT_OSS,
        names={**_WINDOW, **_EXPERTS, "intermediate_size": ("expert_feed_forward_length",)},
        sources={
            "mlp_norm": Source("blk.{}.post_attention_norm"),
            "attention.sinks": Source("blk.{}.attn_sinks.weight", is_tensor=True),
        },
        rope={"truncate": False},
        unread=frozenset(("feed_forward_length",)),
    ),
}
MIXTRAL_AS_LLAMA = Architecture(MIXTRAL, paired=True, names=_EXPERTS)
"""What "llama" stands for in a file with experts."""


# Rotary settings of a GGUF file, as fields of a config.json.


ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
OF_ROPE = frozenset((ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS))
_GEMMA_BASE = 1000000.0


def read_rotation(file: GGUFFile, fields: ConfigFields, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    """Returns the fields of a config.json that stand for what the file says; none where the family turns nothing."""
    if architecture.family.learned_positions:
        return {}
    by_kind = architecture.family.name == "gemma3"
    theta = _take_base(fields, "rope.freq_base", _GEMMA_BASE if by_kind else 10000.0)
    scaling = _read_stretching(file, fields) or _read_scaling(fields)
    if scaling.get("rope_type") == "yarn":
        scaling = {**scaling, **architecture.rope}
    parameters = {"rope_theta": theta, **scaling, **_read_part(fields, architecture, head_dim)}
    if by_kind:  # local layers are not scaled
        local = {"rope_theta": _take_base(fields, "rope.freq_base_swa", 10000.0)}
        return {"rope_parameters": {"full_attention": parameters, "sliding_attention": local}}
    return {"rope_parameters": parameters}


def read_factors(file: GGUFFile, name: str, num_frequencies: int) -> npt.NDArray[np.float32]:
    """Returns a tensor that divides each frequency.

    Raises:
        ModelError: it has another length, or a number that divides nothing.
    """
    entry = find_entry(file, name)
    factors = dequantized(entry.read())
    if entry.shape != (num_frequencies,) or factors.dtype != np.float32 or not np.all((factors > 0) & np.isfinite(factors)):
        raise ModelError(f"tensor {name!r} in {file.path.name} must hold a positive F32 for each frequency")
    return factors


def _take_base(fields: ConfigFields, name: str, default: float) -> float:
    theta = fields.take(name, float, default)
    if not 1 < theta < float("inf"):
        raise ModelError(f"{name!r} in {fields.source} must be greater than 1, not {theta}", param=name)
    return theta


def _read_part(fields: ConfigFields, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    """Returns how much of a head is turned."""
    size = fields.take_size("rope.dimension_count", head_dim)
    if architecture.family.partial_rotary is None:
        if size != head_dim:
            raise ModelError(
                f"'rope.dimension_count' in {fields.source} must be the size of a head ({head_dim})",
                param="rope.dimension_count",
            )
        return {}
    return {"partial_rotary_factor": (size + 0.25) / head_dim}  # a quarter more, so that rounding down gives `size` again


def _read_stretching(file: GGUFFile, fields: ConfigFields) -> dict[str, Any] | None:
    """Returns LongRoPE's factors, which lie in tensors; None where there are none."""
    if LONG_FACTORS not in file.tensors or SHORT_FACTORS not in file.tensors:
        return None
    count = file.tensors[LONG_FACTORS].shape[-1]
    fields.take_any("rope.scaling.type")
    return {
        "rope_type": "longrope",
        "long_factor": read_factors(file, LONG_FACTORS, count).tolist(),
        "short_factor": read_factors(file, SHORT_FACTORS, count).tolist(),
        "attention_factor": fields.take("rope.scaling.attn_factor", float, 1.0),
        "original_max_position_embeddings": fields.take_size("rope.scaling.original_context_length"),
    }


def _read_scaling(fields: ConfigFields) -> dict[str, Any]:
    kind = fields.take("rope.scaling.type", str, "linear")
    factor = fields.take("rope.scaling.factor", float, None) or fields.take("rope.scale_linear", float, None) or 1.0
    if kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise ModelError(
            f"rope scaling {kind!r} in {fields.source} is not supported; known: {known}", param="rope.scaling.type"
        )
    return _SCALINGS[kind](fields, factor)


def _no_scaling(_fields: ConfigFields, _factor: float) -> dict[str, Any]:
    return {}


def _linear_scaling(_fields: ConfigFields, factor: float) -> dict[str, Any]:
    return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _yarn_scaling(fields: ConfigFields, factor: float) -> dict[str, Any]:
    named = {"original_max_position_embeddings": fields.take("rope.scaling.original_context_length", int, None)}
    betas = {name: fields.take(f"rope.scaling.yarn_{name}", float, None) for name in ("beta_fast", "beta_slow")}
    return {"rope_type": "yarn", "factor": factor, **named, **betas}


_SCALINGS: Mapping[str, Callable[[ConfigFields, float], dict[str, Any]]] = {
    "none": _no_scaling,
    "linear": _linear_scaling,
    "yarn": _yarn_scaling,
}


_MAX_HEAD_DIM = 8192
_SAYS_NOTHING = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.value_length")
_SOFTMAX = 1  # of the ways in which llama.cpp turns a router's outputs into scores
_DEFAULTS = frozenset(
    ("hidden_act", "sliding_window_pattern", "attn_logit_softcapping", "final_logit_softcapping", "no_rope_layer_interval")
)
"""Fields of a family that files need not hold; sizes they must."""


def find_architecture(file: GGUFFile) -> tuple[str, Architecture]:
    """Returns the architecture that a file names, and its name.

    Raises:
        ModelError: it is not known (the message lists those that are), or the file holds no model.
    """
    kind = file.get("general.type", str) or "model"
    if kind != "model":
        raise ModelError(f"{file.path.name} holds no model ({kind!r}); give the GGUF file of the model itself")
    if (file.get("split.count", int) or 0) > 1:
        raise ModelError(f"{file.path.name} is one part of a model; join its parts with `llama-gguf-split --merge` first")
    name = file.get("general.architecture", str) or "none"
    if name not in ARCHITECTURES:
        raise ModelError(f"{file.path.name} has the architecture {name!r}; supported are: {', '.join(ARCHITECTURES)}")
    is_mixtral = name == "llama" and (file.get("llama.expert_count", int) or 0) > 0
    return name, MIXTRAL_AS_LLAMA if is_mixtral else ARCHITECTURES[name]


def source_of(architecture: Architecture, name: str) -> Source:
    """Returns where a file has the module of a canonical tensor name (`backends.base`)."""
    module = module_of(name)
    own = architecture.sources
    return own.get(f"{module}.{name.rpartition('.')[2]}") or own.get(module) or SOURCES[module]


def read_spec(file: GGUFFile, max_model_len: int | None = None) -> DecoderSpec:
    """Returns the decoder that a file describes; biases and a head of its own are there if their tensors are.

    Args:
        max_model_len: as in `models.decoder.read_spec`.

    Raises:
        ModelError: an entry is missing, has no meaning, or is one that would have to be ignored.
    """
    name, architecture = find_architecture(file)
    fields = _prepare(file, name, architecture)
    if fields.peek("num_hidden_layers") > len(file.tensors):
        raise ModelError(f"'block_count' in {file.path.name} is greater than its number of tensors; download it again")
    spec = read_fields(architecture.family, fields, max_model_len)
    layers = tuple(_fit_biases(file, number, layer) for number, layer in enumerate(spec.layers))
    if ROPE_FACTORS in file.tensors:
        layers = tuple(_slow(file, layer) for layer in layers)
    return replace(spec, layers=layers)


def count_tokens(file: GGUFFile) -> int:
    """Returns the length of the token list.

    Raises:
        ModelError: the file has none.
    """
    num_tokens = getattr(file.metadata.get("tokenizer.ggml.tokens"), "num_items", 0)
    if num_tokens < 1:
        raise ModelError(f"{file.path.name} has no tokenizer; convert the model again, with its tokenizer beside it")
    return int(num_tokens)


def _prepare(file: GGUFFile, name: str, architecture: Architecture) -> ConfigFields:
    """Returns the file's entries and what they leave unsaid, as fields of the family's config."""
    prefix = f"{name}."
    entries = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    fields = ConfigFields(entries, file.path.name, names={**NAMES, **architecture.names})
    fields.need("max_position_embeddings", "rms_norm_eps")
    head_dim = _check_heads(fields)
    said = {
        **architecture.fixed,
        **read_rotation(file, fields, architecture, head_dim),
        "vocab_size": count_tokens(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if architecture.root_of_head:
        hidden, heads = fields.peek("hidden_size"), fields.peek("num_attention_heads")
        is_largest = fields.peek("num_hidden_layers") == architecture.root_of_head
        said["query_pre_attn_scalar"] = hidden // heads if is_largest else head_dim
    if "num_experts" not in architecture.names:
        fields.require("expert_count", 0)
        fields.require("expert_used_count", 0)
    fields.require("expert_gating_func", _SOFTMAX)
    fields.require("attention.causal", True)
    fields.drop((*_SAYS_NOTHING, *architecture.unread))
    defaults = {key: value for key, value in architecture.family.defaults.items() if key in _DEFAULTS}
    return fields.extended(said, defaults)


def _check_heads(fields: ConfigFields) -> int:
    """Returns the size of a head, after looking at what would make arithmetic of the rest impossible."""
    hidden, num_heads = fields.peek("hidden_size"), fields.peek("num_attention_heads")
    if min(hidden, num_heads) < 1:
        raise ModelError(f"'embedding_length' and 'attention.head_count' in {fields.source} must be positive")
    head_dim = fields.peek("head_dim", hidden // num_heads or 1)
    if head_dim % 2 or not 0 < head_dim <= _MAX_HEAD_DIM:
        raise ModelError(
            f"heads must have an even size up to {_MAX_HEAD_DIM} for rotary positions, not {head_dim}",
            param="attention.key_length",
        )
    if fields.peek("attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"'attention.value_length' in {fields.source} must be the size of a head ({head_dim})",
            param="attention.value_length",
        )
    return head_dim


def _fit_biases(file: GGUFFile, number: int, layer: LayerSpec) -> LayerSpec:
    """Returns a layer with biases where the file has any."""

    def has(*names: str) -> bool:
        return any(f"blk.{number}.{name}.bias" in file.tensors for name in names)

    attention: Any = replace(layer.grouped_attention, qkv_bias=has("attn_q", "attn_qkv"), output_bias=has("attn_output"))
    mlp = replace(layer.mlp, bias=has("ffn_down")) if isinstance(layer.mlp, MlpSpec) else layer.mlp
    return replace(layer, attention=attention, mlp=mlp)


def _slow(file: GGUFFile, layer: LayerSpec) -> LayerSpec:
    """Divides each frequency by a factor of its own, which is how a file says what Llama 3.1's scaling came to."""
    attention = layer.grouped_attention
    rope = attention.rope
    if rope is None:
        return layer
    scaled = np.array(rope.inv_freq, np.float32) / read_factors(file, ROPE_FACTORS, len(rope.inv_freq))
    slowed = RopeSpec(tuple(float(frequency) for frequency in scaled), rope.attention_scale)
    return replace(layer, attention=replace(attention, rope=slowed))
