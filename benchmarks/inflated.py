"""A small model in a large one's shape: the answers of the one, the cost of the other.

So a draft model is accepted as often as it really is, and what it saves is what it saves a model of a billion weights. In exact
arithmetic the function is the same, and no weight of the small model is rounded on the way:

- The residual stream holds every number twice and zeros behind: then its mean square is a quarter of the small model's where it
  has 8 times the width (2 x 256 of 2048), so norms take half the gain and a quarter of eps, which bfloat16 holds exactly. Gains
  of the copy and of the zeros are 0: matrices, and drafters that look at the last hidden state, see the first copy alone.
- Heads of 32 numbers become heads of 64: rotation turns number i with number i + 16, at the frequency theta^(-2i/32); with the
  same theta that is the large head's frequency 2i, which turns 2i with 2i + 32. Scores keep the small head's scale: the
  checkpoint says that it is a Granite, a Llama whose config has that scale as a field (and multipliers, all 1).
- Query heads in groups of 4 stay in groups of 4. Heads, feed-forward rows and layers that are too many are there: in the small
  model's layers they are zeros, in the 10 layers behind they are random (normal, 0.02) but for zero output projections.
- The vocabulary stays: the 4,096 rows of the small model are a head of 8 million weights where Llama 3.2 1B has 263 million. A
  step reads 0.98 billion weights.

Dense kernels read and multiply zeros as they do any number.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from benchmarks.harness import MODEL
from benchmarks.inflated_drafters import MARK, write_drafters
from benchmarks.peers.shapes import KNOWN
from cloister.models import embedded_names, locate
from cloister.models.safetensors import read_header, write_tensors

Array = npt.NDArray[Any]
SHAPE: Final = "l1b"
COPIES: Final = 2
"""How often the residual stream holds each number: with 8 times the width, 2 make the norms' gain a power of two."""
_COPIED: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_KEPT: Final = (
    "vocab_size", "max_position_embeddings", "rope_theta", "bos_token_id", "eos_token_id", "pad_token_id", "hidden_act",
)  # fmt: skip
_LAYER: Final = "model.layers.{}."


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a Llama's config says of its matrices."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        return cls(
            config["hidden_size"],
            config["intermediate_size"],
            config["num_hidden_layers"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
        )


class Inflation:
    """Where the numbers of a small Llama stand in a large one.

    Args:
        small: config of the small model.
        large: what the large model's sizes are.

    Attributes:
        gain: what norms' weights are multiplied with.
    """

    def __init__(self, small: Mapping[str, Any], large: Mapping[str, Any]) -> None:
        self._config = small
        self.small, self.large = Sizes.of(small), Sizes.of({"head_dim": 0, **large})
        small_sizes, large_sizes = self.small, self.large
        self.gain = math.sqrt(COPIES * small_sizes.hidden / large_sizes.hidden)
        if math.frexp(self.gain)[0] != 0.5:
            raise ValueError(f"norms' gain would be {self.gain}, which bfloat16 does not hold; change COPIES")
        if small_sizes.num_heads // small_sizes.num_kv_heads != large_sizes.num_heads // large_sizes.num_kv_heads:
            raise ValueError("query heads share keys in groups of another size")
        self._stretch = large_sizes.head_dim // small_sizes.head_dim

    def config(self) -> dict[str, Any]:
        """Returns the config of the large model."""
        small, large = self.small, self.large
        return {
            **{name: self._config[name] for name in _KEPT},
            "architectures": ["GraniteForCausalLM"],
            "model_type": "granite",
            "hidden_size": large.hidden,
            "intermediate_size": large.intermediate,
            "num_hidden_layers": large.num_layers,
            "num_attention_heads": large.num_heads,
            "num_key_value_heads": large.num_kv_heads,
            "head_dim": large.head_dim,
            "attention_multiplier": small.head_dim**-0.5,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "rms_norm_eps": self._config["rms_norm_eps"] * self.gain**2,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        }

    def tensors(self, weights: Mapping[str, Array], seed: int) -> Iterator[tuple[str, Array]]:
        """Yields every tensor of the large model, bfloat16."""
        random = np.random.default_rng(seed)
        yield "model.embed_tokens.weight", self._written(weights["model.embed_tokens.weight"].T).T
        yield "model.norm.weight", self._norm(weights["model.norm.weight"])
        for number in range(self.large.num_layers):
            prefix = _LAYER.format(number)
            is_real = number < self.small.num_layers
            layer = self._real(weights, prefix) if is_real else self._idle(random)
            yield from ((prefix + name, tensor) for name, tensor in layer)

    def _real(self, weights: Mapping[str, Array], prefix: str) -> Iterator[tuple[str, Array]]:
        small, large = self.small, self.large
        query, key = large.num_heads * large.head_dim, large.num_kv_heads * large.head_dim
        rows = {
            "self_attn.q_proj": (self.rotated(small.num_heads), query),
            "self_attn.k_proj": (self.rotated(small.num_kv_heads), key),
            "self_attn.v_proj": (self.straight(small.num_kv_heads), key),
            "mlp.gate_proj": (np.arange(small.intermediate), large.intermediate),
            "mlp.up_proj": (np.arange(small.intermediate), large.intermediate),
        }
        for name, (places, height) in rows.items():
            wide = _zeros(height, large.hidden)
            wide[places, : small.hidden] = weights[f"{prefix}{name}.weight"]
            yield f"{name}.weight", wide
        columns = {
            "self_attn.o_proj": (self.straight(small.num_heads), query),
            "mlp.down_proj": (np.arange(small.intermediate), large.intermediate),
        }
        for name, (places, width) in columns.items():
            wide = _zeros(small.hidden, width)
            wide[:, places] = weights[f"{prefix}{name}.weight"]
            yield f"{name}.weight", self._written(wide)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}.weight", self._norm(weights[f"{prefix}{name}.weight"])

    def _idle(self, random: np.random.Generator) -> Iterator[tuple[str, Array]]:
        """A layer that computes and adds nothing."""
        large = self.large
        query, key = large.num_heads * large.head_dim, large.num_kv_heads * large.head_dim
        heights = {
            "self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key,
            "mlp.gate_proj": large.intermediate, "mlp.up_proj": large.intermediate,
        }  # fmt: skip
        for name, height in heights.items():
            drawn = random.standard_normal((height, large.hidden), np.float32)
            yield f"{name}.weight", (drawn * np.float32(0.02)).astype(ml_dtypes.bfloat16)
        yield "self_attn.o_proj.weight", _zeros(large.hidden, query)
        yield "mlp.down_proj.weight", _zeros(large.hidden, large.intermediate)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}.weight", np.ones(large.hidden, ml_dtypes.bfloat16)

    def rotated(self, num_heads: int) -> npt.NDArray[np.intp]:
        """Returns where the rows of queries or keys go, so that each pair keeps its frequency."""
        half = self.small.head_dim // 2
        number = np.arange(self.small.head_dim)
        inside = number % half * self._stretch + number // half * (self.large.head_dim // 2)
        return (np.arange(num_heads)[:, None] * self.large.head_dim + inside).reshape(-1)

    def straight(self, num_heads: int) -> npt.NDArray[np.intp]:
        """Returns where the rows of values go."""
        return (np.arange(num_heads)[:, None] * self.large.head_dim + np.arange(self.small.head_dim)).reshape(-1)

    def _written(self, rows: Array) -> Array:
        """Returns what is written to the residual stream, [large hidden, ...] for [small hidden, ...]."""
        wide = _zeros(self.large.hidden, rows.shape[1])
        for copy in range(COPIES):
            wide[copy * len(rows) : (copy + 1) * len(rows)] = rows
        return wide

    def _norm(self, weight: Array) -> Array:
        wide = np.zeros(self.large.hidden, ml_dtypes.bfloat16)
        wide[: weight.size] = (weight.astype(np.float32) * self.gain).astype(ml_dtypes.bfloat16)
        return wide


def _zeros(height: int, width: int) -> Array:
    return np.zeros((height, width), ml_dtypes.bfloat16)


def write_inflated(folder: Path, *, source: str = MODEL, large: Mapping[str, Any] = KNOWN[SHAPE], seed: int = 0) -> Path:
    """Writes the model directory unless it is there, and returns it.

    Args:
        source: embedded model's name, or directory of a Llama with tied embeddings and one safetensors file.
        large: fields of a Llama's config that say how large it shall be.
        seed: of the idle layers' weights.
    """
    if (folder / "config.json").exists():
        return folder
    path = locate(source)
    inflation = Inflation(json.loads((path / "config.json").read_text(encoding="utf-8")), large)
    weights = {name: entry.read() for name, entry in read_header(path / "model.safetensors").items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", {n: np.ascontiguousarray(t) for n, t in inflation.tensors(weights, seed)})
    for name in _COPIED:
        if (path / name).exists():
            shutil.copyfile(path / name, folder / name)
    (folder / MARK).write_text(f"{source} in the shape {SHAPE}, written by benchmarks.inflated\n", encoding="utf-8")
    config = json.dumps(inflation.config(), indent=1) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")  # last: now it is a model
    return folder


def open_inflated(place: Path) -> Path:
    """Returns a directory with the inflated model and its drafters, written now if it is not there.

    An embedded model's name gives that model as it is: to count what is accepted, without the cost of a large one.
    """
    if str(place) in embedded_names():
        return locate(str(place))
    folder = write_inflated(place)
    write_drafters(folder)
    return folder
