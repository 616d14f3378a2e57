"""Command R7B and Command A (Cohere 2025, arXiv:2504.00698): parallel blocks with one norm, local layers turned in neighbouring
pairs, global layers not turned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cloister.backends.spec import RopeSpec
from cloister.models.config import ConfigFields
from cloister.models.family import PLAIN_TENSORS, Bias, Ends, Family
from cloister.models.rope import RopeReader, see_by_pattern


def _turn_local(fields: ConfigFields, reader: RopeReader, windows: Sequence[int | None]) -> Sequence[RopeSpec | None]:
    rope = replace(reader.read(fields), interleaved=True)
    return [None if window is None else rope for window in windows]


def _read_ends(fields: ConfigFields, _hidden: int) -> Ends:
    return Ends(logit_scale=fields.take("logit_scale", float, 0.0625))


COHERE2 = Family(
    name="cohere2",
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    max_positions=8192,
    names={"rms_norm_eps": ("layer_norm_eps",)},
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "tie_word_embeddings": True},
    only={
        "use_qk_norm": False,
        "use_parallel_block": True,
        "use_gated_activation": True,
        "position_embedding_type": "rope_gptj",
    },
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    norm="layer",
    parallel=True,
    windows=see_by_pattern,
    ropes=_turn_local,
    ends=_read_ends,
    tensors={**PLAIN_TENSORS, "mlp_norm": PLAIN_TENSORS["attention_norm"]},
)
