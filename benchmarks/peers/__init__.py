"""Cloister and other engines on the same work, in turn, in one session; `python -m benchmarks.peers`.

`worker` and what it imports run in the Python of each engine, with nothing but its standard library and that engine.
"""
