"""Tool calls: the formats in which model families write them, one file each.

Importing this package registers every family in `FAMILIES`.
"""

from cloister.text.tools import deepseek, glm, harmony, hermes, kimi, llama3, minimax, mistral, qwen3_coder
from cloister.text.tools.base import FAMILIES, Tool, ToolCallFormat, detect_family, read_calls

__all__ = [
    "FAMILIES",
    "Tool",
    "ToolCallFormat",
    "deepseek",
    "detect_family",
    "glm",
    "harmony",
    "hermes",
    "kimi",
    "llama3",
    "minimax",
    "mistral",
    "qwen3_coder",
    "read_calls",
]
