"""Layers that predict further tokens: added to checkpoints as those of the hub have them, and computed from the equations of
DeepSeek-V3 (arXiv:2412.19437, section 2.2) around a block of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from cloister.backends import BACKENDS
from cloister.backends.base import ForwardBatch, KVLayout, Wants
from cloister.backends.tensors import dequantized
from cloister.models import load
from cloister.models.safetensors import read_header, write_tensors

FloatArray = npt.NDArray[np.float32]
FILE = "model.safetensors"
OF_QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families whose layer lies apart from those of the model, with norms less one."""


def add_layer(path: Path, *, seed: int = 0, tensors: Mapping[str, FloatArray] = {}) -> dict[str, FloatArray]:
    """Adds a layer like the last of the model to its checkpoint, all random; returns what was added, by stored name.

    Args:
        tensors: take the place of random ones.
    """
    config = json.loads((path / "config.json").read_text())
    found, hidden = load_tensors(path), config["hidden_size"]
    last = max(int(name.split(".")[2]) for name in found if name.startswith("model.layers."))
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> FloatArray:
        if len(shape) == 1:
            return rng.standard_normal(shape, np.float32) * np.float32(0.3) + np.float32(not is_apart)
        return rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)

    is_apart = config["model_type"] in OF_QWEN
    prefix = "mtp.layers.0." if is_apart else f"model.layers.{last + 1}."
    old = f"model.layers.{last}."
    added = {prefix + name[len(old) :]: draw(*values.shape) for name, values in found.items() if name.startswith(old)}
    own = (
        {"pre_fc_norm_embedding": (hidden,), "pre_fc_norm_hidden": (hidden,), "fc": (hidden, 2 * hidden), "norm": (hidden,)}
        if is_apart
        else {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "shared_head.norm": (hidden,)}
    )
    added |= {f"{'mtp.' if is_apart else prefix}{name}.weight": draw(*shape) for name, shape in own.items()}
    if not is_apart:  # the checkpoints of the hub keep the embedding and the head a second time
        added |= {f"{prefix}embed_tokens.weight": found["model.embed_tokens.weight"].astype(np.float32)}
    write_tensors(path / FILE, {**found, **added, **tensors})
    return {**added, **tensors}


def load_tensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Returns copies of what a checkpoint of one file holds."""
    return {name: np.array(entry.read()) for name, entry in read_header(path / FILE).items()}


def change_tensors(path: Path, **changes: Any) -> None:
    """Changes tensors whose names end so (underscores stand for dots); None takes one out."""
    found = load_tensors(path)
    for end, value in changes.items():
        (name,) = [name for name in found if name.endswith(end.replace("__", "."))]
        del found[name]
        if value is not None:
            found[name] = value
    write_tensors(path / FILE, found)


def reference_predictions(
    path: Path, layer: Mapping[str, FloatArray], tokens: Sequence[int], num_drafts: int
) -> tuple[FloatArray, FloatArray]:
    """Returns the logits for the token after next of each position, [num_tokens - 1, vocab], and those of the drafts that
    follow greedily, [num_drafts, vocab]: every draft computes all positions again."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    inner, config = model.model, model.config
    number = config.num_hidden_layers - 1
    block = type(inner.layers[number])(config, number).eval()
    is_apart = config.model_type in OF_QWEN
    prefix = "mtp.layers.0." if is_apart else f"model.layers.{number + 1}."
    own = {name: torch.from_numpy(values) for name, values in layer.items()}
    names = block.state_dict().keys()
    block.load_state_dict(_as_transformers({name[len(prefix) :]: own[name] for name in own if name.startswith(prefix)}, names))
    top, offset = ("mtp.", 1.0) if is_apart else (prefix, 0.0)
    e_norm, h_norm, projection, last_norm = (
        own[f"{top}{name}.weight"]
        for name in (
            ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
            if is_apart
            else ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        )
    )

    def norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + config.rms_norm_eps) * (weight + offset)

    def predict(hidden: torch.Tensor, after: Sequence[int]) -> torch.Tensor:
        embedded = inner.embed_tokens(torch.tensor([after]))
        merged = torch.cat([norm(embedded, e_norm), norm(hidden, h_norm)], dim=-1) @ projection.T
        places = torch.arange(len(after))[None]
        mask = torch.full((len(after), len(after)), float("-inf")).triu(1)[None, None]
        turned = inner.rotary_emb(merged, places)
        out = block(merged, position_embeddings=turned, attention_mask=mask, position_ids=places)
        return norm(out[0] if isinstance(out, tuple) else out, last_norm)

    with torch.no_grad():
        hidden = inner(torch.tensor([list(tokens)])).last_hidden_state[:, :-1]
        states = predict(hidden, tokens[1:])
        logits = model.lm_head(states)[0]
        drafts, known = [], list(tokens[1:])
        for _ in range(num_drafts):
            drafts.append(model.lm_head(states[:, -1])[0])
            known.append(int(drafts[-1].argmax()))
            hidden = torch.cat([hidden, states[:, -1:]], dim=1)
            states = predict(hidden, known)
    return logits.numpy(), torch.stack(drafts).numpy()


def _as_transformers(found: dict[str, torch.Tensor], names: Any) -> dict[str, torch.Tensor]:
    """Returns tensors of a checkpoint as the modules of transformers hold them: experts in stacks."""
    own = {name: values for name, values in found.items() if name in names}
    numbers = sorted({int(name.split(".")[2]) for name in found if re.match(r"mlp\.experts\.\d", name)})
    if not numbers:
        return own

    def stack(*parts: str) -> torch.Tensor:
        return torch.stack([torch.cat([found[f"mlp.experts.{n}.{part}.weight"] for part in parts]) for n in numbers])

    stacked = {"mlp.experts.gate_up_proj": stack("gate_proj", "up_proj"), "mlp.experts.down_proj": stack("down_proj")}
    return {**own, **stacked}


def fit_layer(path: Path, texts: Sequence[Sequence[int]]) -> None:
    """Adds a layer whose block adds nothing, and whose projection is the best linear guess of the next hidden state from what
    it reads: least squares over what the model computes for some texts.

    Args:
        texts: token ids.
    """
    model = load(path)
    program = BACKENDS.get("torch")(num_threads=1, device="cpu", dtype="float32").build(
        model.spec, model.weights, KVLayout(64, 16)
    )
    embedding = np.asarray(dequantized(model.weights.read("embed.weight"))).astype(np.float32)
    inputs, targets = [], []
    for text in texts:
        places = np.arange(len(text), dtype=np.int32)
        batch = ForwardBatch(
            token_ids=np.array(text, np.int32),
            positions=places,
            query_starts=np.array([0, len(text)], np.int32),
            context_lens=np.array([len(text)], np.int32),
            block_tables=np.arange(-(-len(text) // 16), dtype=np.int32)[None],
            logit_rows=places[:1],
        )
        hidden = program.step(batch, Wants(every_hidden=True)).hidden
        merged = [_unit(rows) for rows in (embedding[list(text[1:])], hidden[:-1])]
        inputs.append(np.concatenate(merged, axis=1))
        targets.append(hidden[1:])
    read, wanted = np.concatenate(inputs), np.concatenate(targets)
    width = wanted.shape[1]
    ridge = np.eye(2 * width, dtype=np.float32) * np.float32(0.01 * len(read))
    projection = np.linalg.solve(read.T @ read + ridge, read.T @ wanted).T
    size = np.float32(np.sqrt(np.mean(wanted**2)))
    prefix = f"model.layers.{len(model.spec.layers)}."
    ones = {name: np.ones(width, np.float32) for name in ("enorm", "hnorm")}
    own = {**ones, "shared_head.norm": np.full(width, size), "eh_proj": np.ascontiguousarray(projection, np.float32)}
    like = f"model.layers.{len(model.spec.layers) - 1}."
    zeros = {
        prefix + name.removeprefix(like): 0 * values
        for name, values in load_tensors(path).items()
        if name.startswith(like) and name.endswith(("o_proj.weight", "down_proj.weight"))
    }
    add_layer(path, tensors={**zeros, **{f"{prefix}{name}.weight": values for name, values in own.items()}})


def _unit(rows: FloatArray) -> FloatArray:
    unit: FloatArray = rows / np.sqrt(np.mean(rows**2, axis=1, keepdims=True) + np.float32(1e-5))
    return unit
