"""The torch back end: checks the device, counts the memory, builds programs."""

from __future__ import annotations

import math
from importlib.metadata import version
from importlib.util import find_spec

import torch

from cloister.backends.base import NO_RANGES, KVLayout, MemoryNeed, Program, Weights, check_ranges
from cloister.backends.encoder_spec import EncoderSpec
from cloister.backends.kivi import KIVI, RECENT_WINDOW, check_block_size
from cloister.backends.ranges import has_plain_kv
from cloister.backends.spec import DecoderSpec, LatentAttentionSpec, LayerSpec, kv_size, widest_feed_forward
from cloister.backends.torch.cuda.limits import check_computable, check_numbers
from cloister.backends.torch.cuda.memory import device_need
from cloister.backends.torch.encoder import EncoderProgram, encoder_need
from cloister.backends.torch.packing import packed_sizes
from cloister.backends.torch.program import TorchProgram, range_block_bytes
from cloister.backends.torch.schedule import Team
from cloister.backends.torch.streams import INPUT_TABLE, table_bytes
from cloister.backends.torch.vision import tower_bytes
from cloister.types.errors import ConfigError
from cloister.types.extras import install_command

NUMERICS = 1  # raise it when an answer may change in its last bit
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ATTENTION_BYTES = 16 << 20  # scores, gathered keys and running sums of one batch of units, per thread


class TorchBackend:
    """Builds programs that torch interprets (protocol `backends.base.Backend`).

    Args:
        num_threads: threads for arithmetic on a CPU.
        device: "cpu" or "cuda".
        dtype: "float32" or "bfloat16".
        numerics: "exact" keeps batch invariance; "fast" lets cuBLAS and FlashInfer compute on CUDA.
        kv_dtype: of KV: None for `dtype`, or "kivi2" on a CPU.

    Raises:
        ConfigError: an argument is not one of those, there is no CUDA device, or a library is missing.
    """

    def __init__(
        self, *, num_threads: int, device: str, dtype: str, numerics: str = "exact", kv_dtype: str | None = None
    ) -> None:
        if device not in ("cpu", "cuda"):
            raise ConfigError(f"the torch back end computes on cpu or cuda, not {device!r}", param="device")
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("torch finds no CUDA device here; choose the device cpu", param="device")
        if dtype not in DTYPES:
            raise ConfigError(f"the torch back end has the types {', '.join(DTYPES)}, not {dtype!r}", param="dtype")
        if num_threads < 1:
            raise ConfigError("num_threads must be at least 1", param="num_threads")
        check_libraries(device, dtype, numerics)
        if kv_dtype not in (None, dtype, KIVI) or (kv_dtype == KIVI and device != "cpu"):
            also = f", or on a CPU in {KIVI}" if kv_dtype != KIVI else f" on {device}"
            raise ConfigError(
                f"the torch back end keeps KV in {dtype}, as everything else{also}; leave kv_dtype out", param="kv_dtype"
            )
        self._packs = kv_dtype == KIVI
        self._device, self._dtype, self._is_exact = torch.device(device), DTYPES[dtype], numerics == "exact"
        self._team = Team(num_threads if device == "cpu" else 1)
        chip = torch.backends.cpu.get_cpu_capability() if device == "cpu" else torch.cuda.get_device_name()
        kernels = "" if device == "cpu" else f"-triton-{version('triton')}-{numerics}"
        self.fingerprint = (
            f"torch-{torch.__version__}-{chip}-{dtype}{kernels}-{NUMERICS}{'-' + KIVI if self._packs else ''}".replace(" ", "-")
        )

    def need(self, spec: DecoderSpec, weights: Weights, *, block_size: int, max_batched_tokens: int) -> MemoryNeed:
        """Says what `build` and `step` will take (`backends.base.Backend.need`)."""
        if self._device.type == "cuda":
            sizes = {"block_size": block_size, "max_batched_tokens": max_batched_tokens}
            check_computable(spec)
            check_numbers(weights)
            return device_need(spec, weights, self._dtype, **sizes, is_exact=self._is_exact)
        if isinstance(spec, EncoderSpec):
            if self._packs:
                raise ConfigError("an encoder keeps no KV; leave kv_dtype out", param="kv_dtype")
            return encoder_need(spec, weights, self._dtype, block_size=block_size, num_threads=self._team.num_threads)
        tables = ("positions.weight", INPUT_TABLE, "embed.weight")
        unheld = tables[:2] if spec.tied_embeddings else tables  # the head is a copy of a tied embedding
        held = sum(math.prod(weights.shape(name)) for name in weights.names() if name not in unheld)
        states = [layer.state for layer in spec.layers if layer.state is not None]
        layer_bytes = unpacked_bytes = tuple(
            (kv_size(layer.attention) if layer.attention else 0) * block_size * self._dtype.itemsize for layer in spec.layers
        )
        if self._packs:
            check_packable(spec, block_size)
            layer_bytes = tuple(
                sum(packed_sizes(layer.attention, block_size)) if layer.attention else 0 for layer in spec.layers
            )
        return MemoryNeed(
            weights_bytes=held * self._dtype.itemsize + (0 if spec.streams is None else table_bytes(weights)),
            kv_block_bytes=sum(layer_bytes),
            kv_layer_bytes=layer_bytes,
            state_bytes=4 * sum(state.state_size for state in states),
            activations_bytes=max_batched_tokens * _row_bytes(spec) + self._team.num_threads * self._thread_bytes(spec),
            draft_bytes=4 * sum(state.step_size for state in states),
            draft_state_bytes=4 * self._team.num_threads * max((state.state_size for state in states), default=0),
            recent_window=RECENT_WINDOW if self._packs else 0,
            recent_layer_bytes=unpacked_bytes if self._packs else (),
            range_block_bytes=range_block_bytes(spec, block_size, self._dtype) if has_plain_kv(spec) and not self._packs else 0,
            mapped=tables,
        )

    @staticmethod
    def _thread_bytes(spec: DecoderSpec) -> int:
        return max(_ATTENTION_BYTES, 0 if spec.vision is None else tower_bytes(spec.vision))

    def build(
        self, spec: DecoderSpec, weights: Weights, kv: KVLayout, *, identity: str | None = None, beside: Program | None = None
    ) -> Program:
        """Loads the weights and makes an empty cache.

        Raises:
            ConfigError: the block size is outside 1 to 256, or there is no block.
            TypeError: `beside` is no program of this back end.
        """
        if not 1 <= kv.block_size <= 256 or kv.num_blocks < 1:
            raise ConfigError("a KV cache needs at least one block, of 1 to 256 positions", param="block_size")
        if kv.ranges is not None and (self._device.type == "cuda" or isinstance(spec, EncoderSpec)):
            raise ConfigError(NO_RANGES, param="kv_layout")
        if self._device.type == "cuda":
            from cloister.backends.torch.cuda.program import CudaProgram  # needs triton, which a CPU does not

            return CudaProgram(spec, weights, kv, dtype=self._dtype, device=self._device, is_exact=self._is_exact)
        if isinstance(spec, EncoderSpec):
            return EncoderProgram(spec, weights, kv, team=self._team, dtype=self._dtype)
        check_ranges(spec, kv)
        if kv.recent_group is not None:
            check_packable(spec, kv.block_size)
        if spec.merges_hidden and not isinstance(beside, TorchProgram):
            raise TypeError("a module without an embedding and a head is built beside the program that lends both")
        lender = beside if isinstance(beside, TorchProgram) else None
        return TorchProgram(spec, weights, kv, team=self._team, dtype=self._dtype, device=self._device, beside=lender)


def check_packable(spec: DecoderSpec, block_size: int) -> None:
    """Raises ConfigError, which says what to choose, where KV of a model cannot be packed."""
    check_block_size(block_size)
    if any(isinstance(layer.attention, LatentAttentionSpec) for layer in spec.layers):
        raise ConfigError(
            f"latents of the family {spec.family!r} are not kept in {KIVI}; leave out --kv-dtype", param="kv_dtype"
        )


def check_libraries(device: str, dtype: str, numerics: str) -> None:
    """Raises ConfigError, which says what to install or to choose, where the settings and what is installed do not fit."""
    if numerics not in ("exact", "fast"):
        raise ConfigError(f"numerics must be exact or fast, not {numerics!r}", param="numerics")
    if device == "cuda" and find_spec("triton") is None:
        raise ConfigError(f"CUDA needs triton; {install_command('gpu')}", param="device")
    if numerics == "exact":
        return
    if device != "cuda":
        raise ConfigError("numerics fast needs a CUDA device; choose exact", param="numerics")
    if dtype != "bfloat16":
        raise ConfigError("numerics fast needs the dtype bfloat16", param="dtype")
    if find_spec("flashinfer") is None:
        raise ConfigError(f"numerics fast needs FlashInfer; {install_command('flashinfer')}, or choose exact", param="numerics")


def _row_bytes(spec: DecoderSpec) -> int:
    """Bytes that one token takes at the widest place of a step, its logits included (all may be asked for)."""
    widest = max(3 * widest_feed_forward(layer.mlp) + 4 * _attention_numbers(layer) for layer in set(spec.layers))
    merged = 4 * spec.hidden_size if spec.merges_hidden else 0
    return 4 * (3 * spec.hidden_size + max(widest, spec.vocab_size) + _stream_numbers(spec) + merged)


def _stream_numbers(spec: DecoderSpec) -> int:
    """Numbers of one token's residual streams while they are mixed, and of its inputs of all layers."""
    if spec.streams is None:
        return 0
    return 3 * spec.streams.num_streams * spec.hidden_size + 3 * len(spec.layers) * spec.streams.input_size


def _attention_numbers(layer: LayerSpec) -> int:
    """Numbers of one token's queries and keys, in latent attention of its heads before and after they are absorbed, and of a
    sparse index; and those that meet a state."""
    attention, numbers = layer.attention, 0 if layer.state is None else layer.state.step_size
    if attention is None:
        return numbers
    numbers += (attention.num_heads + attention.num_kv_heads) * attention.head_dim
    if isinstance(attention, LatentAttentionSpec):
        numbers += attention.num_heads * (attention.qk_head_dim + attention.v_head_dim)
        if attention.index is not None:  # a chosen position is 8 bytes
            numbers += attention.index.num_features + attention.index.head_dim + 2 * attention.index.num_chosen
    return numbers


# The installed torch, described for `cloister doctor`.


def describe_torch() -> str:
    """Returns torch's version and where it can compute."""
    where = f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "CPU"
    return f"{torch.__version__}, {where}"
