"""What a stream of text feels while somebody else's image is encoded: the longest time between two of its tokens."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import console, make_parser
from cloister.engine import EngineCore
from cloister.launch.engine import build_engine
from cloister.models.image_processing import open_image_processor
from cloister.types.config import EngineConfig
from cloister.types.events import Abort, Ended, Submit
from cloister.types.images import ImageTile
from cloister.types.request import Request, SamplingParams
from tests.vision_factory import VOCAB, make_picture, make_vision_model

TEXT = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64,
}  # fmt: skip
VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 512,
    "patch_size": 16,
}  # fmt: skip
PROCESSOR = {"max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 1024}}
NUM_TOKENS = 64
"""Positions of a tile, as in SmolVLM-256M."""


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-tiles", type=int, default=3)
    parser.add_argument("--num-streams", type=int, default=4, help="texts that are answered meanwhile")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = make_vision_model(Path(directory), text=TEXT, vision=VISION, processor=PROCESSOR, scale_factor=4)
        core = build_engine(
            EngineConfig(
                model=str(path), backend="native", dtype=options.dtype, num_threads=options.num_threads or 2,
                max_model_len=2048, kv_memory_mb=512, max_num_seqs=8, profile="open", speculate="none", prefix_cache=False,
                weights_cache="",
            )
        )  # fmt: skip
        opened = open_image_processor(path)
        assert opened is not None
        tiles = opened[0].cut(make_picture(1024, 1024, 1))[: options.num_tiles]
        seen = Observer(core)
        quiet = seen.measure_quiet(options.num_streams)
        alone_s = seen.show(tiles)
        seen.reset()
        seen.start_streams(options.num_streams)
        beside_s = seen.show(tiles)
        gaps = seen.gaps()
    for name, found in (("nobody shows an image", quiet), ("somebody does", gaps)):
        spread = ", ".join(f"{share}% {np.percentile(found, share) * 1e3:.0f} ms" for share in (50, 99))
        console.print(f"{name}: {len(found)} gaps, {spread}, longest {max(found) * 1e3:.0f} ms")
    told = f"alone {alone_s:.1f} s, beside {options.num_streams} streams {beside_s:.1f} s"
    console.print(f"first token of {options.num_tiles} tiles: {told}")
    return 0


class Observer:
    """Steps an engine and notes when the first stream of text gets its tokens."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._number = 0
        self._names: list[str] = []
        self._times: list[float] = []

    def reset(self) -> None:
        for name in self._names:
            self._core.input_queue.put(Abort(name))
        self._names, self._times = [], []
        while self._core.step() is not None:
            pass

    def start_streams(self, num_streams: int) -> None:
        self._names = [self._submit([5 + 7 * i % 200 for i in range(32)]) for _ in range(num_streams)]
        while len(self._times) < 5:
            self._step()
        self._times = []

    def measure_quiet(self, num_streams: int) -> list[float]:
        self.start_streams(num_streams)
        while len(self._times) < 200:
            self._step()
        found = self.gaps()
        self.reset()
        return found

    def gaps(self) -> list[float]:
        return np.diff(self._times).tolist()

    def show(self, tiles: list[bytes]) -> float:
        """Asks about an image, and returns the time to the first token."""
        prompt = [5, 6, *[VOCAB - 1] * (NUM_TOKENS * len(tiles)), 7, 8]
        images = tuple(
            ImageTile(offset=2 + NUM_TOKENS * i, num_tokens=NUM_TOKENS, digest=bytes([i]) * 32, pixels=pixels)
            for i, pixels in enumerate(tiles)
        )
        began_s = time.monotonic()
        name = self._submit(prompt, images)
        while name not in self._step():
            pass
        self._core.input_queue.put(Abort(name))
        return time.monotonic() - began_s

    def _submit(self, prompt: list[int], images: tuple[ImageTile, ...] = ()) -> str:
        self._number += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
        request = Request(request_id=f"r{self._number}", token_ids=prompt, images=images, sampling=sampling, timeout_s=600)
        self._core.input_queue.put(Submit(request))
        return request.request_id

    def _step(self) -> set[str]:
        outputs = self._core.step()
        if outputs is None:
            self._core.input_queue.wait(0.005)
            return set()
        got = {output.request_id for output in outputs.outputs if output.token_ids}
        assert not any(isinstance(event, Ended) and event.error for event in outputs.events)
        if self._names and self._names[0] in got:
            self._times.append(time.monotonic())
        return got


if __name__ == "__main__":
    sys.exit(main())
