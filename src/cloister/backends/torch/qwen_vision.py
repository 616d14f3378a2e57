"""The vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL in torch, built from a spec and its weights.

Patches stand in the order of tokens: those of a token's square one after another, row by row, tokens row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from cloister.backends.torch.layers import rms_norm, rotate
from cloister.backends.torch.reading import WeightReader
from cloister.backends.torch.vision_parts import TOWER_ACTIVATIONS, TowerLayerNorm, TowerProduct, VisionTower
from cloister.backends.vision import QwenVisionSpec
from cloister.types.images import ImageTile


def _read_norm(spec: QwenVisionSpec, reader: WeightReader, name: str) -> Callable[[Tensor], Tensor]:
    if spec.norm == "layer":
        return TowerLayerNorm(reader, name, spec.norm_eps)
    return partial(rms_norm, weight=reader.vector(f"{name}.weight"), eps=spec.norm_eps)


class _Layer:
    """A block of the encoder."""

    def __init__(self, spec: QwenVisionSpec, reader: WeightReader, number: int) -> None:
        prefix = f"vision.layers.{number}"
        self._num_heads, self._activation = spec.num_heads, TOWER_ACTIVATIONS[spec.activation]
        self._attention_norm = _read_norm(spec, reader, f"{prefix}.attention_norm")
        self._mlp_norm = _read_norm(spec, reader, f"{prefix}.mlp_norm")
        self._q, self._k, self._v, self._o, self._up, self._down = (
            TowerProduct(reader, f"{prefix}.{name}") for name in ("q", "k", "v", "o", "up", "down")
        )
        self._gate = TowerProduct(reader, f"{prefix}.gate") if spec.gated else None

    def __call__(self, hidden: Tensor, cos_sin: Tensor, groups: Sequence[Tensor]) -> Tensor:
        """Returns the residual stream [num_patches, hidden] behind the block.

        Args:
            cos_sin: [2, num_patches, 1, head_dim / 2].
            groups: [num_groups, size] each: patches that see each other; together they have every patch once.
        """
        normed = self._attention_norm(hidden)
        q, k, v = (self._heads(product(normed)) for product in (self._q, self._k, self._v))
        q, k = self._turn(q, cos_sin), self._turn(k, cos_sin)
        mixed = torch.empty_like(q)
        for places in groups:
            part = [heads[places].transpose(1, 2) for heads in (q, k, v)]
            seen = F.scaled_dot_product_attention(part[0], part[1], part[2])
            mixed[places] = seen.transpose(1, 2)
        hidden = hidden + self._o(mixed.flatten(1))
        return hidden + self._feed(self._mlp_norm(hidden))

    def _feed(self, normed: Tensor) -> Tensor:
        if self._gate is None:
            return self._down(self._activation(self._up(normed)))
        return self._down(self._activation(self._gate(normed)) * self._up(normed))

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(len(rows), self._num_heads, -1)

    def _turn(self, heads: Tensor, cos_sin: Tensor) -> Tensor:
        turned = torch.empty_like(heads)
        rotate(heads, cos_sin, turned)
        return turned


class _Merger:
    """Makes one row of the patches of a token: down(gelu(up(patches)))."""

    def __init__(self, spec: QwenVisionSpec, reader: WeightReader, name: str, *, norms_tokens: bool) -> None:
        self._num_merged, self._norms_tokens = spec.merge**2, norms_tokens
        self._norm = _read_norm(spec, reader, f"{name}.norm")
        self._up, self._down = TowerProduct(reader, f"{name}.up"), TowerProduct(reader, f"{name}.down")

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns [num_tokens, decoder's hidden]; the norm is over a token's patches together, or over each."""
        shape = (len(hidden) // self._num_merged, -1)
        normed = self._norm(hidden.view(shape)) if self._norms_tokens else self._norm(hidden).view(shape)
        return self._down(F.gelu(self._up(normed)))


class QwenTower(VisionTower):
    """Encodes images of any size in whole tokens (`backends.vision.QwenVisionSpec`)."""

    def __init__(self, spec: QwenVisionSpec, reader: WeightReader) -> None:
        super().__init__(spec)
        self._spec = spec
        self._patch = TowerProduct(reader, "vision.patch", bias=spec.patch_bias)
        self._positions = None if spec.grid_size is None else reader.vector("vision.positions.weight")
        self._layers = [_Layer(spec, reader, number) for number in range(spec.num_layers)]
        self._merger = _Merger(spec, reader, "vision.merger", norms_tokens=False)
        self._deepstack = {
            layer: _Merger(spec, reader, f"vision.deepstack.{number}", norms_tokens=True)
            for number, layer in enumerate(spec.deepstack)
        }
        size = spec.hidden_size // spec.num_heads // 2
        self._inv_freq = 1.0 / (spec.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size))

    def embed(self, image: ImageTile, check: Callable[[], None]) -> Tensor:
        """Returns [num_tokens, (1 + len(deepstack)) * decoder's hidden] of RGB bytes [height, width, 3]."""
        rows, columns = image.grid or (0, 0)
        height, width = self._place(rows, columns)
        hidden = self._patch(self._cut_patches(image.pixels, rows, columns))
        if self._positions is not None:
            hidden = hidden + self._interpolate(height, width)
        cos_sin = self._angles(height, width)
        whole = [torch.arange(len(hidden))[None]]
        windows = whole if self._spec.window is None else self._windows(rows, columns, self._spec.window)
        parts = []
        for number, layer in enumerate(self._layers):
            check()
            hidden = layer(hidden, cos_sin, whole if number in self._spec.full_layers else windows)
            if number in self._deepstack:
                parts.append(self._deepstack[number](hidden))
        return torch.cat([self._merger(hidden), *parts], dim=1)

    def _cut_patches(self, pixels: bytes, rows: int, columns: int) -> Tensor:
        """Returns the normalised pixels of each patch, [num_patches, 3 * temporal_patch_size * patch_size ** 2]."""
        spec, merge, side = self._spec, self._spec.merge, self._spec.patch_size
        image = self.normalise(pixels, rows * spec.token_size, columns * spec.token_size)
        patches = image.view(3, rows, merge, side, columns, merge, side).permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        return patches.expand(-1, -1, -1, -1, -1, spec.temporal_patch_size, -1, -1).reshape(rows * columns * merge**2, -1)

    def _place(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Returns the row and the column of each patch."""
        merge = self._spec.merge
        places = torch.arange(rows * columns * merge**2).view(rows, merge, columns, merge).transpose(1, 2).flatten()
        return places // (columns * merge), places % (columns * merge)

    def _angles(self, height: Tensor, width: Tensor) -> Tensor:
        """Returns cosines and sines, [2, num_patches, 1, head_dim / 2]: those of the row before those of the column."""
        angles = torch.cat([torch.outer(places.float(), self._inv_freq) for places in (height, width)], dim=1)
        return torch.stack([angles.cos(), angles.sin()]).unsqueeze(2)

    def _windows(self, rows: int, columns: int, side: int) -> list[Tensor]:
        """Returns the patches of each square of `side` x `side` tokens, those of equal size together; less at the edges."""
        tokens, merged = torch.arange(rows * columns).view(rows, columns), self._spec.merge**2
        by_size: dict[int, list[Tensor]] = {}
        for top in range(0, rows, side):
            for left in range(0, columns, side):
                square = tokens[top : top + side, left : left + side].flatten()
                by_size.setdefault(len(square), []).append(square)
        return [(torch.stack(squares)[..., None] * merged + torch.arange(merged)).flatten(1) for squares in by_size.values()]

    def _interpolate(self, height: Tensor, width: Tensor) -> Tensor:
        """Returns the learned positions, interpolated bilinearly to the image's patches, corners on corners."""
        assert self._positions is not None
        side = self._spec.grid_size or 0
        (rows, row_weights), (columns, column_weights) = (_take_taps(places, side) for places in (height, width))
        taps = (rows[:, :, None] * side + columns[:, None, :]).flatten(1)
        weights = (row_weights[:, :, None] * column_weights[:, None, :]).flatten(1)
        return (self._positions[taps] * weights[:, :, None]).sum(1)


def _take_taps(places: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Returns the two learned positions on both sides of each place along an axis, and their weights, [num_patches, 2]."""
    scaled = places.float() * (side - 1) / places.max().clamp(min=1)
    taps = scaled.floor().long()[:, None] + torch.arange(2)
    return taps.clamp(max=side - 1), (1 - (scaled[:, None] - taps).abs()).clamp(min=0)


def qwen_tower_bytes(spec: QwenVisionSpec) -> int:
    """Returns what a thread takes at the widest place of the tower: all patches of the largest image, in float32."""
    num_patches = spec.most_pixels // spec.patch_size**2
    widest = max(12 * spec.hidden_size, 3 * (spec.hidden_size + spec.intermediate_size))
    return 4 * num_patches * max(widest, 4 * spec.temporal_patch_size * 3 * spec.patch_size**2)
