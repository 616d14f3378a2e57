"""Processes content in short-lived workers: one worker for each sealed request, forked from a zygote that never sees content.

The front has network access and forwards sealed bytes only. A worker receives them from the front, the secrets of this one
request from the key service, and its own channel to the engine. It exits when its response is sealed, and the kernel
reclaims its memory.
"""
