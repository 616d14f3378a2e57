"""The engine in your own program: `LLM` for plain code, `AsyncLLM` for an event loop of yours. No server, no socket."""

from cloister.llm.asynchronous import AsyncLLM
from cloister.llm.completions import Completion, CompletionOutput
from cloister.llm.progress import Progress
from cloister.llm.prompts import Message, Prompt
from cloister.llm.synchronous import LLM, open_llm

__all__ = ["LLM", "AsyncLLM", "Completion", "CompletionOutput", "Message", "Progress", "Prompt", "open_llm"]
