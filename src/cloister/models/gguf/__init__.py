"""GGUF files: a model in one file, as llama.cpp writes and publishes them."""

from cloister.models.gguf.opening import OpenedGGUF, open_gguf

__all__ = ["OpenedGGUF", "open_gguf"]
