"""Tools: how models of each family write that they call one, one family a file, found by name.

Importing this package registers every family in `FAMILIES`.
"""

from cloister.text.tools import deepseek, hermes, listed, llama3, mistral_args, qwen3_coder
from cloister.text.tools.base import FAMILIES, Tool, ToolCallFormat
from cloister.text.tools.detection import detect_family
from cloister.text.tools.parser import read_calls

__all__ = [
    "FAMILIES",
    "Tool",
    "ToolCallFormat",
    "deepseek",
    "detect_family",
    "hermes",
    "listed",
    "llama3",
    "mistral_args",
    "qwen3_coder",
    "read_calls",
]
