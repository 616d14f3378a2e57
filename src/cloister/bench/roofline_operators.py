"""Counts the operations and bytes of every operator in one step of a decoder. Pure.

Operators are counted separately, as in a textbook table of arithmetic intensity: each reads its inputs from memory and writes
its output there. A multiplication and an addition are two operations. The step's limit (`roofline.StepRoofline.limit_s`)
accounts for fusion: there, activations stay on the chip.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from cloister.backends.encoder_spec import EncoderSpec
from cloister.backends.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec
from cloister.types.errors import ConfigError

NORM_FLOPS = 4
"""Per element: square, add, times the reciprocal root, times the weight (Zhang and Sennrich 2019, equation 4)."""
ROPE_FLOPS = 3
"""Per element: four multiplications and two additions turn a pair (Su et al. 2021, equation 34)."""
SOFTMAX_FLOPS = 5
"""Per score: scale, compare, subtract, exponential, add; an exponential counts as one operation."""
ACTIVATION_FLOPS: Mapping[str, int] = {"silu": 4, "gelu": 5, "gelu_tanh": 9, "relu": 1}
"""Per element, without the product with `up`; an exponential, an erf or a tanh counts as one operation."""

Unit = Literal["matrix", "vector", "link"]


@dataclass(frozen=True, slots=True)
class Numbers:
    """Widths of numbers, in bits. Fractions include scales: Q4_0 takes 4.5 bits per weight.

    Attributes:
        head_bits: of embedding and head, which are wider in many formats.
    """

    weights_bits: float = 16.0
    activation_bits: float = 16.0
    kv_bits: float = 16.0
    head_bits: float = 16.0


@dataclass(frozen=True, slots=True)
class Work:
    """One step over sequences of equal length.

    Attributes:
        name: "prefill" or "decode".
        num_queries: positions that the step computes, of each sequence.
        context: keys of each sequence after the step.
        square: count every score of the [num_queries, context] square, as textbook tables do, not only those inside the causal
            mask.
    """

    name: str
    num_seqs: int
    num_queries: int
    context: int
    square: bool = False

    @classmethod
    def prefill(cls, num_tokens: int, num_seqs: int, square: bool = False) -> Work:
        """Whole prompts of `num_tokens`."""
        return cls("prefill", num_seqs, num_tokens, num_tokens, square)

    @classmethod
    def decode(cls, context: int, num_seqs: int, square: bool = False) -> Work:
        """One token of each sequence, which then has `context` keys including its own."""
        return cls("decode", num_seqs, 1, context, square)

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.num_queries

    def num_pairs(self, window: int | None) -> int:
        """Returns the number of pairs of a query and a visible key, over all sequences, for one head."""
        widest = self.context if window is None else min(window, self.context)
        if self.square:
            return self.num_tokens * widest
        first = self.context - self.num_queries + 1  # keys that the first query sees
        num_growing = max(0, min(self.num_queries, widest - first))  # queries that see fewer keys than the window
        growing = num_growing * first + num_growing * (num_growing - 1) // 2
        return self.num_seqs * (growing + (self.num_queries - num_growing) * widest)

    def num_keys(self, window: int | None) -> int:
        """Returns keys that any query sees, over all sequences."""
        return self.num_seqs * (self.context if window is None else min(self.context, self.num_queries + window - 1))


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of a layer or of the ends of a decoder; figures are of one call.

    Attributes:
        shape: description of the computation.
        part: the operator of a program that computes it, as named in `backends.base.OperatorSpan`.
        unit: which part of a chip computes it.
        bits: the wider operand of a product.
        link_bytes: sent to other chips.
        count: calls in a step.
    """

    name: str
    shape: str
    part: str
    unit: Unit
    num_flops: float
    weights_bytes: float = 0.0
    activations_bytes: float = 0.0
    kv_bytes: float = 0.0
    link_bytes: float = 0.0
    bits: float = 32.0
    count: int = 1

    @property
    def num_bytes(self) -> float:
        """Bytes read from and written to memory."""
        return self.weights_bytes + self.activations_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.num_flops / self.num_bytes if self.num_bytes else 0.0


def list_operators(spec: DecoderSpec, work: Work, numbers: Numbers, num_chips: int = 1) -> list[Operator]:
    """Returns every operator of a step in order, equal layers together; of `num_chips` chips, the part of one.

    Raises:
        ConfigError: it is an encoder, cannot be cut into that many parts, or has latent attention, layers with a state,
            layers without attention or feed-forward, or several residual streams.
    """
    if isinstance(spec, EncoderSpec):
        raise ConfigError("the roofline counts decoders only, not encoders", param="model")
    if any(layer.state is not None or layer.attention is None or layer.mlp is None for layer in spec.layers):
        raise ConfigError(
            "the roofline counts layers of attention and feed-forward only, not those with a state", param="model"
        )
    if not all(isinstance(layer.attention, AttentionSpec) for layer in spec.layers):
        raise ConfigError("the roofline counts grouped-query attention only, not latent attention", param="model")
    if spec.streams is not None:
        raise ConfigError("the roofline counts decoders of one residual stream only", param="model")
    count = _Counting(work, numbers, spec.hidden_size, num_chips)
    part = cut(spec, num_chips)
    kinds = Counter(part.layers)
    operators = [count.embed()]
    for layer, num_layers in kinds.items():
        window = layer.grouped_attention.window
        label = "" if len(kinds) == 1 else " (full)" if window is None else f" (window {window})"
        operators += [replace(op, name=op.name + label, count=op.count * num_layers) for op in count.layer(layer)]
    return [*operators, *count.end(part.vocab_size)]


def cut(spec: DecoderSpec, num_chips: int) -> DecoderSpec:
    """Returns the part of a decoder that one of `num_chips` chips computes under tensor parallelism (Shoeybi et al. 2019).

    Query heads, the feed-forward and the vocabulary are cut; KV heads too, and repeated where there are fewer than chips.

    Raises:
        ConfigError: the model does not divide.
    """
    if num_chips == 1:
        return spec
    layers = {layer: _cut_layer(layer, num_chips) for layer in set(spec.layers)}
    vocab_size = -(-spec.vocab_size // num_chips)
    return replace(spec, layers=tuple(layers[layer] for layer in spec.layers), vocab_size=vocab_size)


def _cut_layer(layer: LayerSpec, num_chips: int) -> LayerSpec:
    attention, mlp = layer.grouped_attention, layer.feed_forward
    num_kv_heads = attention.num_kv_heads
    shares_kv = num_kv_heads % num_chips == 0 or num_chips % num_kv_heads == 0
    widths = [part.intermediate_size for part in _mlps_of(mlp)]
    if attention.num_heads % num_chips or any(width % num_chips for width in widths) or not shares_kv:
        columns = " and ".join(map(str, widths))
        raise ConfigError(
            f"{attention.num_heads} heads, {num_kv_heads} KV heads and {columns} columns of the feed-forward do not divide "
            f"over {num_chips} chips; choose a divisor of all three",
            param="tp",
        )
    heads = replace(attention, num_heads=attention.num_heads // num_chips, num_kv_heads=max(1, num_kv_heads // num_chips))
    return replace(layer, attention=heads, mlp=_cut_feed_forward(mlp, num_chips))


def _mlps_of(mlp: MlpSpec | MoeSpec) -> list[MlpSpec]:
    if isinstance(mlp, MlpSpec):
        return [mlp]
    return [mlp.expert] if mlp.shared is None else [mlp.expert, mlp.shared]


def _cut_feed_forward(mlp: MlpSpec | MoeSpec, num_chips: int) -> MlpSpec | MoeSpec:
    """Cuts the columns of every feed-forward; each chip has a part of all experts."""
    if isinstance(mlp, MlpSpec):
        return replace(mlp, intermediate_size=mlp.intermediate_size // num_chips)
    expert, *shared = (replace(part, intermediate_size=part.intermediate_size // num_chips) for part in _mlps_of(mlp))
    return replace(mlp, expert=expert, shared=shared[0] if shared else None)


class _Counting:
    """Counts operators of one step."""

    def __init__(self, work: Work, numbers: Numbers, hidden: int, num_chips: int) -> None:
        self._work, self._numbers, self._hidden, self._num_chips = work, numbers, hidden, num_chips
        self._rows = work.num_tokens

    def embed(self) -> Operator:
        rows, hidden = self._rows, self._hidden
        read, written = rows * hidden * self._numbers.head_bits / 8, self._activations(rows * hidden)
        return Operator(
            "embed", f"[{rows}] rows of {hidden}", "embed", "vector", 0, weights_bytes=read, activations_bytes=written
        )

    def layer(self, layer: LayerSpec) -> Iterator[Operator]:
        if layer.pre_norm:
            yield self._norm("attention norm", "norm", self._rows, self._hidden)
        yield from self._attention(layer.grouped_attention)
        if layer.post_norm:
            yield self._norm("attention post norm", "output", self._rows, self._hidden)
        yield from self._joined("attention", "output")
        if layer.pre_norm:
            yield self._norm("mlp norm", "mlp_norm", self._rows, self._hidden)
        yield from self._feed_forward(layer.feed_forward)
        if layer.post_norm:
            yield self._norm("mlp post norm", "down", self._rows, self._hidden)
        yield from self._joined("mlp", "down")

    def end(self, vocab_size: int) -> Iterator[Operator]:
        """Only the last position of a sequence gets logits."""
        rows, numbers = self._work.num_seqs, self._numbers
        yield self._norm("final norm", "norm", rows, self._hidden)
        yield self._project("head", "head", self._hidden, vocab_size, False, rows=rows, bits=numbers.head_bits)
        if self._num_chips > 1:
            sent = self._activations(rows * vocab_size * (self._num_chips - 1))
            yield Operator("all-gather", f"[{rows}, {vocab_size * self._num_chips}]", "head", "link", 0, link_bytes=sent)

    def _attention(self, spec: AttentionSpec) -> Iterator[Operator]:
        hidden, q_size, kv_size = self._hidden, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        yield self._project("q", "qkv", hidden, q_size, spec.qkv_bias)
        yield self._project("k", "qkv", hidden, kv_size, spec.qkv_bias)
        yield self._project("v", "qkv", hidden, kv_size, spec.qkv_bias)
        if spec.qk_norm:
            yield self._norm("q and k norm", "rope", self._rows * (spec.num_heads + spec.num_kv_heads), spec.head_dim)
        if spec.rope is not None:
            yield self._rope(spec, 2 * len(spec.rope.inv_freq))
        yield self._write_kv(kv_size)
        yield from self._attend(spec)
        yield self._project("o", "output", q_size, hidden, spec.output_bias)

    def _rope(self, spec: AttentionSpec, turned: int) -> Operator:
        num_heads = spec.num_heads + spec.num_kv_heads
        angles = 4 * self._rows * turned  # a cosine and a sine for each pair, in float32
        size = self._rows * num_heads * turned
        moved = self._activations(2 * size) + angles
        return Operator(
            "rope",
            f"[{self._rows}, {num_heads}, {turned}]",
            "rope",
            "vector",
            ROPE_FLOPS * size,
            activations_bytes=moved,
        )

    def _write_kv(self, kv_size: int) -> Operator:
        size = 2 * self._rows * kv_size
        return Operator(
            "KV write", f"[{self._rows}, 2, {kv_size}]", "rope", "vector", 0,
            activations_bytes=self._activations(size), kv_bytes=size * self._numbers.kv_bits / 8,
        )  # fmt: skip

    def _attend(self, spec: AttentionSpec) -> Iterator[Operator]:
        """Scores, softmax and values; a key is read once for all query heads that share it (Ainslie et al. 2023)."""
        work, numbers = self._work, self._numbers
        num_scores = work.num_pairs(spec.window) * spec.num_heads
        num_keys = work.num_keys(spec.window)
        q_size = self._rows * spec.num_heads * spec.head_dim
        product = Operator(
            "", "", "attention", "matrix", 2 * num_scores * spec.head_dim,
            activations_bytes=self._activations(q_size + num_scores),
            kv_bytes=num_keys * spec.num_kv_heads * spec.head_dim * numbers.kv_bits / 8,
            bits=max(numbers.activation_bits, numbers.kv_bits),
        )  # fmt: skip
        each = f"{work.num_seqs * spec.num_heads} x "
        num_keys //= work.num_seqs
        queries, head_dim = work.num_queries, spec.head_dim
        yield replace(product, name="scores QK^T", shape=f"{each}[{queries}, {head_dim}] x [{head_dim}, {num_keys}]")
        yield Operator(
            "softmax", f"{each}[{queries}, {num_keys}]", "attention", "vector", SOFTMAX_FLOPS * num_scores,
            activations_bytes=self._activations(2 * num_scores),
        )  # fmt: skip
        yield replace(product, name="values PV", shape=f"{each}[{queries}, {num_keys}] x [{num_keys}, {head_dim}]")

    def _feed_forward(self, spec: MlpSpec | MoeSpec) -> Iterator[Operator]:
        if isinstance(spec, MlpSpec):
            yield from self._mlp(spec, self._rows)
            return
        yield self._project("router", "gate_up", self._hidden, spec.num_experts, False)
        yield from self._experts(spec)
        if spec.shared is not None:
            for operator in self._mlp(spec.shared, self._rows):
                yield replace(operator, name=f"shared {operator.name}")

    def _experts(self, spec: MoeSpec) -> Iterator[Operator]:
        """All experts together: a token uses few, but a batch with evenly distributed choices reads the weights of many."""
        missed = (1 - spec.num_chosen / spec.num_experts) ** self._rows  # an expert that no token chose
        num_read = spec.num_experts * (1 - missed)
        for operator in self._mlp(spec.expert, self._rows * spec.num_chosen):
            yield replace(operator, name=f"experts' {operator.name}", weights_bytes=operator.weights_bytes * num_read)

    def _mlp(self, spec: MlpSpec, rows: int) -> Iterator[Operator]:
        wide = spec.intermediate_size
        names = ("gate", "up") if spec.gated else ("up",)
        for name in names:
            yield self._project(name, "gate_up", self._hidden, wide, spec.bias, rows=rows)
        flops, size = ACTIVATION_FLOPS[spec.activation] + spec.gated, rows * wide
        name = spec.activation.split("_")[0] + (" x up" if spec.gated else "")
        moved = self._activations((len(names) + 1) * size)
        yield Operator(name, f"[{rows}, {wide}]", "gate_up", "vector", flops * size, activations_bytes=moved)
        yield self._project("down", "down", wide, self._hidden, spec.bias, rows=rows)

    def _joined(self, name: str, part: str) -> Iterator[Operator]:
        """The sum over chips (each sends 2 (n - 1) / n of it in a ring), and the sum with the residual stream."""
        size, shape = self._rows * self._hidden, f"[{self._rows}, {self._hidden}]"
        if self._num_chips > 1:
            sent = self._activations(2 * size * (self._num_chips - 1) / self._num_chips)
            yield Operator(f"{name} all-reduce", shape, part, "link", 0, link_bytes=sent)
        yield Operator(f"{name} residual", shape, part, "vector", size, activations_bytes=self._activations(3 * size))

    def _norm(self, name: str, part: str, rows: int, size: int) -> Operator:
        return Operator(
            name, f"[{rows}, {size}]", part, "vector", NORM_FLOPS * rows * size,
            weights_bytes=self._activations(size), activations_bytes=self._activations(2 * rows * size),
        )  # fmt: skip

    def _project(
        self, name: str, part: str, num_in: int, num_out: int, bias: bool, *, rows: int | None = None, bits: float | None = None
    ) -> Operator:
        """A product with weights [num_in, num_out]; biases are as wide as activations."""
        rows = self._rows if rows is None else rows
        bits = self._numbers.weights_bits if bits is None else bits
        return Operator(
            name, f"[{rows}, {num_in}] x [{num_in}, {num_out}]", part, "matrix", rows * num_out * (2 * num_in + bias),
            weights_bytes=num_in * num_out * bits / 8 + self._activations(num_out * bias),
            activations_bytes=self._activations(rows * (num_in + num_out)),
            bits=max(bits, self._numbers.activation_bits),
        )  # fmt: skip

    def _activations(self, num_elements: float) -> float:
        return num_elements * self._numbers.activation_bits / 8
