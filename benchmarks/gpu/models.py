"""Checkpoints of random weights in each number format, written beside the tests so that whole answers need not wait."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from benchmarks.peers.shapes import complete_config, draw, iter_tensors, write_tensors
from cloister.backends.tensors import GroupedTensor, ProgressiveTensor, Tensor
from cloister.models.quantized.encoding import Encoder

Form: TypeAlias = Literal["bf16", "W4A16", "W4A8", "W8A8"]
FORMS: Final[tuple[Form, ...]] = ("bf16", "W4A16", "W4A8", "W8A8")
"""Numbers of matrices and of what meets them; W4A8 is QoQ, with its groups of 128. Vocabularies stay in bf16."""
LAYER_BITS: Final[Mapping[Form, float]] = {"bf16": 16.0, "W4A16": 4.125, "W4A8": 4.125, "W8A8": 8.0}
PEAKS: Final[Mapping[Form, str]] = {"bf16": "bfloat16", "W4A16": "bfloat16", "W4A8": "int8", "W8A8": "int8"}
"""Which of the device's limits bounds the products."""
WRITTEN: Final = "written"
"""A file that stands beside the checkpoints when no more of them will come."""
_GROUP: Final = 128
TINY: Final[Mapping[str, Any]] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 512,
}  # fmt: skip
"""In place of any shape where Triton's interpreter stands for a device."""


def write_model(shape: str, form: Form, folder: Path, *, tiny: bool) -> None:
    """Writes one checkpoint; its folder has its name when it is whole."""
    random = np.random.default_rng(0)
    config = {**complete_config(shape), **(TINY if tiny else {})}
    encoder = Encoder()
    for name, size in iter_tensors(config):
        is_projection = len(size) == 2 and "embed" not in name
        encoder.add(name, _draw_codes(random, form, size) if is_projection and form != "bf16" else draw(random, name, size))
    if form != "bf16":
        config["quantization_config"] = encoder.describe("random codes")
    partial = folder.with_suffix(".partial")
    write_tensors(config, encoder.parts, partial)
    partial.rename(folder)


def _draw_codes(random: np.random.Generator, form: Form, size: tuple[int, ...]) -> Tensor:
    """Random codes whose weights have a standard deviation of 0.02, as those in bf16."""
    num_out, num_in = size
    if form == "W8A8":
        codes = random.integers(1, 256, (num_out, num_in), np.uint8)
        return GroupedTensor(codes, np.full((num_out, 1), 0.02 / 73, np.float32), None, None, 8, num_in, "int8")
    codes, num_groups = random.integers(0, 16, (num_out, num_in), np.uint8), num_in // _GROUP
    if form == "W4A16":
        scales = np.full((num_out, num_groups), np.float16(0.02 / 4.6), np.float32)
        return GroupedTensor(codes, scales, None, None, 4, _GROUP, "bfloat16")
    channels, eights = np.full(num_out, 0.02 / 37, np.float32), np.full((num_out, num_groups), 8, np.uint8)
    return ProgressiveTensor(codes, channels, eights, eights, _GROUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes every shape in every format, in the order in which they are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    jobs = [(shape, form, options.folder / f"{shape}-{form}") for shape in options.shapes for form in FORMS]
    try:
        with ProcessPoolExecutor(max_workers=min(len(jobs), max(1, len(os.sched_getaffinity(0)) // 2))) as pool:
            for future in [pool.submit(write_model, *job, tiny=options.tiny) for job in jobs]:
                future.result()
    finally:
        (options.folder / WRITTEN).touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
