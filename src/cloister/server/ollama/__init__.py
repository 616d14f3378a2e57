"""Ollama's API (its docs/api.md): the same engine under the paths, fields and lines that its clients know."""
