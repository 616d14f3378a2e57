"""`cloister roofline`: every operator of a model under a chip's roofline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.cli.console import err, find_place, out, print_json, print_table
from cloister.types.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from cloister.backends.spec import DecoderSpec
    from cloister.bench.chips import Chip
    from cloister.bench.roofline import Roofline

WIDE = 164
"""Width of the whole table; on narrower terminals shapes are omitted."""
FEWEST_BITS, MOST_BITS = 1.0, 32.0


def roofline(
    model: Annotated[str, typer.Argument(help="Embedded model's name, model directory, GGUF file, or a config.json alone.")],
    chip: Annotated[
        str, typer.Option(help="Chip of the table (part of its name will do), or `here`: this machine, measured now.")
    ] = "here",
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt, for prefill.", min=1)] = 512,
    context: Annotated[int, typer.Option(help="Keys of each sequence, for decode.", min=1)] = 512,
    batch: Annotated[int, typer.Option(help="Sequences at once.", min=1)] = 1,
    weights_bits: Annotated[float, typer.Option(help="Bits of a weight, with its share of scales (Q4_0: 4.5).")] = 16.0,
    activation_bits: Annotated[float, typer.Option(help="Bits of an activation.")] = 16.0,
    kv_bits: Annotated[float, typer.Option(help="Bits of a number in the KV cache.")] = 16.0,
    head_bits: Annotated[
        float | None, typer.Option(help="Bits of embedding and head; unset, those of weights.", show_default=False)
    ] = None,
    tp: Annotated[int, typer.Option(help="Chips that share the model (tensor parallel); figures are of one.", min=1)] = 1,
    square: Annotated[
        bool,
        typer.Option("--square", help="Count the whole square of scores in prefill, as textbooks do, not its causal half."),
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: operations, bytes, seconds.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the roofline into a PNG.", metavar="FILE")] = None,
) -> None:
    """Count every operator of a model, in prefill and in decode, and apply the roofline of a chip.

    Prints operations, bytes, arithmetic intensity, the limiting resource, minimal time, tokens per second. Reads no weights.
    """
    from cloister.bench.roofline import draw_roofline, to_json, to_markdown
    from cloister.bench.roofline_operators import Numbers

    plot = find_place(plot) if plot is not None else None
    numbers = Numbers(
        weights_bits=_check_bits("weights-bits", weights_bits),
        activation_bits=_check_bits("activation-bits", activation_bits),
        kv_bits=_check_bits("kv-bits", kv_bits),
        head_bits=_check_bits("head-bits", weights_bits if head_bits is None else head_bits),
    )
    spec = read_model_spec(model)
    drawn = draw_roofline(
        spec, open_chip(chip), model=_short(model), prompt=prompt, context=context, num_seqs=batch, numbers=numbers,
        num_chips=tp, square=square,
    )  # fmt: skip
    if as_json:
        print_json(to_json(drawn))
    elif markdown:
        print(to_markdown(drawn), end="")
    else:
        _print(drawn)
    if plot is not None:
        from cloister.bench.plots import plot_roofline

        plot_roofline(plot, drawn)
        err.print(f"Written: {plot}", highlight=False)


def read_model_spec(name: str) -> DecoderSpec:
    """Returns the decoder of an embedded model, a directory, a GGUF file or a config.json; reads no weights and no network.

    Raises:
        ModelError: there is no such model, or its config is not supported.
    """
    from cloister.models import embedded_names, locate
    from cloister.models.config import read_json
    from cloister.models.decoder import find_family, read_spec
    from cloister.models.gguf.architecture import read_spec as read_gguf_spec
    from cloister.types.gguf import read_gguf

    path = Path(name).expanduser()
    if name not in embedded_names() and not path.exists():
        embedded = ", ".join(embedded_names())
        message = f"there is no model {name!r}; give an embedded model ({embedded}), a directory, a GGUF file or a config.json"
        raise ModelError(message, param="model")
    if path.suffix != ".json":
        path = locate(name)
        if path.is_file():
            return read_gguf_spec(read_gguf(path))
        path /= "config.json"
    config = read_json(path)
    return read_spec(find_family(config), config)


def open_chip(name: str, num_threads: int | None = None) -> Chip:
    """Returns a chip of the table, or this machine, measured.

    Raises:
        ConfigError: there is no chip of that name.
    """
    from cloister.bench.chips import HERE, find_chip

    if name != HERE:
        return find_chip(name)
    from cloister.bench.kernels import measure_here

    with err.status("Measuring this machine"):
        return measure_here(num_threads)


def _print(drawn: Roofline) -> None:
    from cloister.bench import roofline as report

    for line in report.describe_roof(drawn):
        out.print(line, highlight=False, soft_wrap=True)
    hidden = (report.WIDEST,) if out.is_terminal and out.width < WIDE else ()
    for step in drawn.steps:
        rows = [_without(row, hidden) for row in report.list_rows(step)]
        out.print()
        print_table(report.describe_work(step.work), _without(report.HEADERS, hidden), rows)
        out.print(report.describe_step(step), highlight=False, soft_wrap=True)
    out.print()
    style = None if drawn.fits else "bold red"
    out.print(report.describe_memory(drawn), highlight=False, style=style)


def _without(row: tuple[str, ...], hidden: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(cell for number, cell in enumerate(row) if number not in hidden)


def _check_bits(flag: str, bits: float) -> float:
    if not FEWEST_BITS <= bits <= MOST_BITS:
        raise ConfigError(f"--{flag} must be from {FEWEST_BITS:g} to {MOST_BITS:g}, not {bits:g}", param=flag.replace("-", "_"))
    return bits


def _short(model: str) -> str:
    """The model's name for titles; for a config.json, its directory's name."""
    path = Path(model)
    return path.resolve().parent.name if path.name == "config.json" else path.name or model
