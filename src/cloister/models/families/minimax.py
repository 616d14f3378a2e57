"""MiniMax-M2 (MiniMax 2025): sigmoid experts chosen with a bias in every layer, norms over whole projections of q and k."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.backends.spec import MlpSpec, MoeSpec, RopeSpec
from cloister.models.config import ConfigFields
from cloister.models.families.mistral import MIXTRAL
from cloister.models.family import Family
from cloister.models.rope import RopeReader
from cloister.models.sources import TRAINING_OF_EXPERTS, Source, take_counts


def _turn_part(fields: ConfigFields, reader: RopeReader, windows: Sequence[int | None]) -> Sequence[RopeSpec | None]:
    """The configs of the hub say `rotary_dim`, the numbers of a head that are turned."""
    scaling, parameters = fields.take_any("rope_scaling"), fields.take_any("rope_parameters")
    partial, size = fields.take("partial_rotary_factor", float, None), fields.take("rotary_dim", int, None)
    if partial is None and size is not None:
        partial = (size + 0.25) / reader.head_dim  # a quarter more, so that rounding down gives `size` again
    rope = reader.read_parameters(scaling or parameters or {}, fields.take("rope_theta", float), partial=partial)
    return [rope] * len(windows)


def _feed(fields: ConfigFields, mlp: MlpSpec, num_layers: int) -> Sequence[MlpSpec | MoeSpec]:
    return [MoeSpec(*take_counts(fields), mlp, scoring="sigmoid", correction_bias=True)] * num_layers


MINIMAX_M2 = Family(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    max_positions=196608,
    names=MIXTRAL.names,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5000000.0},
    only={"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"},
    harmless=TRAINING_OF_EXPERTS,
    qk_norm="projection",
    partial_rotary=1.0,
    ropes=_turn_part,
    feed_forwards=_feed,
    tensors={**MIXTRAL.tensors, "router.e_score_correction_bias": Source("model.layers.{}.block_sparse_moe")},
)
