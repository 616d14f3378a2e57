"""How the files of one architecture are laid out: where tensors lie, what entries are called, what both stand for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cloister.backends.spec import LayerSpec
from cloister.models.config import ConfigFields
from cloister.models.family import Family
from cloister.models.sources import Shape, Source
from cloister.types.errors import ModelError
from cloister.types.gguf import GGUFArray, GGUFFile

_LAYER: Mapping[str, str] = {
    "attention_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "attention_post_norm": "post_attention_norm", "mlp_norm": "ffn_norm", "gate": "ffn_gate",
    "up": "ffn_up", "down": "ffn_down", "mlp_post_norm": "post_ffw_norm", "router": "ffn_gate_inp",
    "experts.gate": "ffn_gate_exps", "experts.up": "ffn_up_exps", "experts.down": "ffn_down_exps",
    "shared.gate": "ffn_gate_shexp", "shared.up": "ffn_up_shexp", "shared.down": "ffn_down_shexp",
    "shared_router": "ffn_gate_inp_shexp", "router.e_score_correction_bias": "exp_probs_b.bias",
}  # fmt: skip
SOURCES: Mapping[str, Source] = {
    "embed": Source("token_embd"),
    "positions": Source("position_embd"),
    "norm": Source("output_norm"),
    "head": Source("output"),
    **{module: Source(f"blk.{{}}.{name}", is_tensor="." in name) for module, name in _LAYER.items()},
}
QKV = {module: Source("blk.{}.attn_qkv", ("q", "k", "v")) for module in "qkv"}
GATE_UP = {module: Source("blk.{}.ffn_up", ("gate", "up")) for module in ("gate", "up")}
FUSED_EXPERTS = {module: Source("blk.{}.ffn_gate_up_exps", ("gate", "up")) for module in ("experts.gate", "experts.up")}
"""Where a converter was asked to join the two."""

Names: TypeAlias = Mapping[str, tuple[str, ...]]
NAMES: Names = {
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
EXPERTS: Names = {
    "num_experts": ("expert_count",), "num_experts_per_tok": ("expert_used_count",),
    "moe_intermediate_size": ("expert_feed_forward_length",),
    "shared_expert_intermediate_size": ("expert_shared_feed_forward_length",),
}  # fmt: skip
WINDOW: Names = {"sliding_window": ("attention.sliding_window",)}
GRANITE_NAMES: Names = {
    "attention_multiplier": ("attention.scale",), "embedding_multiplier": ("embedding_scale",),
    "residual_multiplier": ("residual_scale",), "logits_scaling": ("logit_scale",),
}  # fmt: skip
SOFTMAX, SIGMOID = 1, 2
"""Ways in which llama.cpp turns a router's outputs into scores (`expert_gating_func`)."""
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
"""What holds YaRN's `mscale_all_dim`, or a tenth of it; `mscale` is the same number in all published models."""
MAX_HEAD_DIM = 8192

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorRecipe:
    """How a tensor is computed from others of its layer.

    Attributes:
        names: of the stored tensors; {} is the layer.
        compute: makes it of their contents, in its own shape or in one of the same size.
        shapes: of the stored tensors; None where they may have any of the tensor's size.
    """

    names: tuple[str, ...]
    compute: Callable[[LayerSpec, Sequence[Array]], Array]
    shapes: Callable[[LayerSpec], Sequence[Shape]] | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """Outputs or inputs of a stored tensor that lie in another order than in a checkpoint.

    Attributes:
        axis: 0 for outputs, 1 for inputs.
        places: returns where each of the tensor's lies in the stored one, [size] int32.
    """

    axis: int
    places: Callable[[LayerSpec], npt.NDArray[np.int32]]


def check_heads(fields: ConfigFields) -> int:
    """Returns the size of a head, after looking at what would make arithmetic of the rest impossible."""
    hidden, num_heads = fields.peek("hidden_size"), fields.peek("num_attention_heads")
    if min(hidden, num_heads) < 1:
        raise ModelError(f"'embedding_length' and 'attention.head_count' in {fields.source} must be positive")
    head_dim = fields.peek("head_dim", hidden // num_heads or 1)
    if head_dim % 2 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ModelError(
            f"heads must have an even size up to {MAX_HEAD_DIM} for rotary positions, not {head_dim}",
            param="attention.key_length",
        )
    if fields.peek("attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"'attention.value_length' in {fields.source} must be the size of a head ({head_dim})",
            param="attention.value_length",
        )
    return head_dim


def _says_all(_file: GGUFFile, _fields: ConfigFields) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One GGUF architecture, as data.

    Attributes:
        paired: the rows of q and k are stored for rotation of neighbours.
        names: what it calls fields that only some families have.
        fixed: fields that its files do not hold, and that are always so.
        translate: takes entries that are no fields of the family's config, and returns the fields that they stand for.
        sources: where modules lie, where that is not as in `SOURCES`.
        other_sources: where modules lie in files that lack a tensor of `sources`.
        recipes: what is computed from other tensors, in the files that have those; by module, or module and last part.
        orders: of tensors whose outputs or inputs lie in another order; by module, or module and last part.
        head_size: reads how many numbers of a head rotation knows of; None where nothing is turned.
        local_base: the base of rotation in layers with a window, if it is not said, where those turn by another than global
            layers; 0 for the same base; None where all layers turn alike.
        global_base: the base of rotation, if it is not said.
        rope: what its YaRN says beside what files hold.
        rope_entries: parameters of its YaRN by the entries that hold them, and by what those are to be multiplied.
        unread: entries that only say again what others say.
        buffers: tensors that nothing uses.
        root_of_head: what llama.cpp scales scores by when there are that many layers: the root of hidden_size by heads in place
            of the size of a head (the 27B sizes of Gemma, whose files do not say so).
    """

    family: Family
    paired: bool = False
    names: Names = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    translate: Callable[[GGUFFile, ConfigFields], Mapping[str, Any]] = _says_all
    sources: Mapping[str, Source] = field(default_factory=dict)
    other_sources: Mapping[str, Source] = field(default_factory=dict)
    recipes: Mapping[str, TensorRecipe] = field(default_factory=dict)
    orders: Mapping[str, Order] = field(default_factory=dict)
    head_size: Callable[[ConfigFields], int] | None = check_heads
    local_base: float | None = None
    global_base: float = 10000.0
    rope: Mapping[str, Any] = field(default_factory=dict)
    rope_entries: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    buffers: re.Pattern[str] | None = None
    root_of_head: int = 0


def take_by_layer(fields: ConfigFields, name: str) -> list[int]:
    """Returns an entry's number for each layer: a file has one for all layers, or a list.

    Raises:
        ModelError: it is absent, or a list of something else.
    """
    fields.need(name)
    stored, num_layers = fields.name_of(name), fields.peek("num_hidden_layers")
    value = fields.take_any(name)
    try:
        numbers = list(value.numbers()) if isinstance(value, GGUFArray) else [value] * min(num_layers, 1 << 16)
    except ValueError:
        numbers = []
    if len(numbers) < num_layers or any(type(number) not in (int, bool) for number in numbers):
        raise ModelError(
            f"{stored!r} in {fields.source} must hold a whole number for each of {num_layers} layers", param=stored
        )
    return numbers[:num_layers]  # behind them are those of layers that predict further tokens


def has_tensor(file: GGUFFile, name: str) -> bool:
    """Whether any layer has the tensor, such as "attn_q_norm.weight"."""
    return any(stored.startswith("blk.") and stored.split(".", 2)[2] == name for stored in file.tensors)
