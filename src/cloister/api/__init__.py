"""The engine in your own program: `LLM` for plain code, `AsyncLLM` for an event loop of yours. No server, no socket."""

from cloister.api.asynchronous import AsyncLLM
from cloister.api.completions import Completion, CompletionOutput, Message, Progress, Prompt
from cloister.api.synchronous import LLM, open_llm

__all__ = ["LLM", "AsyncLLM", "Completion", "CompletionOutput", "Message", "Progress", "Prompt", "open_llm"]
