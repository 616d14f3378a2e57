"""Measurements of the real engine and scheduler, run by hand: `python -m benchmarks.orca`. See docs/bench.md."""
