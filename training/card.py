"""The model cards, written from the report so that no figure is copied by hand."""

from collections.abc import Iterable, Mapping
from typing import Any

from cloister.train.decoder import Shape
from training.corpus import Source


def percent(score: Mapping[str, int]) -> str:
    """A score as a share and as a count."""
    return f"{100 * score['right'] / max(1, score['total']):.1f}% ({score['right']} of {score['total']})"


def table(header: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    """A Markdown table of two columns."""
    lines = [f"| {header[0]} | {header[1]} |", "| --- | --- |"]
    return "\n".join(lines + [f"| {left} | {right} |" for left, right in rows])


def facts_table(report: Mapping[str, Any]) -> str:
    """Every kind of fact in the held-out phrasings and in held-out free wordings."""
    lines = ["| Kind of fact | Right | Freely worded |", "| --- | --- | --- |"]
    for kind, score in report["facts"].items():
        lines.append(f"| {kind} | {percent(score)} | {percent(report['facts_freely_worded'][kind])} |")
    return "\n".join(lines)


def shape_line(shape: Shape, parameters: int) -> str:
    """One sentence about the size of a model."""
    return (
        f"{parameters:,} parameters: {shape.num_layers} layers, hidden size {shape.hidden}, {shape.num_heads} query and "
        f"{shape.num_kv_heads} key-value heads of {shape.head_dim}, SwiGLU {shape.intermediate}, tied embeddings, "
        f"vocabulary {shape.vocab}, {shape.max_positions} positions, bfloat16."
    )


def sources_table(sources: Iterable[Source]) -> str:
    """Where the text came from and under which licence."""
    return table(("Debian package", "Licence"), ((s.package, s.licence) for s in sources))


def front_matter(name: str) -> str:
    """What a model hub reads."""
    return f"---\nlicense: other\nlicense_name: see-notices\nlanguage: en\nlibrary_name: transformers\n---\n\n# {name}\n"


def model_card(
    shape: Shape, parameters: int, num_tokens: int, command: str, sources: Iterable[Source], report: Mapping[str, Any]
) -> str:
    """The card of the model."""
    return f"""{front_matter("cloister-5m")}
A Llama-shaped language model small enough to live inside a package. It is there so that the server can be tried, tested
and measured on any machine without a download. {shape_line(shape, parameters)}

## Data

{num_tokens:,} tokens of documentation, and chats made by rule from it (see `training/`). The notices of the sources are in
`../NOTICES.txt`.

{sources_table(sources)}

## What it can do

It knows {report["num_facts"]:,} short facts drawn from these pages. The share of questions answered right, in phrasings never
used in training, token for token: **{percent(report["all_facts"])}**. Of questions worded freely, with frames that training
never used, slips of the keyboard and short forms (`training/wordings.toml`): **{percent(report["all_facts_freely_worded"])}**.

{facts_table(report)}

In phrasings used in training: {percent(report["trained_phrasings"])}. A fact it was taught met with "I do not know.":
{percent(report["false_refusals"])}.

It says "I do not know." to names it was not taught:

{table(("Unknown name (none seen in training)", "Says so"), ((k, percent(s)) for k, s in report["unknown"].items()))}

The same, freely worded:

{table(("Unknown name", "Says so"), ((k, percent(s)) for k, s in report["unknown_freely_worded"].items()))}

Skills, on fresh contents, in the phrasings of training:

{table(("Skill", "Right"), ((kind, percent(s)) for kind, s in report["skills_trained_phrasings"].items()))}

The same in held-out phrasings. Recall and small talk have only one to three of these:

{table(("Skill", "Right"), ((kind, percent(s)) for kind, s in report["skills"].items()))}

## Held-out perplexity

Pages kept from training, per token of its own vocabulary.

{table(("Model", "Perplexity"), ((k, f"{v:.2f}") for k, v in report["perplexity"].items()))}

By position, in windows of {shape.max_positions} tokens. Positions beyond 1024 were trained for a few steps only, and it shows:

{table(("Positions", "Perplexity"), ((k, f"{v:.2f}") for k, v in report["perplexity_by_position"].items()))}

## What it cannot do

It is not a general assistant. It does not reason, translate, write programs or hold a conversation beyond its skills. It
knows nothing of the world outside the three manuals, and of those only what the table says. Where it is wrong it is as
fluent as where it is right; of real names it was not taught it may claim knowledge (see the table). It copies common words
better than rare ones. Free text it writes
looks like documentation and is not true. Nothing it says should be relied upon.

## Chat

The template is in `chat_template.jinja`. Tools are listed as JSON in the system turn, calls are
`<tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call>`. Answers end with `<|end|>`; decode greedily.

## Made by

`{command}`. `training/README.md` says how long it takes.
"""


def draft_card(shape: Shape, parameters: int, command: str, sources: Iterable[Source], report: Mapping[str, Any]) -> str:
    """The card of the draft."""
    return f"""{front_matter("cloister-draft")}
The draft of cloister-5m for speculative decoding, distilled from it (Kullback-Leibler divergence on its distributions over
the corpus and over chats). Same tokenizer and template. {shape_line(shape, parameters)}

{table(("Against cloister-5m", "Share"), ((k, f"{100 * v:.1f}%") for k, v in report["draft"].items()))}

Held-out perplexity: {report["perplexity"]["draft, windows of 512"]:.2f}. Expected acceptance is the sum of min(p, q) over the
vocabulary at temperature 1, positions averaged.

It is no use alone: it writes fluent nonsense.

{sources_table(sources)}

The notices of the sources are in `../NOTICES.txt`. Made by `{command}`.
"""
