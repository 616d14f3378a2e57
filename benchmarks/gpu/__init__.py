"""The GPU path on a real device in under nine minutes: tests, kernels, hybrid batches and whole answers.

`python -m benchmarks.gpu` runs everything here; `python -m benchmarks.gpu.pack` makes a folder that does so on a machine
without a network.
"""
