"""Types of the compiled kernels (cpp/module.cpp)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int32]
_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

def kernel_names() -> list[str]: ...
def compiled_names() -> list[str]: ...
def runnable_names() -> list[str]: ...
def packed_bytes(kind: int, outputs: int, inputs: int) -> int: ...
def kv_block_bytes(kind: int, num_kv_heads: int, head_dim: int, value_dim: int, block_size: int) -> int: ...
def scratch_bytes(
    kernels: str, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int, inputs: int, vocab_size: int
) -> int: ...

class KVCodec:
    def __init__(self, frequencies: npt.NDArray[np.uint16], planes: npt.NDArray[np.int64], content_bytes: int) -> None: ...
    def encode(self, content: _Bytes, steps: _Floats, out: _Bytes) -> int: ...
    def decode(self, stream: _Bytes, content: _Bytes, is_plain: bool = False) -> bool: ...

class KVCopies:
    def __init__(self, caches: list[tuple[_Bytes, int, int]]) -> None: ...
    def export(self, blocks: list[int]) -> list[bytes]: ...
    def import_(self, blocks: list[int], contents: Sequence[bytes | memoryview]) -> None: ...
    def wipe(self, blocks: list[int]) -> None: ...

def find_libcrypto() -> str: ...

class BlockOpener:
    def __init__(self, key: bytes | memoryview) -> None: ...
    def open(self, sealed: memoryview, chain: bytes, records: bytes, room: memoryview) -> bytes: ...

class Pool:
    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...

def pack(
    pool: Pool, kind: int, source: int, data: _Bytes, num_rows: int, inputs: int, places: _Ints, codes: _Bytes
) -> None: ...

class Matrix:
    def __init__(
        self,
        *,
        kind: int,
        outputs: int,
        inputs: int,
        group: int,
        zero_point: int,
        group_inputs: bool,
        rotation: int,
        e2m1: bool,
        codes: _Bytes,
        channel_scales: _Floats | None,
        scales: _Bytes | None,
        scale_bytes: int,
        output_scales: _Floats | None,
        zeros: _Bytes | None,
        offsets: _Floats | None,
        group_scales: _Bytes | None,
        bias: _Floats | None,
    ) -> None: ...

class Norm:
    def __init__(self, *, weight: _Floats, bias: _Floats | None) -> None: ...

class FeedForward:
    def __init__(
        self,
        *,
        up: Matrix,
        down: Matrix,
        activation: int,
        gated: bool,
        scales: tuple[float, float] = ...,
        clipping: tuple[float, float] = ...,
        sparse: float | None = ...,
    ) -> None: ...

class Routing:
    def __init__(
        self,
        *,
        num_experts: int,
        num_chosen: int,
        renormalize: bool,
        sigmoid: bool,
        correction: _Floats | None,
        groups: tuple[int, int, int],
        scale: float,
    ) -> None: ...

class Mixture:
    def __init__(
        self,
        *,
        router: Matrix,
        experts: list[FeedForward],
        routing: Routing,
        shared: FeedForward | None,
        shared_gate: bool,
        weighs_inputs: bool,
    ) -> None: ...

class Latent:
    def __init__(
        self,
        *,
        queries: Matrix | None,
        absorb: Matrix,
        expand: Matrix,
        query_norm: _Floats | None,
        key_norm: _Floats,
        eps: float,
        sizes: tuple[int, int, int, int, int],
    ) -> None: ...

class ShortConv:
    def __init__(self, *, filters: _Floats, bias: _Floats | None, shape: tuple[int, int], blocks: tuple[int, int]) -> None: ...

class Mamba2:
    def __init__(
        self,
        *,
        shape: tuple[int, int, int, int],
        dt_limits: tuple[float, float],
        a_log: _Floats,
        skip: _Floats,
        dt_bias: _Floats,
        norm: _Floats | None,
        norms_before_gate: bool,
        activation: int,
        scales: tuple[float, float, float, float, float],
    ) -> None: ...

class DeltaNet:
    def __init__(
        self,
        *,
        steps: Matrix,
        shape: tuple[int, int, int, int],
        a_log: _Floats,
        dt_bias: _Floats,
        norm: _Floats,
        activation: int,
    ) -> None: ...

class StreamLayer:
    def __init__(
        self,
        *,
        num_streams: int,
        hidden: int,
        router: _Floats,
        predict: _Floats,
        correct: _Floats,
        scale: _Floats | None,
        router_norm: Norm,
        laurel_norm: Norm,
        input_norm: Norm,
        laurel_left: Matrix,
        laurel_right: Matrix,
        input_gate: Matrix,
        input_out: Matrix,
    ) -> None: ...

class Program:
    def __init__(self, kernels: str, pool: Pool, vocab_size: int, hidden_size: int, norm_eps: float) -> None: ...
    def set_ends(
        self,
        *,
        embedding: Matrix,
        head: Matrix,
        norm: Norm,
        positions: Matrix | None,
        centres: bool,
        embedding_scale: float,
        logit_scale: float,
        logit_softcap: float,
    ) -> None: ...
    def set_merge(self, *, merge: Matrix, embedding_norm: Norm, hidden_norm: Norm) -> None: ...
    def set_streams(
        self,
        *,
        num_streams: int,
        active: int,
        input_size: int,
        streams_in: Matrix | None,
        streams_out: list[Matrix],
        projection: Matrix,
        projection_norm: _Floats,
        packed: Matrix | None,
        numbers: _Bytes | None,
        number_type: int,
        num_rows: int,
    ) -> None: ...
    def add_rope(self, inv_freq: list[float], scale: float, axes: list[int]) -> None: ...
    def add_group(self, *, first_block: int, num_blocks: int, window: int, is_state: bool, is_recent: bool) -> None: ...
    def add_layer(
        self,
        *,
        shape: tuple[int, int, int, int, int],
        scale: float,
        softcap: float,
        rope: int,
        qkv: Matrix | None,
        latent: Latent | None,
        short_conv: ShortConv | None,
        mamba2: Mamba2 | None,
        delta_net: DeltaNet | None,
        gated: bool,
        output: Matrix | None,
        scales: tuple[float, float],
        mlp: FeedForward | None,
        mixture: Mixture | None,
        attention_norm: Norm | None,
        mlp_norm: Norm | None,
        attention_post_norm: Norm | None,
        mlp_post_norm: Norm | None,
        q_norm: _Floats | None,
        k_norm: _Floats | None,
        v_norm: _Floats | None,
        norms_projection: bool,
        shares_kv: bool,
        stream: StreamLayer | None,
        sinks: _Floats | None,
        chunked: bool,
        growth: tuple[float, int, int],
        parallel: bool,
        residual_scale: float,
        cache: _Bytes | None,
        block_stride: int,
        recent_cache: _Bytes | None,
        kv_kind: int,
        block_size: int,
        group: int,
        beside: bool,
    ) -> None: ...
    def forward(
        self,
        token_ids: _Ints,
        positions: _Ints,
        query_starts: _Ints,
        context_lens: _Ints,
        tables: _Ints,
        logit_rows: _Ints,
        parents: _Ints | None,
        adapters: _Ints | None,
        state_spans: _Ints | None,
        embeddings: _Floats | None,
        embedding_rows: _Ints | None,
        rope_positions: _Ints | None,
        last_seen: _Ints | None,
        hidden_states: _Floats | None,
        layer: int,
        residual: _Floats | None,
        document_ranges: _Ints | None,
        document_weights: _Floats | None,
        logits: _Floats,
    ) -> None: ...
    def forward_best(
        self,
        token_ids: _Ints,
        positions: _Ints,
        query_starts: _Ints,
        context_lens: _Ints,
        tables: _Ints,
        logit_rows: _Ints,
        parents: _Ints | None,
        adapters: _Ints | None,
        state_spans: _Ints | None,
        embeddings: _Floats | None,
        embedding_rows: _Ints | None,
        rope_positions: _Ints | None,
        last_seen: _Ints | None,
        hidden_states: _Floats | None,
        layer: int,
        residual: _Floats | None,
        document_ranges: _Ints | None,
        document_weights: _Floats | None,
        best: _Ints,
    ) -> None: ...
    def forward_hidden(
        self,
        token_ids: _Ints,
        positions: _Ints,
        query_starts: _Ints,
        context_lens: _Ints,
        tables: _Ints,
        logit_rows: _Ints,
        parents: _Ints | None,
        adapters: _Ints | None,
        state_spans: _Ints | None,
        embeddings: _Floats | None,
        embedding_rows: _Ints | None,
        rope_positions: _Ints | None,
        last_seen: _Ints | None,
        hidden_states: _Floats | None,
        layer: int,
        residual: _Floats | None,
        document_ranges: _Ints | None,
        document_weights: _Floats | None,
        hidden: _Floats,
    ) -> None: ...
    def forward_draw(
        self,
        token_ids: _Ints,
        positions: _Ints,
        query_starts: _Ints,
        context_lens: _Ints,
        tables: _Ints,
        logit_rows: _Ints,
        parents: _Ints | None,
        adapters: _Ints | None,
        state_spans: _Ints | None,
        embeddings: _Floats | None,
        embedding_rows: _Ints | None,
        rope_positions: _Ints | None,
        last_seen: _Ints | None,
        hidden_states: _Floats | None,
        layer: int,
        residual: _Floats | None,
        document_ranges: _Ints | None,
        document_weights: _Floats | None,
        draws: _Bytes,
        tokens: _Ints,
    ) -> None: ...
    def forward_watched(
        self,
        token_ids: _Ints,
        positions: _Ints,
        query_starts: _Ints,
        context_lens: _Ints,
        tables: _Ints,
        logit_rows: _Ints,
        parents: _Ints | None,
        adapters: _Ints | None,
        state_spans: _Ints | None,
        embeddings: _Floats | None,
        embedding_rows: _Ints | None,
        rope_positions: _Ints | None,
        last_seen: _Ints | None,
        hidden_states: _Floats | None,
        layer: int,
        residual: _Floats | None,
        document_ranges: _Ints | None,
        document_weights: _Floats | None,
        draws: _Bytes,
        tokens: _Ints,
        top: _Ints,
    ) -> None: ...
    def find_top(self, logits: _Floats, top: _Ints) -> None: ...
    @property
    def num_head_rows(self) -> int: ...
    def read_hidden(self, hidden: _Floats) -> None: ...
    @property
    def num_step_tokens(self) -> int: ...
    def read_every_hidden(self, hidden: _Floats) -> None: ...
    def project(self, hidden: _Floats, logits: _Floats) -> None: ...
    def load_heads(self, heads: list[list[FeedForward]]) -> int: ...
    def guess(self, loaded: int, hidden: _Floats, num_heads: int, top: _Ints) -> None: ...
    def move_positions(self, moves: _Ints) -> None: ...
    def accept_drafts(self, accepted: _Ints) -> None: ...
    def draw(self, logits: _Floats, draws: _Bytes, tokens: _Ints) -> None: ...
    def draw_masked(self, logits: _Floats, draws: _Bytes, masks: npt.NDArray[np.uint32], tokens: _Ints) -> None: ...
    def forward_keep(
        self,
        token_ids: _Ints,
        positions: _Ints,
        query_starts: _Ints,
        context_lens: _Ints,
        tables: _Ints,
        logit_rows: _Ints,
        parents: _Ints | None,
        adapters: _Ints | None,
        state_spans: _Ints | None,
        embeddings: _Floats | None,
        embedding_rows: _Ints | None,
        rope_positions: _Ints | None,
        last_seen: _Ints | None,
        hidden_states: _Floats | None,
        layer: int,
        residual: _Floats | None,
        document_ranges: _Ints | None,
        document_weights: _Floats | None,
    ) -> None: ...
    def draw_kept(self, draws: _Bytes, masks: npt.NDArray[np.uint32], tokens: _Ints) -> None: ...
    def load_adapter(self, slot: int, updates: list[tuple[int, int, Matrix, Matrix]]) -> None: ...
    def unload_adapter(self, slot: int) -> None: ...
    def wipe(self) -> None: ...
    def record(self, on: bool) -> None: ...
    def spans(self) -> list[tuple[str, int, float, float]]: ...
    @property
    def num_phases(self) -> int: ...
    @property
    def buffer_bytes(self) -> int: ...

__all__: Any
