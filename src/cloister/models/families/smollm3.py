"""SmolLM3 (Bakouch et al. 2025): Llama whose every fourth layer turns nothing."""

from collections.abc import Sequence

from cloister.backends.spec import RopeSpec
from cloister.models.config import ConfigFields
from cloister.models.family import Bias, Family
from cloister.models.rope import RopeReader
from cloister.models.windows import see_listed_windows
from cloister.types.errors import ModelError


def _turn_some(fields: ConfigFields, reader: RopeReader, windows: Sequence[int | None]) -> Sequence[RopeSpec | None]:
    interval, turned = fields.take_size("no_rope_layer_interval", 4), fields.take_any("no_rope_layers")
    if turned is None:
        turned = [(number + 1) % interval for number in range(len(windows))]
    if not isinstance(turned, list) or len(turned) < len(windows):
        raise ModelError("no_rope_layers must list 1 or 0 for each of num_hidden_layers", param="no_rope_layers")
    rope = reader.read(fields)
    return [rope if turned[number] else None for number in range(len(windows))]


SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    max_positions=32768,
    defaults={"num_key_value_heads": 4, "rope_theta": 2000000.0, "tie_word_embeddings": True},
    harmless=frozenset(("max_window_layers",)),
    qkv_bias=Bias.FIELD,
    output_bias=Bias.FIELD,
    mlp_bias=Bias.FIELD,
    windows=see_listed_windows,
    ropes=_turn_some,
)
