"""`cloister train draft`: a small Llama that learns a served model's distribution of the next token (Hinton et al. 2015)."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cloister.executor.drafters.heads import heads_directory
from cloister.models import LoadedModel
from cloister.models.safetensors import write_tensors
from cloister.train.decoder import Decoder, Shape
from cloister.train.hidden_states import HiddenStates, RowArray, Teacher, read_rows
from cloister.train.optimizer import Checkpoints, Optimizer, Schedule, step_generator
from cloister.train.passages import Passage, check_size
from cloister.train.session import Material, Reporter, check_place, open_session
from cloister.types.errors import ModelError

# A draft as a directory of Hugging Face's `LlamaForCausalLM`, with the tokenizer of the model that it drafts for.


_COPIED: Final = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def check_source(path: Path) -> None:
    """Raises ModelError for a model whose tokenizer cannot be copied."""
    if path.is_file():
        raise ModelError(
            f"{path.name} has its tokenizer inside; a draft needs files of it: give the directory of the Hugging Face model"
        )


def llama_config(shape: Shape, bos_token_id: int | None, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Returns `config.json` of a decoder."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": bos_token_id,
        "eos_token_id": list(eos_token_ids),
        "pad_token_id": bos_token_id,
        "torch_dtype": "bfloat16",
    }


def write_draft(draft: Decoder, model: LoadedModel, directory: Path) -> None:
    """Writes a draft beside copies of the model's tokenizer files; `config.json` last: now it is a model.

    Raises:
        ModelError: it cannot be written there.
    """
    weights = {
        f"model.{name}": weight.detach().float().numpy().astype(ml_dtypes.bfloat16)
        for name, weight in draft.state_dict().items()
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").unlink(missing_ok=True)
        for name in _COPIED:
            if (model.path / name).is_file():
                shutil.copyfile(model.path / name, directory / name)
        write_tensors(directory / "model.safetensors", {name: np.ascontiguousarray(one) for name, one in weights.items()})
        config = llama_config(draft.shape, None, model.info.eos_token_ids)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ModelError(f"the draft cannot be written to {directory}: {error.strerror}; free space or name another") from None


DRAFTER = "draft_model"
HEAD_DIM = 32
CHECKPOINT_EVERY = 100
MOST_MEASURED = 256
"""Passages that agreement is measured on."""
_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """How the draft looks and how it learns.

    Attributes:
        hidden_size: a multiple of 32; None takes three eighths of the model's.
        rows: passages in a step.
        out: directory to write to; None takes `drafters/draft_model` in the model's.
        replaces: what was trained before and lies there may go.
    """

    hidden_size: int | None
    num_layers: int
    steps: int
    rows: int
    rate: float
    out: Path | None = None
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well a draft foretells its model at held-out places.

    Attributes:
        source: "answers" that the model wrote itself, or "text".
        top1: share of places where both find the same token likeliest.
        acceptance: sum over the vocabulary of min(p, q): the chance that a drafted token is kept (Leviathan et al. 2023,
            theorem 3.5).
    """

    source: str
    top1: float
    acceptance: float
    num_places: int


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What came out."""

    directory: str
    num_parameters: int
    num_bytes: int
    agreement: list[Agreement]
    num_tokens: int
    elapsed_s: float


def train_draft(material: Material, settings: DraftSettings, reporter: Reporter) -> DraftReport:
    """Distils a draft from a model and writes its directory.

    Raises:
        ConfigError: the text cannot be used or is too short, or what is trained cannot be written.
        ModelError: the model cannot be used, or has no tokenizer that could lie beside the draft.
    """
    started = time.perf_counter()
    with open_session(material, reporter) as session:
        torch.set_num_threads(session.config.num_threads or 1)
        model = session.model
        check_source(model.path)
        directory = settings.out or heads_directory(model.path, DRAFTER)
        check_place(directory, "config.json", replaces=settings.replaces)
        passages = session.read_passages()
        check_size(passages)
        places = session.read_places(passages)
        teacher, shape = Teacher(model), choose_shape(model, settings)
        draft = Decoder(shape, torch.Generator().manual_seed(material.seed))
        what = repr((session.name(passages), shape, settings.steps, settings.rows, settings.rate, material.seed))
        checkpoint = session.work / f"draft-{hashlib.sha256(what.encode()).hexdigest()[:16]}.pt"
        _distil(draft, teacher, places, passages, settings, material.seed, checkpoint, reporter)
        measured = [passage for passage in zip(_starts(passages), passages, strict=True) if passage[1].is_held_out]
        task = reporter.begin("Measuring", min(len(measured), MOST_MEASURED))
        agreement = []
        for source, is_own in (("answers", True), ("text", False)):
            some = [start for start, passage in measured if passage.is_own is is_own][:MOST_MEASURED]
            if some:
                agreement.append(_measure(draft, teacher, places, some, source))
            task.advance(len(some))
    write_draft(draft, model, directory)
    return DraftReport(
        directory=str(directory),
        num_parameters=sum(weight.numel() for weight in draft.parameters()),
        num_bytes=(directory / "model.safetensors").stat().st_size,
        agreement=agreement,
        num_tokens=int((~places.is_held_out).sum()),
        elapsed_s=round(time.perf_counter() - started, 1),
    )


def choose_shape(model: LoadedModel, settings: DraftSettings) -> Shape:
    """Returns the draft's shape: heads of 32, three of the hidden size a feed-forward layer, the model's vocabulary."""
    hidden = settings.hidden_size or model.spec.hidden_size * 3 // 8
    num_heads = max(1, hidden // HEAD_DIM)
    hidden = num_heads * HEAD_DIM
    return Shape(
        vocab=model.spec.vocab_size,
        hidden=hidden,
        intermediate=hidden * 8 // 3 // 16 * 16,
        num_layers=settings.num_layers,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        max_positions=model.spec.max_positions,
    )


def _distil(
    draft: Decoder,
    teacher: Teacher,
    places: HiddenStates,
    passages: Sequence[Passage],
    settings: DraftSettings,
    seed: int,
    checkpoint: Path,
    reporter: Reporter,
) -> None:
    starts = np.array(
        [start for start, passage in zip(_starts(passages), passages, strict=True) if not passage.is_held_out], np.int64
    )
    optimizer = Optimizer(draft, Schedule(settings.rate, min(30, settings.steps // 10), settings.steps, decay=0.5))
    checkpoints = Checkpoints(checkpoint, CHECKPOINT_EVERY)
    first = checkpoints.restore(draft, optimizer)
    task = reporter.begin("Learning", settings.steps)
    task.advance(first)
    for step in range(first, settings.steps):
        drawn = torch.randint(len(starts), (settings.rows,), generator=step_generator(seed, step)).numpy()
        loss = _divergence(draft, teacher, places, starts[drawn])
        torch.autograd.backward(loss)
        optimizer.step(step)
        task.advance(1)
        task.say(f"divergence {loss.item():.3f}")
        if (step + 1) % checkpoints.every == 0:
            checkpoints.save(step + 1, draft, optimizer)


def _divergence(draft: Decoder, teacher: Teacher, places: HiddenStates, starts: RowArray) -> Tensor:
    """Returns the mean Kullback-Leibler divergence from model to draft over the learned places of passages, in nats."""
    tokens, rows, is_there = _pad(places, starts)
    states = draft.hidden_states(tokens)[is_there]
    total = torch.zeros(())
    for start in range(0, len(rows), _ROWS):
        guess = F.log_softmax(draft.project(states[start : start + _ROWS]).float(), dim=-1)
        with torch.no_grad():
            truth = F.log_softmax(teacher.logits(read_rows(places, rows[start : start + _ROWS])), dim=-1)
        total = total + F.kl_div(guess, truth, reduction="sum", log_target=True)
    return total / max(1, len(rows))


@torch.no_grad()
def _measure(draft: Decoder, teacher: Teacher, places: HiddenStates, starts: Sequence[int], source: str) -> Agreement:
    top1 = acceptance = 0.0
    num_places = 0
    for start in starts:
        tokens, rows, is_there = _pad(places, np.array([start], np.int64))
        p = teacher.logits(read_rows(places, rows)).softmax(-1)
        q = draft.project(draft.hidden_states(tokens)[is_there]).float().softmax(-1)
        top1 += float((p.argmax(-1) == q.argmax(-1)).sum())
        acceptance += float(torch.minimum(p, q).sum())
        num_places += len(rows)
    total = max(1, num_places)
    return Agreement(source, round(top1 / total, 4), round(acceptance / total, 4), num_places)


def _pad(places: HiddenStates, starts: RowArray) -> tuple[Tensor, RowArray, Tensor]:
    """Returns tokens [num_passages, longest], the places to learn from, and where in the tokens those are."""
    ends = places.ends[starts]
    longest = int((ends - starts).max())
    rows = starts[:, None] + np.arange(longest)
    is_inside = rows < ends[:, None]
    rows = np.minimum(rows, len(places.token_ids) - 1)
    is_there = is_inside & places.is_learned[rows]
    tokens = np.where(is_inside, places.token_ids[rows], 0).astype(np.int64)
    return torch.from_numpy(tokens), rows[is_there], torch.from_numpy(is_there)


def _starts(passages: Sequence[Passage]) -> list[int]:
    """Returns the place at which each passage begins."""
    starts = [0]
    for passage in passages:
        starts.append(starts[-1] + len(passage.token_ids))
    return starts[:-1]
