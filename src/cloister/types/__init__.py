"""Shared types: requests, steps, scopes, threats, events, clocks, errors, configuration.

Nothing here does I/O but `gguf`, which reads the head of a file for the two rooms that need it; nothing here imports another
room.
"""
