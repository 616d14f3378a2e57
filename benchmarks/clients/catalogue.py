"""The clients: what each one is, what installs it, and the script that drives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
CPU_ONLY: Final[tuple[str, ...]] = ("torch==2.13.0+cpu",)


@dataclass(frozen=True, slots=True)
class Client:
    """One client.

    Attributes:
        title: as the table shows it.
        script: a file beside this one, called with the address of the server; it prints `client<TAB>check<TAB>result` for each.
        packages: what pip or npm installs, the client itself first; none for a program of the system.
        constraints: versions that pip may not leave.
        limit_s: time that the script may take.
        program: what prints the version if no package does, as the arguments of a command.
        sees: it sends images, to a server of its own with a small random model that has a vision tower.
    """

    title: str
    script: str
    packages: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    limit_s: float = 180.0
    program: tuple[str, ...] = ()
    sees: bool = False

    @property
    def is_npm(self) -> bool:
        """Whether npm installs it, not pip."""
        return self.script.endswith(".mjs")


CLIENTS: Final[Mapping[str, Client]] = {
    "openai-python": Client("openai (Python)", "openai_python.py", ("openai",)),
    "openai-npm": Client("openai (npm)", "openai_node.mjs", ("openai", "zod")),
    "ai-sdk": Client("AI SDK", "ai_sdk.mjs", ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod")),
    "ai-sdk-images": Client(
        "AI SDK, images", "ai_sdk_images.mjs", ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible"), sees=True
    ),
    "langchain": Client("langchain-openai", "langchain_client.py", ("langchain-openai",)),
    "continue": Client("Continue's adapters", "continue_adapters.mjs", ("@continuedev/openai-adapters",)),
    "instructor": Client("instructor", "instructor_client.py", ("instructor",)),
    "litellm": Client("litellm", "litellm_client.py", ("litellm", "mcp")),
    "llamaindex": Client(
        "LlamaIndex",
        "llamaindex_client.py",
        (
            "llama-index-core",
            "llama-index-llms-openai-like",
            "llama-index-embeddings-openai-like",
            "llama-index-llms-ollama",
        ),
    ),
    "pydantic-ai": Client("Pydantic AI", "pydantic_ai_client.py", ("pydantic-ai-slim[openai]",)),
    "haystack": Client("Haystack", "haystack_client.py", ("haystack-ai",)),
    "anthropic": Client("anthropic (Python)", "anthropic_client.py", ("anthropic",)),
    "ollama-python": Client("ollama (Python)", "ollama_python.py", ("ollama",)),
    "ollama-npm": Client("ollama (npm)", "ollama_node.mjs", ("ollama",)),
    "llm": Client("llm", "llm_command.sh", ("llm",)),
    "curl": Client("curl", "curl_command.sh", program=("curl", "--version")),
    "open-webui": Client("open-webui", "open_webui_server.py", ("open-webui",), CPU_ONLY, limit_s=600),
    "lm-eval": Client("lm-eval", "lm_eval_command.py", ("lm-eval[api]", "transformers"), CPU_ONLY, limit_s=600),
    "schemathesis": Client("schemathesis", "schemathesis_command.py", ("schemathesis",), limit_s=600),
    "guidellm": Client("guidellm", "guidellm_command.py", ("guidellm",), CPU_ONLY, limit_s=600),
    "aiperf": Client("aiperf", "aiperf_command.py", ("aiperf",), CPU_ONLY, limit_s=600),
}
