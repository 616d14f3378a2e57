"""Shared types: requests, steps, scopes, threats, events, clocks, errors, configuration.

Nothing here does I/O but `gguf` and `text_files`, which packages above share; nothing here imports another package.
"""
