"""``python -m training``: make the embedded models from the documentation of three Debian packages."""

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from training.corpus import DEBIAN_SOURCES, MissingCorpusError, folder_source
from training.recipe import STAGES, Recipe, StageMissingError
from training.scale import SCALES, Scale

EMBEDDED = Path("src/cloister/models/embedded")


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    options = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    options.add_argument("--work", type=Path, default=Path("build/training"), help="checkpoints and reports go here")
    options.add_argument("--out", type=Path, default=EMBEDDED, help="the models go here")
    options.add_argument("--stage", choices=tuple(STAGES), help="run this stage alone")
    options.add_argument("--scale", choices=tuple(SCALES), default="full", help="tiny finishes in seconds and learns nothing")
    options.add_argument("--text", type=Path, help="a folder of .txt files to learn from instead of the Debian packages")
    options.add_argument("--start", type=Path, help="go on from the exported models of this folder instead of from nothing")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--threads", type=int, default=2, help="threads of torch")
    return options


def runnable(scale: Scale) -> Scale:
    """The same figures, uncompiled where there is no C++ compiler."""
    if scale.compiled and shutil.which("g++") is None:
        Console().print("no g++ found: training without compilation, several times slower")
        return replace(scale, compiled=False)
    return scale


def main(arguments: list[str] | None = None) -> int:
    """Run the recipe; returns the exit status."""
    options = parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    sources = folder_source(options.text) if options.text else DEBIAN_SOURCES
    recipe = Recipe(sources, runnable(SCALES[options.scale]), options.work, options.out, options.seed, options.start)
    try:
        recipe.run((options.stage,) if options.stage else tuple(STAGES))
    except (MissingCorpusError, StageMissingError) as error:
        Console(stderr=True).print(str(error), style="red")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
