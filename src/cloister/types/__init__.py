"""Shared types: requests, steps, scopes, threats, events, clocks, errors, configuration.

Only `gguf` and `text_files`, which higher packages share, do I/O. No module here imports another package.
"""
