"""Every family that Cloister knows, one file each, by the architecture name of config.json."""

from collections.abc import Mapping

from cloister.models.families.gemma2 import GEMMA2
from cloister.models.families.gemma3 import GEMMA3
from cloister.models.families.gpt2 import GPT2
from cloister.models.families.gpt_neox import GPT_NEOX
from cloister.models.families.granite import GRANITE
from cloister.models.families.llama import LLAMA
from cloister.models.families.mistral import MISTRAL
from cloister.models.families.mixtral import MIXTRAL
from cloister.models.families.olmo2 import OLMO2
from cloister.models.families.opt import OPT
from cloister.models.families.phi3 import PHI3
from cloister.models.families.qwen2 import QWEN2
from cloister.models.families.qwen2_moe import QWEN2_MOE
from cloister.models.families.qwen3 import QWEN3
from cloister.models.families.qwen3_moe import QWEN3_MOE
from cloister.models.families.smollm3 import SMOLLM3
from cloister.models.family import Family

FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        LLAMA, QWEN2, QWEN3, MISTRAL, MIXTRAL, QWEN2_MOE, QWEN3_MOE, GEMMA2, GEMMA3, PHI3, GPT2, OPT, GPT_NEOX, SMOLLM3,
        GRANITE, OLMO2,
    )
}  # fmt: skip
