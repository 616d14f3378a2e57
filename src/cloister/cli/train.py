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
from cloister.types.extras import install_command

if TYPE_CHECKING:
    from cloister.train.head_training import HeadSettings
    from cloister.train.session import Material

app = typer.Typer(help="Train drafters for a model; the model itself is unchanged.", no_args_is_help=True)

Model = Annotated[str, typer.Option(help="Served model: an embedded model's name, a directory, a GGUF file, or a hub name.")]
Text = Annotated[list[Path], typer.Option(help="UTF-8 text: a file, or a folder of .txt and .md files; may be repeated.")]
Questions = Annotated[
    list[Path] | None,
    typer.Option(help="File with one question per line, which the model answers; may be repeated.", show_default=False),
]
Continues = Annotated[
    bool, typer.Option("--continue", help="Let the model continue beginnings of the text, and learn from its continuations.")
]
NumAnswers = Annotated[int, typer.Option("--answers", help="Maximum number of questions, and of beginnings.", min=1)]
AnswerTokens = Annotated[int, typer.Option(help="Maximum tokens of each of the model's answers.", min=1)]
Temperature = Annotated[float, typer.Option(help="Temperature of the model's answers; 0 is greedy.", min=0, max=2)]
NumTokens = Annotated[int, typer.Option("--tokens", help="Maximum tokens of the text to use.", min=1)]
NumHeads = Annotated[int, typer.Option("--heads", help="Heads: the k-th predicts token k after the next.", min=1, max=8)]
Steps = Annotated[int, typer.Option(help="Steps of training.", min=1)]
Rows = Annotated[int, typer.Option(help="Positions of the text in a training step.", min=1)]
Rate = Annotated[float, typer.Option(help="Peak learning rate.", min=1e-6, max=1.0)]
Out = Annotated[
    Path | None, typer.Option(help="Directory to write to; unset, in the model's, under `drafters`.", show_default=False)
]
Replaces = Annotated[bool, typer.Option("--replace", help="Overwrite an earlier result.")]
Work = Annotated[
    Path | None,
    typer.Option(help="Directory for answers, hidden states and checkpoints, to resume from. Unset, none is kept."),
]
Seed = Annotated[int, typer.Option(help="Seed of all random choices.", min=0)]
NumThreads = Annotated[int | None, typer.Option("--num-threads", help="Threads for arithmetic; unset, all CPUs.", min=1)]
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
    """Train Medusa heads, and find the best tree of their predictions.

    They learn to predict the model's own output at positions of the text, of its answers to questions, and of its
    continuations. A part is held out, to measure the accuracy of each head.
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
    """Train the heads of blockwise parallel decoding: one layer that predicts a chain of tokens.

    They learn from the same data as Medusa heads.
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
        int | None, typer.Option(help="Hidden size of the draft; unset, three eighths of the model's, in heads of 32.", min=32)
    ] = None,
    num_layers: Annotated[int, typer.Option("--layers", help="Layers of the draft.", min=1, max=16)] = 2,
    steps: Steps = 1000,
    rows: Annotated[int, typer.Option(help="Passages in a training step.", min=1)] = 8,
    rate: Rate = 6e-3,
    out: Out = None,
    replaces: Replaces = False,
    work: Work = None,
    seed: Seed = 0,
    num_threads: NumThreads = None,
    as_json: AsJson = False,
) -> None:
    """Distil a small Llama from a model: a directory for `serve --draft-model`, with the model's tokenizer.

    It learns the model's distribution of the next token, at every position of the text and of the model's own answers.
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
    """Returns the training data from the flags shared by all three verbs (ConfigError if torch is missing)."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"training needs torch; install it with: {install_command('torch')}")
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
    """One progress bar (protocol `train.session.Task`)."""

    progress: Progress
    task: TaskID

    def advance(self, count: int) -> None:
        self.progress.advance(self.task, count)

    def say(self, note: str) -> None:
        self.progress.update(self.task, note=note)


@dataclass(frozen=True, slots=True)
class _Bars:
    """A progress bar for each long-running task (protocol `train.session.Reporter`)."""

    progress: Progress

    def begin(self, what: str, total: int) -> _Bar:
        return _Bar(self.progress, self.progress.add_task(what, total=total, note=""))


@contextmanager
def _show_progress(material: Material) -> Iterator[_Bars]:
    """Shows progress bars; on interruption prints what is kept."""
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
