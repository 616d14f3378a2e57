"""`cloister datastore`: public text from which the drafter `rest` retrieves drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from cloister.cli.console import make_progress, out, print_json
from cloister.types.errors import ConfigError
from cloister.types.text_files import read_text_file

app = typer.Typer(help="Build datastores of public text for drafts.", no_args_is_help=True)

PIECE_CHARS: Final = 1 << 18
"""Maximum characters tokenized at once, cut at the end of a paragraph: the tokenizer's memory grows with it."""


@app.callback()
def datastore() -> None:
    """Build datastores of public text for drafts."""


@app.command()
def build(
    model: Annotated[str, typer.Option(help="Model whose tokenizer is used: an embedded one's name, a directory, a hub name.")],
    text: Annotated[list[Path], typer.Option(help="UTF-8 text, or a folder of .txt and .md files; may be repeated.")],
    directory: Annotated[Path, typer.Option("--out", help="Directory to write to.", metavar="OUT")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Build a datastore of public text for `serve --speculate rest --datastore OUT`.

    Give public text only: response times reveal which drafts are accepted, so users of the server can find out what is in its
    datastore.
    """
    from cloister.executor.drafters.datastore import Datastore, write_datastore
    from cloister.models import load, locate
    from cloister.models.generation import digest_tokenizer
    from cloister.text import Tokenizer

    files = list_files(text)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; name a directory", param="out")
    source = load(locate(model, progress=True))
    tokenizer, digest = Tokenizer(source.path), digest_tokenizer(source.path)
    started = time.perf_counter()
    with make_progress() as progress:
        task = progress.add_task("Reading", total=len(files))

        def encode(file: Path) -> list[int]:
            progress.advance(task)
            return encode_document(
                read_text_file(file, param="text"), lambda piece: tokenizer.encode(piece, parse_special=False)
            )

        documents = (encode(file) for file in files)
        try:
            header = write_datastore(directory, documents, num_ids=source.spec.vocab_size, tokenizer=digest)
        except OSError as error:
            raise ConfigError(
                f"the datastore cannot be written to {directory}: {error.strerror}; free space or name another place",
                param="out",
            ) from None
    report = {
        "model": model,
        "directory": str(directory),
        "num_documents": header.num_documents,
        "num_tokens": header.num_tokens,
        "size_bytes": Datastore(directory, digest, header.num_ids).num_bytes,
        "elapsed_s": round(time.perf_counter() - started, 1),
    }
    if as_json:
        print_json(report)
        return
    size = f"{int(str(report['size_bytes'])) / 1e6:.1f} MB"
    out.print(f"{directory}: {header.num_tokens} tokens of {header.num_documents} documents, {size}", highlight=False)
    out.print("Its text must be public: users of a server can find out what is in its datastore.", highlight=False)


def list_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the given files, and all .txt and .md files below the given folders, by name.

    Raises:
        ConfigError: a folder has none, or a file does not exist.
    """
    found = []
    for path in paths:
        files = sorted(file for kind in ("*.txt", "*.md") for file in path.rglob(kind)) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise ConfigError(
                f"{path} is neither a file nor a folder with .txt or .md files; give one that holds text", param="text"
            )
        found += files
    return found


def encode_document(text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Returns the token ids of a text of any length."""
    return [token for piece in _cut(text) for token in encode(piece)]


def _cut(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.rfind("\n\n", start, start + PIECE_CHARS) if len(text) - start > PIECE_CHARS else len(text)
        end = end if end > start else start + PIECE_CHARS
        yield text[start:end]
        start = end
