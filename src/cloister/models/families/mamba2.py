"""Mamba 2 (Dao and Gu, arXiv:2405.21060; Codestral Mamba): one mixer with a state in each layer, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.backends.spec import Activation, MlpSpec, StateSpec
from cloister.models.config import ConfigFields
from cloister.models.family import Family, FeedForwards
from cloister.models.mixers import INITIALISATION, take_mamba2
from cloister.models.sources import Source
from cloister.types.errors import ModelError

_MAX_POSITIONS = 262144
"""A config has no limit; Codestral Mamba was tested up to here (Mistral 2024)."""


def _attend_nowhere(
    _fields: ConfigFields, sizes: tuple[int, int, int], max_model_len: int | None
) -> tuple[Sequence[None], int]:
    _, num_layers, max_positions = sizes
    return [None] * num_layers, max(max_positions, max_model_len or 0)


def _feed_nowhere(_fields: ConfigFields, _mlp: MlpSpec, num_layers: int) -> FeedForwards:
    return [None] * num_layers


def _read_states(fields: ConfigFields, hidden: int, num_layers: int, activation: Activation) -> Sequence[StateSpec]:
    if fields.take("rescale_prenorm_residual", bool, False):
        raise ModelError(
            f"rescale_prenorm_residual is true in {fields.source}: it is for the first weights of a training run, but "
            "transformers 5 divides those of a checkpoint too, each mixer.out_proj by the square root of the number of layers; "
            "set it to false to use the weights as they are stored",
            param="rescale_prenorm_residual",
        )
    biased = fields.take("use_bias", bool, False)
    inner = fields.take_size("mamba_expand") * hidden
    return [take_mamba2(fields, inner, activation, projection_bias=biased, output_bias=biased)] * num_layers


MAMBA2 = Family(
    name="mamba2",
    architecture="Mamba2ForCausalLM",
    model_type="mamba2",
    max_positions=_MAX_POSITIONS,
    names={
        "rms_norm_eps": ("layer_norm_epsilon",), "mamba_n_heads": ("num_heads",), "mamba_d_head": ("head_dim",),
        "mamba_n_groups": ("n_groups",), "mamba_d_state": ("state_size",), "mamba_d_conv": ("conv_kernel",),
        "mamba_chunk_size": ("chunk_size",), "mamba_expand": ("expand",), "mamba_conv_bias": ("use_conv_bias",),
    },
    defaults={
        "rms_norm_eps": 1e-5, "mamba_expand": 2, "mamba_d_conv": 4, "mamba_n_groups": 8, "mamba_d_state": 128,
        "mamba_chunk_size": 256,
    },
    harmless=(INITIALISATION - {"rescale_prenorm_residual"}) | {"residual_in_fp32"},  # residuals always are
    widening=1,
    attentions=_attend_nowhere,
    states=_read_states,
    feed_forwards=_feed_nowhere,
    tensors={
        "embed": Source("backbone.embeddings"),
        "norm": Source("backbone.norm_f"),
        "head": Source("lm_head"),
        "attention_norm": Source("backbone.layers.{}.norm"),
        "mixer": Source("backbone.layers.{}.mixer"),
        "mixer.in": Source("backbone.layers.{}.mixer.in_proj"),
        "mixer.conv": Source("backbone.layers.{}.mixer.conv1d", filters=True),
        "mixer.norm": Source("backbone.layers.{}.mixer.norm"),
        "mixer.out": Source("backbone.layers.{}.mixer.out_proj"),
    },
    prefix="backbone.",
)  # fmt: skip
