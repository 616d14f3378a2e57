"""The native back end: chooses the instruction set, counts the memory, packs weights and builds programs."""

from __future__ import annotations

from cloister.backends.base import KVLayout, MemoryNeed, Weights
from cloister.backends.native import _native
from cloister.backends.native.model import PackedModel, pack_model, packed_model_bytes
from cloister.backends.native.packing import LAYOUT, Kind, Packer
from cloister.backends.native.program import KV_KINDS, NativeProgram
from cloister.backends.native.store import PackedStore
from cloister.backends.spec import DecoderSpec, LayerSpec
from cloister.types.errors import ConfigError

NUMERICS = 3  # raise it when an answer may change in its last bit
_NUM_BUFFERS = 11  # of a program, each of whole pages
_MOST_PARTIAL_BYTES = 64 << 20  # cpp/program.cpp


class NativeBackend:
    """Builds programs on the native kernels (protocol `backends.base.Backend`).

    Args:
        num_threads: threads for arithmetic.
        device: "cpu".
        dtype: of weights that come as numbers, of activations and of KV: "float32" or "bfloat16".
        kv_dtype: of KV: None for `dtype`, or one of `KV_KINDS`.
        store: where packed models are kept; None keeps none.
        kernels: an instruction set to use in place of the best that the processor has.

    Raises:
        ConfigError: an argument is not one of those.
    """

    def __init__(
        self,
        *,
        num_threads: int,
        device: str,
        dtype: str,
        kv_dtype: str | None = None,
        store: PackedStore | None = None,
        kernels: str | None = None,
    ) -> None:
        if device != "cpu":
            raise ConfigError(f"the native back end computes on the cpu, not on {device!r}", param="device")
        if dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"the native back end has the types float32, bfloat16, not {dtype!r}", param="dtype")
        if num_threads < 1:
            raise ConfigError("num_threads must be at least 1", param="num_threads")
        self._kv_dtype = kv_dtype or dtype
        if self._kv_dtype not in KV_KINDS or (dtype == "float32") != (self._kv_dtype == "float32"):
            raise ConfigError(f"KV of type {self._kv_dtype!r} does not go with {dtype}", param="kv_dtype")
        names = _native.kernel_names()
        if kernels is not None and kernels not in names:
            raise ConfigError(f"this processor runs the kernels {', '.join(names)}, not {kernels!r}", param="kernels")
        self.kernels = kernels or names[0]
        self._dense = Kind.F32 if dtype == "float32" else Kind.BF16
        self._pool = _native.Pool(num_threads)
        self._store = store
        self.fingerprint = f"native-{NUMERICS}-{LAYOUT}-{self.kernels}-{dtype}-{self._kv_dtype}"

    def need(self, spec: DecoderSpec, weights: Weights, *, block_size: int, max_batched_tokens: int) -> MemoryNeed:
        """Says what `build` and `forward` will take (`backends.base.Backend.need`)."""
        return MemoryNeed(
            weights_bytes=packed_model_bytes(spec, weights, self._dense),
            kv_block_bytes=sum(
                _native.kv_block_bytes(
                    KV_KINDS[self._kv_dtype], layer.attention.num_kv_heads, layer.attention.head_dim, block_size
                )
                for layer in spec.layers
            ),
            activations_bytes=max_batched_tokens * _row_bytes(spec)
            + self._pool.num_threads * _scratch_bytes(spec, self.kernels)
            + _partial_bytes(spec, max_batched_tokens, self._pool.num_threads)
            + _rotation_bytes(spec),
            logit_row_bytes=4 * spec.vocab_size,
        )

    def build(self, spec: DecoderSpec, weights: Weights, kv: KVLayout, *, identity: str | None = None) -> NativeProgram:
        """Packs the weights, or reads them as they were packed before, and makes an empty cache.

        Raises:
            ConfigError: the block size is outside 1 to 256, or there is no block.
        """
        if not 1 <= kv.block_size <= 256 or kv.num_blocks < 1:
            raise ConfigError("a KV cache needs at least one block, of 1 to 256 positions", param="block_size")
        model = self._pack(spec, weights, identity)
        return NativeProgram(spec, model, kv, kernels=self.kernels, pool=self._pool, kv_dtype=self._kv_dtype)

    def _pack(self, spec: DecoderSpec, weights: Weights, identity: str | None) -> PackedModel:
        packer = Packer(self._pool, self._dense)
        if self._store is None or identity is None:
            return pack_model(spec, weights, packer)
        identity = f"{identity} {self._dense.name}"
        model = self._store.load(identity)
        if model is None:
            model = pack_model(spec, weights, packer)
            self._store.save(identity, model)
        return model


def _row_bytes(spec: DecoderSpec) -> int:
    """Bytes that one token takes in the buffers of a step: residual, QKV, queries, mixed values, inputs of two products."""
    widest = max(
        6 * layer.mlp.intermediate_size
        + 14 * (layer.attention.num_heads + layer.attention.num_kv_heads) * layer.attention.head_dim
        for layer in spec.layers
    )
    return 12 * spec.hidden_size + widest


def _scratch_bytes(spec: DecoderSpec, kernels: str) -> int:
    """Bytes that one thread works in: gathered keys, scores, an unpacked panel, candidates of a draw; and a row of its own."""

    def widest(layer: LayerSpec) -> int:
        heads, kv_heads, head_dim = layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_dim
        inputs = max(spec.hidden_size, heads * head_dim, layer.mlp.intermediate_size)
        return _native.scratch_bytes(kernels, heads, kv_heads, head_dim, inputs, spec.vocab_size)

    return max(map(widest, set(spec.layers))) + 4 * spec.hidden_size + (1 + _NUM_BUFFERS) * 4096


def _partial_bytes(spec: DecoderSpec, max_batched_tokens: int, num_threads: int) -> int:
    """Bytes of what single splits of keys give, where a few tasks of 256 rows are shared by a team."""
    if num_threads == 1:
        return 0
    num_splits = -(-spec.max_positions // 256)
    widest = max(
        min(max_batched_tokens * layer.attention.num_heads, 4 * num_threads * 256) * (layer.attention.head_dim + 48)
        for layer in spec.layers
    )
    return min(4 * widest * num_splits, _MOST_PARTIAL_BYTES)


def _rotation_bytes(spec: DecoderSpec) -> int:
    """Bytes of the cosines and sines of all positions."""
    return sum(8 * len(rope.inv_freq) * spec.max_positions for rope in {layer.attention.rope for layer in spec.layers})
