"""The Llama decoder in plain torch, written for training on a CPU: bfloat16 arithmetic over float32 weights.

The layout and the parameter names are those of Hugging Face's ``LlamaForCausalLM`` (less its ``model.`` prefix), so the
export is a rename. Grouped-query attention: Ainslie et al. 2023; rotary positions: Su et al. 2021, in the half-split
layout; SwiGLU: Shazeer 2020; RMSNorm: Zhang and Sennrich 2019.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The size of a decoder. ``num_heads * head_dim`` may differ from ``hidden``."""

    vocab: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 8192
    rope_theta: float = 50_000.0
    rms_eps: float = 1e-5


def rotary_table(shape: Shape, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each ``[num_positions, head_dim]`` in float32."""
    frequency = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
    angle = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequency)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x`` ``[batch, heads, positions, head_dim]`` by its position."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


class RMSNorm(nn.Module):
    """Scale each row to unit root mean square, times a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class CastLinear(nn.Linear):
    """A bias-free projection whose weight is cast to the type of its input."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__(fan_in, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = CastLinear(shape.hidden, shape.num_heads * shape.head_dim)
        self.k_proj = CastLinear(shape.hidden, shape.num_kv_heads * shape.head_dim)
        self.v_proj = CastLinear(shape.hidden, shape.num_kv_heads * shape.head_dim)
        self.o_proj = CastLinear(shape.num_heads * shape.head_dim, shape.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, positions, _ = x.shape
        groups = self.shape.num_heads // self.shape.num_kv_heads
        q, k, v = (
            project(x).view(batch, positions, -1, self.shape.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        k = rotate(k, cos, sin).repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).reshape(batch, positions, -1)))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = CastLinear(shape.hidden, shape.intermediate)
        self.up_proj = CastLinear(shape.hidden, shape.intermediate)
        self.down_proj = CastLinear(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """Pre-norm attention, then pre-norm feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.rms_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.rms_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """A Llama-shaped decoder with tied input and output embeddings."""

    def __init__(self, shape: Shape, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> None:
        """Args: shape: its size. generator: draws the weights. dtype: of the arithmetic, not of the weights."""
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden, shape.rms_eps)
        self._draw_weights(generator)

    def _draw_weights(self, generator: torch.Generator) -> None:
        # Radford et al. 2019: projections back into the residual stream start smaller with depth.
        residual_std = 0.02 / (2 * self.shape.num_layers) ** 0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
                nn.init.normal_(weight, std=std, generator=generator)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Final normed states ``[batch, positions, hidden]`` of token ids ``[batch, positions]``."""
        cos, sin = (t.to(self.dtype) for t in rotary_table(self.shape, tokens.shape[1]))
        x = F.embedding(tokens, self.embed_tokens.weight.to(self.dtype))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return cast(Tensor, self.norm(x))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[batch, positions, vocab]`` of token ids ``[batch, positions]``."""
        return self.project(self.hidden_states(tokens))

    def project(self, states: Tensor) -> Tensor:
        """Logits of final states, through the tied embedding."""
        return F.linear(states, self.embed_tokens.weight.to(states.dtype))

    def loss(self, tokens: Tensor, targets: Tensor, rows_per_chunk: int = 2048) -> Tensor:
        """Mean cross entropy in nats over targets ``[batch, positions]``; a target of -100 does not count.

        Only the rows that count are projected, a chunk at a time.
        """
        states = self.hidden_states(tokens).flatten(0, 1)
        counted = targets.flatten() != -100
        states, targets = states[counted], targets.flatten()[counted]
        total = torch.zeros((), dtype=torch.float32)
        for start in range(0, len(targets), rows_per_chunk):
            logits = self.project(states[start : start + rows_per_chunk]).float()
            total = total + F.cross_entropy(logits, targets[start : start + rows_per_chunk], reduction="sum")
        return total / max(1, len(targets))
