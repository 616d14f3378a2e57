"""Ollama's API (its docs/api.md)."""
