"""A folder of small texts to run the recipe on, and a recipe that finishes in seconds."""

from pathlib import Path

import pytest
import torch

from training.corpus import folder_source
from training.recipe import STAGES, Recipe
from training.scale import TINY

SENTENCE = "Page {i} is about the number {i}: it is followed by {j}, and the word for today is {word}.\n\n"
WORDS = ("lamp", "river", "stone", "north", "query")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty pages, of which the hash of the name holds two out."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(60):
        lines = [SENTENCE.format(i=i, j=j, word=WORDS[(i + j) % len(WORDS)]) for j in range(12)]
        (folder / f"page{i}.txt").write_text(f"Title of page {i}\n\n" + "".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def recipe(texts: Path, tmp_path: Path) -> Recipe:
    return Recipe(folder_source(texts), TINY, tmp_path / "work", tmp_path / "models")


@pytest.fixture(scope="module")
def finished(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe whose every stage has run, for tests that change none of its files."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = Recipe(folder_source(texts), TINY, folder / "work", folder / "models")
    recipe.run(tuple(STAGES))
    return recipe
