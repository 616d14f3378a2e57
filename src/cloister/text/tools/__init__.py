"""Tools: how models of each family write that they call one, one family a file, found by name.

Importing this package registers every family in `FAMILIES`.
"""

from cloister.text.tools import deepseek, hermes, llama3, mistral, qwen3_coder
from cloister.text.tools.base import FAMILIES, Tool, ToolCallFormat
from cloister.text.tools.parser import detect_family, read_calls

__all__ = [
    "FAMILIES",
    "Tool",
    "ToolCallFormat",
    "deepseek",
    "detect_family",
    "hermes",
    "llama3",
    "mistral",
    "qwen3_coder",
    "read_calls",
]
