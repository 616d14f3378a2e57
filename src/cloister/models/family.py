"""A model family as data: how its decoder differs from a plain Llama."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal, TypeAlias

from cloister.backends.encoder_spec import EncoderSpec
from cloister.backends.spec import (
    Activation,
    AnyAttentionSpec,
    AttentionSpec,
    DecoderSpec,
    MlpSpec,
    MoeSpec,
    RopeSpec,
    StateSpec,
    StreamsSpec,
)
from cloister.backends.vision import AnyVisionSpec
from cloister.models.config import ConfigFields
from cloister.models.rope import RopeReader, see_everything
from cloister.models.sources import Source

PLAIN_TENSORS: Mapping[str, Source] = {
    "embed": Source("model.embed_tokens"),
    "norm": Source("model.norm"),
    "head": Source("lm_head"),
    "attention_norm": Source("model.layers.{}.input_layernorm"),
    "q": Source("model.layers.{}.self_attn.q_proj"),
    "k": Source("model.layers.{}.self_attn.k_proj"),
    "v": Source("model.layers.{}.self_attn.v_proj"),
    "o": Source("model.layers.{}.self_attn.o_proj"),
    "q_norm": Source("model.layers.{}.self_attn.q_norm"),
    "k_norm": Source("model.layers.{}.self_attn.k_norm"),
    "mlp_norm": Source("model.layers.{}.post_attention_layernorm"),
    "gate": Source("model.layers.{}.mlp.gate_proj"),
    "up": Source("model.layers.{}.mlp.up_proj"),
    "down": Source("model.layers.{}.mlp.down_proj"),
}
"""Of Llama, and of all that follow it."""


AttentionReader: TypeAlias = Callable[
    [ConfigFields, tuple[int, int, int], int | None], tuple[Sequence[AnyAttentionSpec | None], int]
]
StateReader: TypeAlias = Callable[[ConfigFields, int, int, Activation], Sequence[StateSpec | None]]
FeedForwards: TypeAlias = Sequence[MlpSpec | MoeSpec | None]


@dataclass(frozen=True, slots=True)
class MtpForm:
    """How checkpoints keep layers behind the last that predict further tokens (`models.mtp`).

    Attributes:
        num_layers: the field of config.json that counts them.
        layer: what begins the names of one, with {} for its number.
        is_behind: their numbers go on behind the model's own; else they begin with 0, and all names begin with "mtp.".
        projection: the name in a layer of what merges embedding and hidden state, by which a layer behind the last is known.
        tensors: where the modules lie that a layer of the model has not; {} is the layer's prefix.
        refused: fields that ask for what is not computed.
    """

    num_layers: str
    layer: str
    is_behind: bool
    tensors: Mapping[str, Source]
    projection: str = ""
    refused: tuple[str, ...] = ()


MTP_BEHIND: Final = MtpForm(
    "num_nextn_predict_layers",
    "model.layers.{}",
    is_behind=True,
    projection="eh_proj",
    tensors={
        "merge_embedding_norm": Source("{}.enorm"),
        "merge_hidden_norm": Source("{}.hnorm"),
        "merge": Source("{}.eh_proj"),
        "norm": Source("{}.shared_head.norm"),
    },
)
"""Of DeepSeek-V3, and GLM-4.5 after it."""
MTP_APART: Final = MtpForm(
    "mtp_num_hidden_layers",
    "mtp.layers.{}",
    is_behind=False,
    tensors={
        "merge_embedding_norm": Source("mtp.pre_fc_norm_embedding", added=1.0),
        "merge_hidden_norm": Source("mtp.pre_fc_norm_hidden", added=1.0),
        "merge": Source("mtp.fc"),
        "norm": Source("mtp.norm", added=1.0),
    },
    refused=("mtp_use_dedicated_embeddings",),
)
"""Of Qwen3-Next and Qwen3.5, which store the weights of norms less one."""


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """A config.json of a decoder with a vision tower, taken apart.

    Attributes:
        text: the decoder's fields.
        spec: the tower; None where it is not computed, and the model reads text only.
        unknown: fields outside of them of which nothing is known.
    """

    text: Mapping[str, Any]
    spec: AnyVisionSpec | None
    unknown: tuple[str, ...] = ()


class Bias(Enum):
    """Whether projections carry a bias: a boolean config field says so, or the family does."""

    NEVER = "never"
    ALWAYS = "always"
    FIELD = "field"


@dataclass(frozen=True, slots=True)
class Ends:
    """What a decoder does before its first layer and after its last (`backends.spec.DecoderSpec`)."""

    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    streams: StreamsSpec | None = None


def _turn_all(fields: ConfigFields, reader: RopeReader, windows: Sequence[int | None]) -> Sequence[RopeSpec | None]:
    return [reader.read(fields)] * len(windows)


def _take_num_layers(fields: ConfigFields) -> int:
    return fields.take_size("num_hidden_layers")


def _scale_by_size(_fields: ConfigFields, head_dim: int, num_layers: int) -> Sequence[float]:
    return [head_dim**-0.5] * num_layers


def _as_they_are(_fields: ConfigFields, layers: list[AttentionSpec]) -> list[AttentionSpec]:
    return layers


def _feed_alike(_fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> FeedForwards:
    return [mlp] * num_layers


def _plain_ends(_fields: ConfigFields, _hidden: int) -> Ends:
    return Ends()


@dataclass(frozen=True)
class Family:
    """One family, by the name of its class in transformers. What differs from layer to layer is read by a function.

    Attributes:
        architecture: entry of `architectures` in config.json.
        model_type: what `model_type` in config.json must be.
        other_model_types: what it may be beside that: models of the same build under a name of their own.
        max_positions: when the config has none.
        names: what the config calls a field; the names of Llama are those of this package. The first that is there counts.
        defaults: of fields, by those names, where they differ from Llama's.
        only: fields that would change the model, and the only value with which it is computed.
        harmless: fields that change no logit of this family.
        qkv_bias, output_bias: biases in attention; FIELD reads `attention_bias`.
        mlp_bias: FIELD reads `mlp_bias`.
        norm, norm_bias, pre_norm, post_norm: as in `backends.spec`.
        qk_norm: over what q and k are normalised, if they are.
        qk_norm_field: the field that says whether they are, if there is one.
        gated: feed-forwards have a gate.
        grouped: heads may share KV heads and have a size of their own: `num_key_value_heads` and `head_dim` exist.
        widening: `intermediate_size` by the size of a token, when the config has none; None where it must.
        softcap: scores are capped at `attn_logit_softcapping`.
        sinks: as in `backends.spec.AttentionSpec`.
        parallel: whether blocks are parallel, or the field that says so.
        learned_positions: positions are learned, and nothing is turned.
        partial_rotary: how much of a head is turned when the config does not say; None where it is always all of it.
        rope_types: what this family means by a kind of scaling.
        num_layers: reads how many layers there are.
        attentions: reads the attention of each layer, and the positions that can be used, of (hidden_size, layers,
            `max_position_embeddings`) and the greatest length of a sequence; None where it is grouped-query attention, which
            the fields above and four functions below describe.
        windows: reads the window of each layer.
        ropes: reads what each layer turns by.
        scales: reads what multiplies q . k in each layer.
        gated_attention: the outputs of attention are gated (`q_gate`).
        attention_scales: fields of the config by what they set in `backends.spec.AttentionSpec`.
        states: reads the mixer with a state of each layer, of `hidden_size`, layers, and the activation; None where no layer
            has one. A layer that has one has no attention, but where both are side by side.
        side_by_side: layers with a state have attention too.
        one_part: a layer with a feed-forward has no attention either.
        refine: reads what else differs from layer to layer in attention; given are the specs that all of the above describe.
        feed_forwards: reads each layer's feed-forward; given is the dense one.
        ends: reads `Ends`.
        residual_scale: the field that says what multiplies the outputs of a block, if there is one.
        encoder: makes an encoder of the spec that the other fields give; None for decoders.
        tensors: canonical module -> where it lies in the checkpoint. Modules of experts are `experts.gate`, and so on. A tensor
            that lies elsewhere than the others of its module has an entry of its own.
        mtp: how checkpoints keep layers that predict further tokens, if they have any.
        prefix: what every name begins with but the head's; a checkpoint of the bare decoder lacks it.
        buffers: names in old checkpoints of what is no weight.
        vision: takes the config of a decoder with a vision tower apart; None where there is no tower.
    """

    name: str
    architecture: str
    model_type: str
    max_positions: int
    other_model_types: tuple[str, ...] = ()
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    only: Mapping[str, object] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    qkv_bias: Bias = Bias.NEVER
    output_bias: Bias = Bias.NEVER
    mlp_bias: Bias = Bias.NEVER
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: Literal["head", "projection"] | None = None
    qk_norm_field: str | None = None
    gated: bool = True
    grouped: bool = True
    widening: int | None = None
    softcap: bool = False
    sinks: bool = False
    parallel: str | bool = False
    learned_positions: bool = False
    partial_rotary: float | None = None
    rope_types: Mapping[str, str] = field(default_factory=dict)
    num_layers: Callable[[ConfigFields], int] = _take_num_layers
    attentions: AttentionReader | None = None
    windows: Callable[[ConfigFields, int], Sequence[int | None]] = see_everything
    ropes: Callable[[ConfigFields, RopeReader, Sequence[int | None]], Sequence[RopeSpec | None]] = _turn_all
    scales: Callable[[ConfigFields, int, int], Sequence[float]] = _scale_by_size
    refine: Callable[[ConfigFields, list[AttentionSpec]], list[AttentionSpec]] = _as_they_are
    gated_attention: bool = False
    attention_scales: Mapping[str, str] = field(default_factory=dict)
    states: StateReader | None = None
    side_by_side: bool = False
    one_part: bool = False
    feed_forwards: Callable[[ConfigFields, MlpSpec, int], FeedForwards] = _feed_alike
    ends: Callable[[ConfigFields, int], Ends] = _plain_ends
    residual_scale: str | None = None
    encoder: Callable[[ConfigFields, DecoderSpec], EncoderSpec] | None = None
    tensors: Mapping[str, Source] = field(default_factory=lambda: PLAIN_TENSORS)
    mtp: MtpForm = MTP_BEHIND
    prefix: str = "model."
    buffers: re.Pattern[str] = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
    vision: Callable[[Mapping[str, Any]], VisionConfig] | None = None
