"""What sizes and times of sealed chunks tell of an answer: captures, classifiers, bits. `python -m benchmarks.traffic`."""
