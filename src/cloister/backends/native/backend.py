"""The native back end: chooses the instruction set, counts the memory, packs weights and builds programs."""

from __future__ import annotations

from cloister.backends.availability import load_torch
from cloister.backends.base import ImageEncoder, KVLayout, MemoryNeed, Program, Weights, check_ranges
from cloister.backends.kivi import KIVI, RECENT_WINDOW, check_block_size
from cloister.backends.native import _native
from cloister.backends.native.limits import check_computable
from cloister.backends.native.memory import Arena
from cloister.backends.native.model import PackedModel, pack_model, packed_model_bytes
from cloister.backends.native.packing import LAYOUT, PackedKind, Packer, buffer_bytes
from cloister.backends.native.program import KV_KINDS, NativeProgram, kv_block_bytes, range_block_bytes
from cloister.backends.native.rotation import describe_orders
from cloister.backends.native.states import draft_bytes, draft_state_bytes
from cloister.backends.native.store import PackedStore
from cloister.backends.native.streams import INPUT_TABLE, InputTable
from cloister.backends.ranges import has_plain_kv
from cloister.backends.spec import DecoderSpec
from cloister.backends.vision import AnyVisionSpec, tower_weights_bytes
from cloister.types.errors import ConfigError

NUMERICS = 6  # raise it when an answer may change in its last bit


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
        self._dense = PackedKind.F32 if dtype == "float32" else PackedKind.BF16
        self._pool = _native.Pool(num_threads)
        self._store = store
        self.fingerprint = f"native-{NUMERICS}-{LAYOUT}-{self.kernels}-{dtype}-{self._kv_dtype}"

    def need(self, spec: DecoderSpec, weights: Weights, *, block_size: int, max_batched_tokens: int) -> MemoryNeed:
        """Says what `build` and `step` will take (`backends.base.Backend.need`).

        Raises:
            ConfigError: the kernels do not compute such a decoder.
        """
        check_computable(spec, self._kv_dtype)
        is_packed = self._kv_dtype == KIVI
        if is_packed:
            check_block_size(block_size)
        layer_bytes = _layer_bytes(spec, self._kv_dtype, block_size)
        return MemoryNeed(
            weights_bytes=packed_model_bytes(spec, weights, self._dense) + self._tower_weights_bytes(spec),
            kv_block_bytes=sum(layer_bytes),
            kv_layer_bytes=layer_bytes,
            state_bytes=sum(4 * layer.state.state_size for layer in spec.layers if layer.state is not None),
            activations_bytes=buffer_bytes(
                spec,
                num_tokens=max_batched_tokens,
                num_threads=self._pool.num_threads,
                kernels=self.kernels,
                is_wide=self._dense is PackedKind.F32,
            )
            + self._tower_buffer_bytes(spec.vision),
            logit_row_bytes=4 * spec.vocab_size,
            draft_bytes=draft_bytes(spec),
            draft_state_bytes=self._pool.num_threads * draft_state_bytes(spec),
            mapped=() if spec.streams is None else (INPUT_TABLE,),
            recent_window=RECENT_WINDOW if is_packed else 0,
            recent_layer_bytes=_layer_bytes(spec, "bfloat16", block_size) if is_packed else (),
            range_block_bytes=range_block_bytes(spec, self._kv_dtype, block_size)
            if has_plain_kv(spec) and not is_packed
            else 0,
        )

    def build(
        self, spec: DecoderSpec, weights: Weights, kv: KVLayout, *, identity: str | None = None, beside: Program | None = None
    ) -> NativeProgram:
        """Packs the weights, or reads them as they were packed before, and makes an empty cache.

        Raises:
            ConfigError: the block size is outside 1 to 256, there is no block, or the kernels do not compute such a decoder.
            TypeError: `beside` is no program of this back end.
        """
        if spec.merges_hidden and not isinstance(beside, NativeProgram):
            raise TypeError("a module without an embedding and a head is built beside the program that lends both")
        check_computable(spec, self._kv_dtype)
        check_ranges(spec, kv)
        if not 1 <= kv.block_size <= 256 or kv.num_blocks < 1:
            raise ConfigError("a KV cache needs at least one block, of 1 to 256 positions", param="block_size")
        # a drafter has no groups of layers, and packs nothing
        kv_dtype = "bfloat16" if self._kv_dtype == KIVI and kv.recent_group is None else self._kv_dtype
        if kv_dtype == KIVI:
            check_block_size(kv.block_size)
        model, packer = self._pack(spec, weights, identity), Packer(self._pool, self._dense)
        return NativeProgram(
            spec,
            model,
            kv,
            kernels=self.kernels,
            pool=self._pool,
            kv_dtype=kv_dtype,
            packer=packer,
            table=None if spec.streams is None else InputTable(weights, packer),
            encoder=None if spec.vision is None else self._load_tower(spec.vision, weights),
            beside=beside if isinstance(beside, NativeProgram) else None,
        )

    def _tower_weights_bytes(self, spec: DecoderSpec) -> int:
        itemsize = 4 if self._dense is PackedKind.F32 else 2
        return 0 if spec.vision is None else tower_weights_bytes(spec.vision, spec.hidden_size, itemsize)

    def _tower_buffer_bytes(self, vision: AnyVisionSpec | None) -> int:
        if vision is None:
            return 0
        load_torch("cpu", "the image tower of this model")
        from cloister.backends.torch.vision import tower_bytes

        return self._pool.num_threads * tower_bytes(vision)

    def _load_tower(self, vision: AnyVisionSpec, weights: Weights) -> ImageEncoder:
        from cloister.backends.torch.vision import load_tower  # a model without a tower needs no torch

        dtype = "float32" if self._dense is PackedKind.F32 else "bfloat16"
        return load_tower(vision, weights, num_threads=self._pool.num_threads, dtype=dtype)

    def _pack(self, spec: DecoderSpec, weights: Weights, identity: str | None) -> PackedModel:
        packer = Packer(self._pool, self._dense, Arena())
        if self._store is None or identity is None:
            return pack_model(spec, weights, packer)
        identity = f"{identity} {self._dense.name}{describe_orders(spec)}"
        model = self._store.load(identity)
        if model is None or not model.fits(spec):
            model = pack_model(spec, weights, packer)
            self._store.save(identity, model)
        return model


def _layer_bytes(spec: DecoderSpec, kv_dtype: str, block_size: int) -> tuple[int, ...]:
    """Returns the bytes of a block of each layer's cache."""
    return tuple(kv_block_bytes(layer.attention, kv_dtype, block_size) if layer.attention else 0 for layer in spec.layers)
