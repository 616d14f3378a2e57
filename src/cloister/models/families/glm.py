"""GLM-4.5 and 4.6 (GLM-4.5 Team, arXiv:2508.06471): half of each head is turned, and the mixtures are those of DeepSeek-V3."""

from cloister.models.families.deepseek import EXPERT_NAMES, EXPERT_TENSORS, feed_v3
from cloister.models.family import PLAIN_TENSORS, Bias, Family
from cloister.models.sources import TRAINING_OF_EXPERTS

GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    max_positions=131072,
    names=EXPERT_NAMES,
    defaults={
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1,
    },
    harmless=TRAINING_OF_EXPERTS | {"num_nextn_predict_layers"},
    qkv_bias=Bias.FIELD,
    qk_norm="head",
    qk_norm_field="use_qk_norm",
    partial_rotary=0.5,
    feed_forwards=feed_v3,
    tensors={**PLAIN_TENSORS, **EXPERT_TENSORS},
)  # fmt: skip
