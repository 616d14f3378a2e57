"""The words that every room shares: requests, steps, scopes, threats, events, clocks, errors, configuration.

Nothing here does I/O, and nothing here imports another room.
"""
