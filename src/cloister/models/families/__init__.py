"""Every family that Cloister knows, one file each, by the architecture name of config.json."""

from collections.abc import Mapping

from cloister.models.families.llama import LLAMA
from cloister.models.families.qwen2 import QWEN2
from cloister.models.families.qwen3 import QWEN3
from cloister.models.family import Family

FAMILIES: Mapping[str, Family] = {family.architecture: family for family in (LLAMA, QWEN2, QWEN3)}
