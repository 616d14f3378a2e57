"""Samplers by name: the specification in numpy, and the native program on each instruction set of this machine."""

from __future__ import annotations

import numpy as np

from cloister.backends.availability import why_no_kernels
from cloister.backends.base import (
    Capability,
    FloatArray,
    ForwardBatch,
    IntArray,
    KVLayout,
    SamplingMetadata,
    StepOutput,
    Wants,
)
from cloister.backends.native import make_native_backend
from cloister.backends.native.program import NativeProgram
from cloister.backends.spec import DecoderSpec
from cloister.executor.program_executor import ProgramExecutor
from tests.history_program import HistoryProgram

NUMPY = "numpy"
KERNELS: tuple[str, ...] = ()
if why_no_kernels() is None:
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


def make_drawing_program(kernels: str, vocab_size: int, num_threads: int = 2) -> NativeProgram:
    """A native program without layers."""
    backend = make_native_backend(num_threads=num_threads, device="cpu", kernels=kernels)
    spec = DecoderSpec("blank", vocab_size, 1, (), 0.0, 16, tied_embeddings=True)
    program = backend.build(spec, BlankWeights(vocab_size), KVLayout(1, 16))
    assert isinstance(program, NativeProgram)
    return program


def make_sampler(name: str, vocab_size: int, num_threads: int = 2) -> ProgramExecutor:
    if name == NUMPY:
        return ProgramExecutor(HistoryProgram(vocab_size=vocab_size, num_blocks=1, block_size=1), vocab_size)
    return ProgramExecutor(make_drawing_program(name, vocab_size, num_threads), vocab_size)


def draw(program: NativeProgram, logits: FloatArray, draws: SamplingMetadata) -> list[int]:
    return program.sample(logits, draws).tolist()


class DrawingHistoryProgram(HistoryProgram):
    """Samples tokens itself, natively; counts how often it is asked for logits instead."""

    capabilities = Capability.SAMPLING
    num_logits = 0

    def __init__(self, *, kernels: str = "", **settings: int) -> None:
        super().__init__(**settings)
        self._drawing = make_drawing_program(kernels or KERNELS[0], self.vocab_size)

    def step(self, batch: ForwardBatch, wants: Wants) -> StepOutput:
        self._check(wants)
        self.batches.append(batch)
        self.num_logits += wants.logits
        logits = self.compute(batch)
        top = self._drawing.find_top(logits, wants.num_top)
        if wants.sampling is None:
            return StepOutput(logits=logits, top=top)
        tokens = self._choose(logits, wants.sampling, wants)
        finite = np.isfinite(logits).all(axis=1)[wants.sampling["row"]]
        return StepOutput(tokens=np.where(finite, tokens, -1).astype(np.int32), top=top)

    def sample(self, logits: FloatArray, sampling: SamplingMetadata) -> IntArray:
        return self._drawing.sample(logits, sampling)

    def _choose(self, logits: FloatArray, sampling: SamplingMetadata, wants: Wants) -> IntArray:
        return self._drawing.sample(logits, sampling)
