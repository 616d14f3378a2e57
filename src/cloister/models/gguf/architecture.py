"""Maps GGUF metadata to the fields of a config.json, and those to a `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from cloister.backends.spec import AttentionSpec, DecoderSpec, LatentAttentionSpec, LayerSpec, MlpSpec
from cloister.models.config import ConfigFields
from cloister.models.decoder import read_fields
from cloister.models.families.gemma import GEMMA2, GEMMA3
from cloister.models.families.gpt import GPT2, GPT_NEOX
from cloister.models.families.gpt_oss import GPT_OSS
from cloister.models.families.llama import GRANITE, LLAMA, OLMO2, PHI3, SMOLLM3
from cloister.models.families.ministral import MINISTRAL3
from cloister.models.families.mistral import MIXTRAL
from cloister.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from cloister.models.gguf.encoders import BERT_FILES, MODERN_BERT_FILES
from cloister.models.gguf.hybrids import (
    FALCON_H1_FILES,
    GRANITE_HYBRID_FILES,
    LFM2_FILES,
    LFM2_MOE_FILES,
    MAMBA2_FILES,
    NEMOTRON_H_FILES,
    QWEN3_5_FILES,
    QWEN3_5_MOE_FILES,
    QWEN3_NEXT_FILES,
)
from cloister.models.gguf.latent import DEEPSEEK_V2_FILES, choose_deepseek
from cloister.models.gguf.layout import (
    EXPERTS,
    FUSED_EXPERTS,
    GATE_UP,
    GRANITE_NAMES,
    LOG_MULTIPLIER,
    NAMES,
    QKV,
    SOFTMAX,
    SOURCES,
    WINDOW,
    Architecture,
)
from cloister.models.gguf.mixtures import GLM4_MOE_FILES, GRANITE_MOE_FILES, LLAMA4_FILES, MINIMAX_M2_FILES
from cloister.models.gguf.rotation import ROPE_FACTORS, read_factors, read_rotation
from cloister.models.gguf.streams import GEMMA3N_FILES
from cloister.models.gguf.windows import COHERE2_FILES, OLMO3_FILES
from cloister.models.sources import Source, module_of
from cloister.types.errors import ModelError
from cloister.types.gguf import GGUFFile

T = TypeVar("T")

# The families by `general.architecture` of a GGUF file.

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(LLAMA, paired=True),
    "qwen2": Architecture(QWEN2),
    "qwen3": Architecture(QWEN3),
    "qwen2moe": Architecture(QWEN2_MOE, names=EXPERTS),
    "qwen3moe": Architecture(QWEN3_MOE, names=EXPERTS, fixed={"norm_topk_prob": True}),
    "gemma2": Architecture(GEMMA2, names=WINDOW, root_of_head=46),
    "gemma3": Architecture(GEMMA3, names=WINDOW, local_base=10000.0, global_base=1000000.0, root_of_head=62),
    "gemma3n": GEMMA3N_FILES,
    "phi3": Architecture(PHI3, names=WINDOW, sources={**QKV, **GATE_UP}),
    "gpt2": Architecture(GPT2, sources=QKV),
    "gptneox": Architecture(GPT_NEOX, sources=QKV),
    "smollm3": Architecture(SMOLLM3, paired=True),
    "granite": Architecture(GRANITE, paired=True, names=GRANITE_NAMES),
    "olmo2": Architecture(OLMO2),
    "gpt-oss": Architecture(
        GPT_OSS,
        names={**WINDOW, **EXPERTS, "intermediate_size": ("expert_feed_forward_length",)},
        sources={
            "mlp_norm": Source("blk.{}.post_attention_norm"),
            "attention.sinks": Source("blk.{}.attn_sinks.weight", is_tensor=True),
        },
        rope={"truncate": False},
        unread=frozenset(("feed_forward_length",)),
    ),
    "deepseek2": DEEPSEEK_V2_FILES,
    "glm4moe": GLM4_MOE_FILES,
    "minimax-m2": MINIMAX_M2_FILES,
    "llama4": LLAMA4_FILES,
    "mistral3": Architecture(
        MINISTRAL3,
        paired=True,
        rope_entries={
            **dict.fromkeys(("mscale", "mscale_all_dim"), (LOG_MULTIPLIER, 1.0)),
            "llama_4_scaling_beta": ("attention.temperature_scale", 1.0),
        },
    ),
    "cohere2": COHERE2_FILES,
    "qwen3next": QWEN3_NEXT_FILES,
    "qwen35": QWEN3_5_FILES,
    "qwen35moe": QWEN3_5_MOE_FILES,
    "lfm2": LFM2_FILES,
    "lfm2moe": LFM2_MOE_FILES,
    "granitehybrid": GRANITE_HYBRID_FILES,
    "granitemoe": GRANITE_MOE_FILES,
    "falcon-h1": FALCON_H1_FILES,
    "nemotron_h": NEMOTRON_H_FILES,
    "nemotron_h_moe": NEMOTRON_H_FILES,
    "mamba2": MAMBA2_FILES,
    "bert": BERT_FILES,
    "modern-bert": MODERN_BERT_FILES,
}
MIXTRAL_AS_LLAMA = Architecture(MIXTRAL, paired=True, names=EXPERTS)
"""What "llama" stands for in a file with experts."""
_SHARED_SIZE = "granitemoe.expert_shared_feed_forward_length"
_CHOICES: Mapping[str, Callable[[GGUFFile], Architecture]] = {
    "llama": lambda file: MIXTRAL_AS_LLAMA if file.get("llama.expert_count", int) else ARCHITECTURES["llama"],
    "olmo2": lambda file: OLMO3_FILES if file.get("olmo2.attention.sliding_window", int) else ARCHITECTURES["olmo2"],
    "granite": lambda file: GRANITE_HYBRID_FILES if "granite.ssm.inner_size" in file.metadata else ARCHITECTURES["granite"],
    "granitemoe": lambda file: GRANITE_HYBRID_FILES if file.get(_SHARED_SIZE, int) else GRANITE_MOE_FILES,
    "deepseek2": choose_deepseek,
}
"""Architectures that more than one family shares."""

_SAYS_NOTHING = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.value_length")
_DEFAULTS = frozenset((
    "hidden_act", "sliding_window_pattern", "attn_logit_softcapping", "final_logit_softcapping", "no_rope_layer_interval",
    "rope_theta", "norm_topk_prob",
))  # fmt: skip
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
    return name, _CHOICES[name](file) if name in _CHOICES else ARCHITECTURES[name]


def sources_of(architecture: Architecture, name: str) -> Iterator[Source]:
    """Yields where files may have the module of a canonical tensor name (`backends.base`), the most likely place first."""
    for places in (architecture.sources, architecture.other_sources, SOURCES, FUSED_EXPERTS):
        if source := entry_of(places, name):
            yield source


def entry_of(entries: Mapping[str, T], name: str) -> T | None:
    """Returns what an architecture has for a canonical tensor name, by its module and last part, or its module."""
    module = module_of(name)
    return entries.get(f"{module}.{name.rpartition('.')[2]}") or entries.get(module)


def read_spec(file: GGUFFile, max_model_len: int | None = None) -> DecoderSpec:
    """Returns the decoder that a file describes; biases and a head of its own are there if their tensors are.

    Args:
        max_model_len: as in `models.decoder.read_spec`.

    Raises:
        ModelError: an entry is missing, has no meaning, or is one that would have to be ignored.
    """
    name, architecture = find_architecture(file)
    fields = _prepare(file, name, architecture)
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
    _leave_predicting_layers(fields)
    num_layers = fields.peek("num_hidden_layers")
    if num_layers > len(file.tensors):
        raise ModelError(f"'block_count' in {file.path.name} is greater than its number of tensors; download or copy it again")
    said = {
        **architecture.fixed,
        **architecture.translate(file, fields),
        "vocab_size": count_tokens(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if architecture.head_size is None:
        fields.drop([entry for entry in entries if entry.startswith("rope.")])
    else:
        head_dim = architecture.head_size(fields)
        said |= read_rotation(file, fields, architecture, head_dim)
    if architecture.root_of_head:
        hidden, heads = fields.peek("hidden_size"), fields.peek("num_attention_heads")
        said["query_pre_attn_scalar"] = hidden // heads if num_layers == architecture.root_of_head else head_dim
    if "num_experts" not in architecture.names:
        fields.require("expert_count", 0)
        fields.require("expert_used_count", 0)
    fields.require("expert_gating_func", SOFTMAX)
    fields.require("attention.causal", True)
    fields.drop((*_SAYS_NOTHING, *architecture.unread))
    fields.drop(set(NAMES["rms_norm_eps"]) - {fields.name_of("rms_norm_eps")})  # as a config with both calls one of them
    defaults = {key: value for key, value in architecture.family.defaults.items() if key in _DEFAULTS}
    return fields.extended({fields.name_of(name): value for name, value in said.items()}, defaults)


def _leave_predicting_layers(fields: ConfigFields) -> None:
    """Takes the layers that predict further tokens, which come last, off their number."""
    num_layers, num_predicting = fields.peek("num_hidden_layers"), fields.take("nextn_predict_layers", int, 0)
    if not num_predicting:
        return
    if not 0 < num_predicting < num_layers:
        raise ModelError(
            f"'nextn_predict_layers' in {fields.source} must be less than its {num_layers} layers", param="nextn_predict_layers"
        )
    fields.put("num_hidden_layers", num_layers - num_predicting)


def _fit_biases(file: GGUFFile, number: int, layer: LayerSpec) -> LayerSpec:
    """Returns a layer with biases where the file has any."""

    def has(*names: str) -> bool:
        return any(f"blk.{number}.{name}.bias" in file.tensors for name in names)

    if isinstance(layer.attention, LatentAttentionSpec):
        biased = has("attn_q_a", "attn_kv_a_mqa")
        layer = replace(layer, attention=replace(layer.attention, qkv_bias=biased, output_bias=has("attn_output")))
    elif layer.attention is not None:
        biased = has("attn_q", "attn_qkv")
        layer = replace(layer, attention=replace(layer.attention, qkv_bias=biased, output_bias=has("attn_output")))
    return replace(layer, mlp=replace(layer.mlp, bias=has("ffn_down"))) if isinstance(layer.mlp, MlpSpec) else layer


def _slow(file: GGUFFile, layer: LayerSpec) -> LayerSpec:
    """Divides each frequency by a factor of its own, which is how a file says what Llama 3.1's scaling came to."""
    attention = layer.attention
    if not isinstance(attention, AttentionSpec) or attention.rope is None:
        return layer
    rope = attention.rope
    scaled = np.array(rope.inv_freq, np.float32) / read_factors(file, ROPE_FACTORS, len(rope.inv_freq))
    slowed = replace(rope, inv_freq=tuple(float(frequency) for frequency in scaled))
    return replace(layer, attention=replace(attention, rope=slowed))
