"""A decoder's weights, packed: what a program is bound to, and what a cache file holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.backends.base import Weights
from cloister.backends.native.packing import Kind, PackedMatrix, Packer, packed_bytes
from cloister.backends.spec import DecoderSpec, LayerSpec
from cloister.backends.tensors import Tensor, dequantized

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """Matrices and norms of one layer; a norm is padded with zeros to whole vectors of 16."""

    qkv: PackedMatrix
    output: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix
    attention_norm: FloatArray
    mlp_norm: FloatArray
    q_norm: FloatArray | None
    k_norm: FloatArray | None


@dataclass(frozen=True, slots=True)
class PackedModel:
    """All weights of a decoder.

    Attributes:
        head: None when the embedding serves.
    """

    embedding: PackedMatrix
    head: PackedMatrix | None
    norm: FloatArray
    layers: tuple[PackedLayer, ...]


def packed_model_bytes(spec: DecoderSpec, weights: Weights, dense: Kind) -> int:
    """Returns the bytes that `pack_model` will take, from what each matrix becomes; nothing large is read."""

    def matrix(*names: str, has_bias: bool = False) -> int:
        rows = [_form_row(weights, f"{name}.weight") for name in names]
        heights = [weights.shape(f"{name}.weight")[0] for name in names]
        return packed_bytes(rows, sum(heights), dense, has_bias=has_bias)

    def layer(number: int, layer: LayerSpec) -> int:
        attention, mlp, at = layer.attention, layer.mlp, f"layers.{number}"
        gate_up = [_form_row(weights, f"{at}.{name}.weight") for name in ("gate", "up")]
        norms = 2 * spec.hidden_size + 2 * attention.head_dim * attention.qk_norm
        return (
            matrix(f"{at}.q", f"{at}.k", f"{at}.v", has_bias=attention.qkv_bias)
            + matrix(f"{at}.o", has_bias=attention.output_bias)
            + packed_bytes(gate_up, -(-mlp.intermediate_size // 16) * 32, dense, has_bias=mlp.bias)
            + matrix(f"{at}.down", has_bias=mlp.bias)
            + 4 * norms
        )

    ends = matrix("embed") + (0 if spec.tied_embeddings else matrix("head")) + 4 * spec.hidden_size
    return ends + sum(layer(number, each) for number, each in enumerate(spec.layers))


def _form_row(weights: Weights, name: str) -> Tensor:
    form = weights.form(name)
    return np.zeros((1, weights.shape(name)[1]), np.float32) if form is None else form


def pack_model(spec: DecoderSpec, weights: Weights, packer: Packer) -> PackedModel:
    """Packs a model tensor by tensor, so that beside the packed model only one layer's matrix is in memory."""
    return PackedModel(
        embedding=packer.join([weights.read("embed.weight")], [None]),
        head=None if spec.tied_embeddings else packer.join([weights.read("head.weight")], [None]),
        norm=_vector(weights.read("norm.weight")),
        layers=tuple(_pack_layer(layer, weights, packer, f"layers.{number}") for number, layer in enumerate(spec.layers)),
    )


def _pack_layer(layer: LayerSpec, weights: Weights, packer: Packer, prefix: str) -> PackedLayer:
    attention, mlp = layer.attention, layer.mlp

    def matrix(name: str) -> Tensor:
        return weights.read(f"{prefix}.{name}.weight")

    def bias(name: str, present: bool) -> npt.NDArray[Any] | None:
        return _row(weights.read(f"{prefix}.{name}.bias")) if present else None

    return PackedLayer(
        qkv=packer.join([matrix(n) for n in "qkv"], [bias(n, attention.qkv_bias) for n in "qkv"]),
        output=packer.join([matrix("o")], [bias("o", attention.output_bias)]),
        gate_up=packer.interleave(matrix("gate"), matrix("up"), [bias("gate", mlp.bias), bias("up", mlp.bias)]),
        down=packer.join([matrix("down")], [bias("down", mlp.bias)]),
        attention_norm=_vector(weights.read(f"{prefix}.attention_norm.weight")),
        mlp_norm=_vector(weights.read(f"{prefix}.mlp_norm.weight")),
        q_norm=_vector(weights.read(f"{prefix}.q_norm.weight")) if attention.qk_norm else None,
        k_norm=_vector(weights.read(f"{prefix}.k_norm.weight")) if attention.qk_norm else None,
    )


def _row(tensor: Tensor) -> FloatArray:
    return np.asarray(dequantized(tensor)).astype(np.float32)


def _vector(tensor: Tensor) -> FloatArray:
    values = _row(tensor)
    return np.pad(values, (0, -len(values) % 16))
