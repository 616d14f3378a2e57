"""What `general.architecture` of a GGUF file stands for, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cloister.models.families.gemma2 import GEMMA2
from cloister.models.families.gemma3 import GEMMA3
from cloister.models.families.gpt2 import GPT2
from cloister.models.families.gpt_neox import GPT_NEOX
from cloister.models.families.granite import GRANITE
from cloister.models.families.llama import LLAMA
from cloister.models.families.mixtral import MIXTRAL
from cloister.models.families.olmo2 import OLMO2
from cloister.models.families.phi3 import PHI3
from cloister.models.families.qwen2 import QWEN2
from cloister.models.families.qwen2_moe import QWEN2_MOE
from cloister.models.families.qwen3 import QWEN3
from cloister.models.families.qwen3_moe import QWEN3_MOE
from cloister.models.families.smollm3 import SMOLLM3
from cloister.models.family import Family
from cloister.models.sources import Source

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
        root_of_head: what llama.cpp scales scores by when there are that many layers: the root of hidden_size by heads in place
            of the size of a head (the 27B sizes of Gemma, whose files do not say so).
    """

    family: Family
    paired: bool = False
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict)
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
}
MIXTRAL_AS_LLAMA = Architecture(MIXTRAL, paired=True, names=_EXPERTS)
"""What "llama" stands for in a file with experts."""
