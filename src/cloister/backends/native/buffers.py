"""What the buffers of a step take (cpp/program.cpp), counted before anything is allocated."""

from __future__ import annotations

from cloister.backends.native import _native
from cloister.backends.spec import DecoderSpec, LayerSpec, MlpSpec, MoeSpec

_PAGE = 4096  # every buffer takes whole ones
_NUM_BUFFERS = 11
_NUM_MIXTURE_BUFFERS = 6
_MOST_PARTIAL_BYTES = 64 << 20  # cpp/program.cpp


def buffer_bytes(spec: DecoderSpec, *, num_tokens: int, num_threads: int, kernels: str, is_wide: bool) -> int:
    """Returns the bytes of all buffers after a step of `num_tokens`, without logits.

    Args:
        is_wide: inputs of products are float32.
    """
    return (
        num_tokens * _row_bytes(spec, is_wide)
        + num_threads * _scratch_bytes(spec, kernels)
        + _partial_bytes(spec, num_tokens, num_threads)
        + _rotation_bytes(spec)
    )


def _row_bytes(spec: DecoderSpec, is_wide: bool) -> int:
    """Bytes that one token takes in the buffers of a step: residual, QKV, queries, mixed values, inputs of two products."""
    return 12 * spec.hidden_size + max(
        14 * (layer.attention.num_heads + layer.attention.num_kv_heads) * layer.attention.head_dim
        + _branch_bytes(layer, spec.hidden_size, is_wide)
        for layer in spec.layers
    )


def _branch_bytes(layer: LayerSpec, hidden: int, is_wide: bool) -> int:
    """What one token takes for a layer's feed-forward or mixture, and where branches wait to be joined."""
    mlp = layer.mlp
    beside = _padded(hidden) * 4 if layer.post_norm or layer.residual_scale != 1 or _shared(mlp) else 0
    early = _input_bytes(hidden, is_wide) if layer.parallel else 0
    if isinstance(mlp, MlpSpec):
        return 6 * mlp.intermediate_size + beside + early
    routing = _input_bytes(hidden, True) + 4 * _padded(mlp.num_experts + mlp.shared_gate) + 12 * mlp.num_chosen + 4
    pair = _input_bytes(hidden, is_wide) + 6 * _padded(mlp.expert.intermediate_size) + 4 * _padded(hidden)
    shared = _shared(mlp)
    early += _input_bytes(hidden, is_wide) if shared else 0  # where the shared one is in another number format
    return routing + max(mlp.num_chosen * pair, 6 * shared.intermediate_size if shared else 0) + beside + early


def _shared(mlp: MlpSpec | MoeSpec) -> MlpSpec | None:
    return mlp.shared if isinstance(mlp, MoeSpec) else None


def _input_bytes(length: int, is_wide: bool) -> int:
    """Bytes of one row of inputs: chunks of 64 bytes, two sums for each, a scale for 32 inputs at most and a total."""
    return -(-length // (16 if is_wide else 32)) * (64 + 8) + 4 * -(-length // 32) + 8


def _padded(length: int) -> int:
    return -(-length // 32) * 32


def _scratch_bytes(spec: DecoderSpec, kernels: str) -> int:
    """Bytes that one thread works in: gathered keys, scores, an unpacked panel, candidates of a draw; and a row of its own."""

    def widest(layer: LayerSpec) -> int:
        heads, kv_heads, head_dim = layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_dim
        inputs = max(spec.hidden_size, heads * head_dim, *(mlp.intermediate_size for mlp in _feed_forwards(layer.mlp)))
        return _native.scratch_bytes(kernels, heads, kv_heads, head_dim, inputs, spec.vocab_size)

    num_buffers = 1 + _NUM_BUFFERS + max(map(_num_more_buffers, set(spec.layers)))
    return max(map(widest, set(spec.layers))) + 4 * spec.hidden_size + num_buffers * _PAGE


def _feed_forwards(mlp: MlpSpec | MoeSpec) -> list[MlpSpec]:
    if isinstance(mlp, MlpSpec):
        return [mlp]
    return [mlp.expert] if mlp.shared is None else [mlp.expert, mlp.shared]


def _num_more_buffers(layer: LayerSpec) -> int:
    """Buffers that only some layers need."""
    waits = layer.post_norm or layer.residual_scale != 1 or _shared(layer.mlp) is not None
    return waits + layer.parallel + _NUM_MIXTURE_BUFFERS * isinstance(layer.mlp, MoeSpec)


def _partial_bytes(spec: DecoderSpec, num_tokens: int, num_threads: int) -> int:
    """Bytes of what single splits of keys give, where a few tasks of 256 rows are shared by a team."""
    if num_threads == 1:
        return 0
    num_splits = -(-spec.max_positions // 256)
    widest = max(
        min(num_tokens * layer.attention.num_heads, 4 * num_threads * 256) * (layer.attention.head_dim + 48)
        for layer in spec.layers
    )
    return min(4 * widest * num_splits, _MOST_PARTIAL_BYTES)


def _rotation_bytes(spec: DecoderSpec) -> int:
    """Bytes of the cosines and sines of all positions."""
    ropes = {layer.attention.rope for layer in spec.layers}
    return sum(8 * len(rope.inv_freq) * spec.max_positions for rope in ropes if rope is not None)
