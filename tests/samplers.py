"""Samplers by name: the specification in numpy, and the native program on each instruction set of this machine."""

from __future__ import annotations

import numpy as np

from cloister.backends import native
from cloister.backends.base import DrawArray, DrawingProgram, FloatArray, ForwardBatch, IntArray, KVLayout
from cloister.backends.native import make_native_backend
from cloister.backends.spec import DecoderSpec
from cloister.runner.drawing import ProgramSampler
from cloister.runner.sampling import Sampler
from tests.history_program import HistoryProgram

NUMPY = "numpy"
KERNELS: tuple[str, ...] = ()
if native.available() is None:
    from cloister.backends.native import _native

    KERNELS = tuple(_native.kernel_names())
SAMPLERS = (NUMPY, *KERNELS)


class BlankWeights:
    """Tokens that are all alike, for programs that are only asked to draw (protocol `backends.base.Weights`)."""

    def __init__(self, vocab_size: int) -> None:
        self._tensors = {"embed.weight": np.zeros((vocab_size, 1), np.float32), "norm.weight": np.ones(1, np.float32)}

    def names(self):
        return tuple(self._tensors)

    def shape(self, name):
        return self._tensors[name].shape

    def form(self, name):
        return None

    def read(self, name):
        return self._tensors[name]

    def __iter__(self):
        return iter(self._tensors.items())


def make_drawing_program(kernels: str, vocab_size: int, num_threads: int = 2) -> DrawingProgram:
    """A native program without layers."""
    backend = make_native_backend(num_threads=num_threads, device="cpu", kernels=kernels)
    spec = DecoderSpec("blank", vocab_size, 1, (), 0.0, 16, tied_embeddings=True)
    program = backend.build(spec, BlankWeights(vocab_size), KVLayout(1, 16))
    assert isinstance(program, DrawingProgram)
    return program


def make_sampler(name: str, vocab_size: int, num_threads: int = 2) -> Sampler | ProgramSampler:
    if name == NUMPY:
        return Sampler(vocab_size)
    return ProgramSampler(make_drawing_program(name, vocab_size, num_threads))


def draw(program: DrawingProgram, logits: FloatArray, draws: DrawArray) -> list[int]:
    return program.draw(logits, draws).tolist()


class DrawingHistoryProgram(HistoryProgram):
    """Chooses tokens itself, natively; counts how often it is asked for logits instead."""

    num_logits = 0

    def __init__(self, *, kernels: str = "", **settings: int) -> None:
        super().__init__(**settings)
        self._drawing = make_drawing_program(kernels or KERNELS[0], self.vocab_size)

    def forward(self, batch: ForwardBatch) -> FloatArray:
        self.num_logits += 1
        return super().forward(batch)

    def forward_draw(self, batch: ForwardBatch, draws: DrawArray) -> IntArray:
        logits = super().forward(batch)
        tokens = self._drawing.draw(logits, draws)
        return np.where(np.isfinite(logits).all(axis=1)[draws["row"]], tokens, -1).astype(np.int32)

    def draw(self, logits: FloatArray, draws: DrawArray) -> IntArray:
        return self._drawing.draw(logits, draws)
