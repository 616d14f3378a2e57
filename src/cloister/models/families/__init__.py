"""The model families, by the architecture name in config.json."""

from collections.abc import Mapping

from cloister.models.families.cohere2 import COHERE2
from cloister.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from cloister.models.families.deepseek_v32 import DEEPSEEK_V32
from cloister.models.families.encoders import (
    BERT,
    BERT_CLASSIFIER,
    MODERN_BERT,
    MODERN_BERT_CLASSIFIER,
    XLM_ROBERTA,
    XLM_ROBERTA_CLASSIFIER,
)
from cloister.models.families.falcon_h1 import FALCON_H1
from cloister.models.families.gemma import GEMMA2, GEMMA3
from cloister.models.families.gemma3n import GEMMA3N
from cloister.models.families.gemma_vision import GEMMA3_VISION
from cloister.models.families.glm import GLM4_MOE
from cloister.models.families.gpt import GPT2, GPT_NEOX, OPT
from cloister.models.families.gpt_oss import GPT_OSS
from cloister.models.families.granite_hybrid import GRANITE_HYBRID
from cloister.models.families.granite_moe import GRANITE_MOE
from cloister.models.families.lfm2 import LFM2, LFM2_MOE
from cloister.models.families.llama import GRANITE, LLAMA, OLMO2, PHI3, SMOLLM3
from cloister.models.families.llama4 import LLAMA4
from cloister.models.families.mamba2 import MAMBA2
from cloister.models.families.minimax import MINIMAX_M2
from cloister.models.families.ministral import MINISTRAL, MINISTRAL3
from cloister.models.families.mistral import MISTRAL, MIXTRAL
from cloister.models.families.nemotron_h import NEMOTRON_H
from cloister.models.families.olmo3 import OLMO3
from cloister.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from cloister.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from cloister.models.families.qwen3_next import QWEN3_NEXT
from cloister.models.families.qwen_vl import QWEN2_5_VL, QWEN2_VL, QWEN3_VL, QWEN3_VL_MOE
from cloister.models.families.smolvlm import IDEFICS3, SMOLVLM
from cloister.models.family import Family

FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        LLAMA, QWEN2, QWEN3, MISTRAL, MIXTRAL, QWEN2_MOE, QWEN3_MOE, GEMMA2, GEMMA3, PHI3, GPT2, OPT, GPT_NEOX, SMOLLM3,
        GRANITE, OLMO2, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE, OLMO3, MINIMAX_M2, COHERE2, GPT_OSS, SMOLVLM, IDEFICS3,
        BERT, BERT_CLASSIFIER, XLM_ROBERTA, XLM_ROBERTA_CLASSIFIER, MODERN_BERT, MODERN_BERT_CLASSIFIER,
        MAMBA2, QWEN3_NEXT, LFM2, LFM2_MOE, GRANITE_MOE, GRANITE_HYBRID, FALCON_H1, NEMOTRON_H, QWEN3_5, QWEN3_5_MOE,
        MINISTRAL, MINISTRAL3, LLAMA4, QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE, GEMMA3_VISION, GEMMA3N, DEEPSEEK_V32,
    )
}  # fmt: skip
