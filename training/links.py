"""Link tokens for documents that are encoded separately (KVLink, Yang et al. 2025, arXiv:2502.16002).

`python -m training.links --model cloister-5m --out DIRECTORY` writes an adapter: `link_tokens.safetensors` with what link
tokens read and, with `--rank`, a LoRA in PEFT's format. The weights of the model stay as they are. What is learned is to
answer about notes (`notes.py`) where each note sees the prefix and itself, the links behind a note all notes up to it, and
the question everything, as `types.documents.Documents` says. Half of the prompts give notes the positions that they have
directly behind the prefix, the other half those of one text, as modules of a schema have.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cloister.models import locate
from cloister.models.adapters import LINKS_FILE
from cloister.server.documents import join_documents
from cloister.text import Tokenizer
from cloister.types.documents import Documents
from training.notes import Lesson, draw_lesson

BLOCK_SIZE = 16
"""Documents are filled up to it, as a server does that has the default setting."""
MAX_NOTES = 8


@dataclass(frozen=True)
class Prompt:
    """A lesson as the model reads it.

    Attributes:
        token_ids: of prefix, documents, links (as newlines), question and answer.
        documents: where documents and links stand.
        num_answer: tokens of the answer, at the end.
        is_placed: documents have the positions of one text.
    """

    token_ids: list[int]
    documents: Documents
    num_answer: int
    is_placed: bool


def make_prompt(lesson: Lesson, tokenizer: Tokenizer, num_links: int, *, is_placed: bool) -> Prompt:
    """Returns a lesson's prompt, as the server puts one together."""
    joined = join_documents(lesson.prefix, lesson.notes, lesson.question, tokenizer, BLOCK_SIZE, num_links)
    answer = tokenizer.encode(lesson.answer, add_special_tokens=False)
    return Prompt([*joined.token_ids, *answer], joined.documents, len(answer), is_placed)


def place(prompt: Prompt) -> tuple[Tensor, Tensor]:
    """Returns the position of each token, [num_tokens], and which tokens each of them sees, [num_tokens, num_tokens]."""
    documents, size = prompt.documents, len(prompt.token_ids)
    positions, sees = torch.arange(size), torch.ones(size, size).tril().bool()
    ends = (*documents.starts[1:], documents.end)
    for number, (start, end) in enumerate(zip(documents.starts, ends, strict=True)):
        sees[start:end, documents.starts[0] : start] = False
        first = documents.end + number * documents.num_links
        links = slice(first, first + documents.num_links)
        sees[links, end : documents.end] = False
        if not prompt.is_placed:
            positions[start:end] -= start - documents.starts[0]
            positions[links] -= documents.end - end
    return positions, sees


def run(model: nn.Module, links: Tensor, prompt: Prompt) -> Tensor:
    """Returns the loss of a prompt's answer."""
    tokens = torch.tensor(prompt.token_ids)
    positions, sees = place(prompt)
    embeddings = model.get_input_embeddings()(tokens)  # type: ignore[operator]
    rows = links.repeat(len(prompt.documents.starts), 1).to(embeddings.dtype)
    documents = prompt.documents
    embeddings = torch.cat((embeddings[: documents.end], rows, embeddings[documents.links_end :]))
    mask = torch.zeros(sees.shape).masked_fill(~sees, -math.inf)
    asked = torch.arange(len(tokens) - prompt.num_answer - 1, len(tokens) - 1)
    given: dict[str, Any] = {"attention_mask": mask[None, None], "position_ids": positions[None], "use_cache": False}
    logits = model(inputs_embeds=embeddings[None], logits_to_keep=asked, **given).logits[0]
    return cross_entropy(logits.float(), tokens[asked + 1])


def open_model(path: Path) -> nn.Module:
    """Returns a model of a directory or GGUF file in float32, by transformers."""
    from transformers import AutoModelForCausalLM

    place, file = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    model: nn.Module = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **file)
    return model.requires_grad_(requires_grad=False)


def add_updates(model: nn.Module, rank: int) -> nn.Module:
    """Returns a model with a LoRA of this rank in all products of its layers."""
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, task_type="CAUSAL_LM")
    found: nn.Module = get_peft_model(model, config)
    return found


def train(
    model: nn.Module, tokenizer: Tokenizer, links: nn.Parameter, save: Callable[[], None], *, minutes: float,
    rates: tuple[float, float], rows: int, seed: int,
) -> int:  # fmt: skip
    """Trains link embeddings, and what else of the model has gradients, for a time; returns the steps.

    Args:
        save: writes what was learned; called now and then, so that an interrupted run leaves something.
        rates: of the links, and of all else, at the beginning; they fall to a tenth.
        rows: prompts of a step.
    """
    updates = [each for each in model.parameters() if each.requires_grad]
    groups = [{"params": [links], "lr": rates[0]}, {"params": updates, "lr": rates[1]}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.0, betas=(0.9, 0.98))
    began, console, smooth, step, length = time.process_time(), Console(), math.nan, 0, 60.0 * minutes
    while (spent := time.process_time() - began) < length:
        for group, rate in zip(optimizer.param_groups, rates, strict=False):
            group["lr"] = rate * min(1.0, (step + 1) / 10) * max(0.1, 1 - spent / length)
        rng, total = Random(f"links {seed} {step}"), 0.0
        for row in range(rows):
            prompt = make_prompt(draw_lesson(rng, rng.randint(2, MAX_NOTES)), tokenizer, len(links), is_placed=row % 2 > 0)
            loss = run(model, links, prompt)
            torch.autograd.backward(loss / rows)
            total += loss.item() / rows
        torch.nn.utils.clip_grad_norm_([links, *updates], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step, smooth = step + 1, total if math.isnan(smooth) else 0.95 * smooth + 0.05 * total
        if step % 20 == 0:
            console.print(f"step {step} loss {smooth:.3f} after {spent:.0f} s of processor time", highlight=False)
            save()
    save()
    return step


def begin_links(model: nn.Module, tokenizer: Tokenizer, num_links: int) -> nn.Parameter:
    """Returns embeddings to begin with, [num_links, hidden]: a newline's, each a little different."""
    table: Tensor = model.get_input_embeddings().weight  # type: ignore[operator]
    newline = table[tokenizer.encode("\n", add_special_tokens=False)[-1]].detach()
    return nn.Parameter(newline + torch.randn(num_links, table.shape[1]) * table.std() * 0.3)


def write(model: nn.Module, links: Tensor, out: Path, rank: int) -> None:
    """Writes an adapter's directory."""
    out.mkdir(parents=True, exist_ok=True)
    if rank:
        model.save_pretrained(out)  # type: ignore[operator]
    save_file({"link_tokens": links.detach().contiguous()}, out / LINKS_FILE)


def main(arguments: Iterable[str] | None = None) -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.links", description=__doc__)
    parser.add_argument("--model", default="cloister-5m", help="a name, a directory, or a GGUF file of the Llama family")
    parser.add_argument("--out", type=Path, required=True, help="the adapter's directory")
    parser.add_argument("--num-links", type=int, default=5, help="behind each document; 0 trains the LoRA alone")
    parser.add_argument("--rank", type=int, default=0, help="of the LoRA; 0 for none")
    parser.add_argument("--minutes", type=float, default=5.0, help="of processor time")
    parser.add_argument("--rate", type=float, default=2e-2, help="of the links")
    parser.add_argument("--lora-rate", type=float, default=1e-3)
    parser.add_argument("--rows", type=int, default=8, help="prompts of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(None if arguments is None else [*arguments])
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    path = locate(options.model)
    model, tokenizer = open_model(path), Tokenizer(path)
    links = begin_links(model, tokenizer, options.num_links)
    if options.rank:
        model = add_updates(model, options.rank)
    rates = (options.rate, options.lora_rate)
    save = partial(write, model, links, options.out, options.rank)
    num_steps = train(model, tokenizer, links, save, minutes=options.minutes, rates=rates, rows=options.rows, seed=options.seed)
    print(f"{num_steps} steps; wrote {options.out}")


if __name__ == "__main__":
    main()
