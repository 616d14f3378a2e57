"""`cloister train`: draft heads and draft models for a model whose own weights stay frozen."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from cloister.cli.console import err, print_json, print_line, print_table
from cloister.cli.console import out as console
from cloister.types.errors import ConfigError

if TYPE_CHECKING:
    from cloister.train.head_training import HeadSettings
    from cloister.train.session import Material

app = typer.Typer(help="Train what drafts tokens for a model; the model itself stays as it is.", no_args_is_help=True)

Model = Annotated[str, typer.Option(help="What is served: an embedded model's name, a directory, a GGUF file, or a hub name.")]
Text = Annotated[list[Path], typer.Option(help="UTF-8 text: a file, or a folder of .txt and .md files; may be repeated.")]
Questions = Annotated[
    list[Path] | None,
    typer.Option(help="File with a question a line, which the model answers itself; may be repeated.", show_default=False),
]
Continues = Annotated[
    bool, typer.Option("--continue", help="Let the model go on with beginnings of the text, and learn from what it says.")
]
NumAnswers = Annotated[int, typer.Option("--answers", help="Questions at most, and beginnings at most.", min=1)]
AnswerTokens = Annotated[int, typer.Option(help="Tokens that the model says to each at most.", min=1)]
Temperature = Annotated[float, typer.Option(help="Of what the model says; 0 takes the likeliest tokens.", min=0, max=2)]
NumTokens = Annotated[int, typer.Option("--tokens", help="Tokens of the text to use at most.", min=1)]
NumHeads = Annotated[int, typer.Option("--heads", help="Heads: the k-th guesses the k-th token behind the next.", min=1, max=8)]
Steps = Annotated[int, typer.Option(help="Steps of training.", min=1)]
Rows = Annotated[int, typer.Option(help="Places of the text that a step learns from.", min=1)]
Rate = Annotated[float, typer.Option(help="Learning rate at its peak.", min=1e-6, max=1.0)]
Out = Annotated[
    Path | None, typer.Option(help="Directory to write to; unset, in the model's, under `drafters`.", show_default=False)
]
Replaces = Annotated[bool, typer.Option("--replace", help="Write over what was trained before and lies there.")]
Work = Annotated[
    Path | None,
    typer.Option(help="Directory for answers, hidden states and checkpoints: run again, it goes on. Unset, none is kept."),
]
Seed = Annotated[int, typer.Option(help="Decides everything that is drawn.", min=0)]
NumThreads = Annotated[
    int | None, typer.Option("--num-threads", help="Threads for arithmetic; unset, the processors there are.", min=1)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


@app.command()
def medusa(
    model: Model,
    text: Text,
    questions: Questions = None,
    continues: Continues = False,
    num_answers: NumAnswers = 4000,
    answer_tokens: AnswerTokens = 64,
    temperature: Temperature = 0.0,
    num_tokens: NumTokens = 500_000,
    num_heads: NumHeads = 4,
    num_blocks: Annotated[int, typer.Option("--blocks", help="Residual blocks of each head.", min=1, max=4)] = 1,
    steps: Steps = 2000,
    rows: Rows = 512,
    rate: Rate = 1e-2,
    out: Out = None,
    replaces: Replaces = False,
    work: Work = None,
    seed: Seed = 0,
    num_threads: NumThreads = None,
    as_json: AsJson = False,
) -> None:
    """Train Medusa's heads, and find the tree of their guesses that pays.

    They learn what the model itself would say at places of the text, of answers that it gives to questions, and of what it goes
    on with. A part of all of this is held out, to measure how often each head is right.
    """
    from cloister.train.head_training import HeadSettings

    material = _gather(
        model, text, questions, continues, num_answers, answer_tokens, temperature, num_tokens, work, seed, num_threads
    )
    settings = HeadSettings(
        kind="medusa", num_heads=num_heads, width=num_blocks, steps=steps, rows=rows, rate=rate, out=out, replaces=replaces
    )
    _train_heads(material, settings, as_json)


@app.command()
def blockwise(
    model: Model,
    text: Text,
    questions: Questions = None,
    continues: Continues = False,
    num_answers: NumAnswers = 4000,
    answer_tokens: AnswerTokens = 64,
    temperature: Temperature = 0.0,
    num_tokens: NumTokens = 500_000,
    num_heads: NumHeads = 4,
    inner: Annotated[
        int | None, typer.Option(help="Rows of the layer that heads share; unset, twice the hidden size.", min=1)
    ] = None,
    steps: Steps = 2000,
    rows: Rows = 512,
    rate: Rate = 1e-2,
    out: Out = None,
    replaces: Replaces = False,
    work: Work = None,
    seed: Seed = 0,
    num_threads: NumThreads = None,
    as_json: AsJson = False,
) -> None:
    """Train the heads of blockwise parallel decoding: one layer that guesses a chain of tokens.

    They learn from what Medusa's heads would learn from.
    """
    from cloister.train.head_training import HeadSettings

    material = _gather(
        model, text, questions, continues, num_answers, answer_tokens, temperature, num_tokens, work, seed, num_threads
    )
    settings = HeadSettings(
        kind="blockwise", num_heads=num_heads, width=inner or 0, steps=steps, rows=rows, rate=rate, out=out, replaces=replaces
    )
    _train_heads(material, settings, as_json)


@app.command()
def draft(
    model: Model,
    text: Text,
    questions: Questions = None,
    continues: Continues = False,
    num_answers: NumAnswers = 4000,
    answer_tokens: AnswerTokens = 64,
    temperature: Temperature = 0.0,
    num_tokens: NumTokens = 500_000,
    hidden_size: Annotated[
        int | None, typer.Option(help="Of the draft; unset, three eighths of the model's, in heads of 32.", min=32)
    ] = None,
    num_layers: Annotated[int, typer.Option("--layers", help="Layers of the draft.", min=1, max=16)] = 2,
    steps: Steps = 1000,
    rows: Annotated[int, typer.Option(help="Passages that a step learns from.", min=1)] = 8,
    rate: Rate = 6e-3,
    out: Out = None,
    replaces: Replaces = False,
    work: Work = None,
    seed: Seed = 0,
    num_threads: NumThreads = None,
    as_json: AsJson = False,
) -> None:
    """Distil a small Llama from a model: a directory that `serve --draft-model` takes, with the model's tokenizer.

    It learns the model's distribution of the next token, at every place of the text and of what the model says itself.
    """
    from cloister.train.draft_training import DraftSettings, train_draft

    material = _gather(
        model, text, questions, continues, num_answers, answer_tokens, temperature, num_tokens, work, seed, num_threads
    )
    settings = DraftSettings(
        hidden_size=hidden_size, num_layers=num_layers, steps=steps, rows=rows, rate=rate, out=out, replaces=replaces
    )
    with _show_progress(material) as shown:
        report = train_draft(material, settings, shown)
    if as_json:
        print_json(asdict(report))
        return
    size = f"{report.num_parameters:,} parameters, {report.num_bytes / 1e6:.1f} MB"
    out_line = f"{report.directory}: {size}, {report.num_tokens:,} tokens, {report.elapsed_s:.0f} s"
    console.print(out_line, highlight=False)
    rows_ = [(one.source, f"{one.top1:.1%}", f"{one.acceptance:.1%}", one.num_places) for one in report.agreement]
    print_table("Held-out places", ["", "same likeliest token", "expected acceptance", "places"], rows_)


def _gather(
    model: str,
    text: list[Path],
    questions: list[Path] | None,
    continues: bool,
    num_answers: int,
    answer_tokens: int,
    temperature: float,
    num_tokens: int,
    work: Path | None,
    seed: int,
    num_threads: int | None,
) -> Material:
    """Returns what to learn from, as the flags of all three verbs say it (ConfigError where torch is missing)."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("training needs torch; install it with: pip install 'cloister[torch]'")
    from cloister.train.session import Material

    return Material(
        model=model,
        text=text,
        questions=questions or [],
        num_tokens=num_tokens,
        num_answers=num_answers,
        answer_tokens=answer_tokens,
        continues=continues,
        temperature=temperature,
        work=work,
        seed=seed,
        num_threads=num_threads,
    )


def _train_heads(material: Material, settings: HeadSettings, as_json: bool) -> None:
    from cloister.train.head_training import train_heads

    with _show_progress(material) as shown:
        report = train_heads(material, settings, shown)
    if as_json:
        print_json(asdict(report))
        return
    line = f"{report.directory}: {report.num_bytes / 1e6:.1f} MB, {report.num_tokens:,} places of text and answers"
    console.print(f"{line} (the model's own: {report.num_own_tokens:,}), {report.elapsed_s:.0f} s", highlight=False)
    rows = [(f"{one.source}, head {one.head}", f"{one.top1:.1%}", f"{one.top5:.1%}", one.num_places) for one in report.accuracy]
    print_table("Accuracy at held-out places", ["", "best guess", "best five", "places"], rows)
    shares = [(size, f"{kept:.2f}") for size, kept in report.kept.items()]
    print_table("What a step keeps", ["drafts", "tokens beside the model's own"], shares)


@dataclass(frozen=True, slots=True)
class _Bar:
    """One bar of the progress shown (protocol `train.session.Task`)."""

    progress: Progress
    task: TaskID

    def advance(self, count: int) -> None:
        self.progress.advance(self.task, count)

    def say(self, note: str) -> None:
        self.progress.update(self.task, note=note)


@dataclass(frozen=True, slots=True)
class _Bars:
    """Everything that takes time, a bar each (protocol `train.session.Reporter`)."""

    progress: Progress

    def begin(self, what: str, total: int) -> _Bar:
        return _Bar(self.progress, self.progress.add_task(what, total=total, note=""))


@contextmanager
def _show_progress(material: Material) -> Iterator[_Bars]:
    """Shows bars; who stops it is told what is kept."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    try:
        with Progress(*columns, console=err, transient=True) as progress:
            yield _Bars(progress)
    except KeyboardInterrupt:
        kept = (
            f"run it again to go on; {material.work} keeps what was done" if material.work else "nothing is kept without --work"
        )
        print_line(f"Stopped: {kept}.", console=err)
        raise
