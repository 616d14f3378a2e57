"""Clients that others wrote, unchanged, each driven by a script of its own: `python -m benchmarks.clients [NAME ...]`."""
