"""The text the models read: three Debian documentation packages turned into plain text.

A document is one page. Navigation bars, footers and paragraphs that an earlier page already had are dropped, and
about one page in forty is held out by the hash of its name, so the split never depends on the order of the files.
"""

import gzip
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

DOC_ROOT = Path("/usr/share/doc")
HELD_OUT_ONE_IN = 40
MIN_DOCUMENT_CHARS = 200
MIN_PARAGRAPH_CHARS = 60
"""Shorter paragraphs (headings, signatures, list items) may repeat."""

# Pages that only index or repeat other pages.
INDEX_PAGES = re.compile(r"(requirements|capi3ref|syntaxdiagrams|hlr\d+|\w*crossref|bookindex|doclist|keyword_index)\.html$")
SKIPPED_TAGS = frozenset({"script", "style", "svg", "button", "form", "head"})
SKIPPED_CLASSES = frozenset({"nosearch", "navheader", "navfooter", "toc", "fancy_toc"})
BLOCK_TAGS = frozenset({"p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "table", "pre", "ul", "ol", "dl", "blockquote"})
LINE_TAGS = frozenset({"br", "li", "tr", "dt", "dd", "hr"})
VOID_TAGS = frozenset({"br", "hr", "img", "input", "link", "meta", "col", "area", "base", "wbr"})

ROLE = re.compile(r":(?:[a-zA-Z+-]+:)?[a-zA-Z+-]+:`([^`]+)`")
ROLE_TARGET = re.compile(r"^(.*?)\s*<[^>]*>$", re.DOTALL)
RST_NOISE = re.compile(
    r"^\.\. (?:sectionauthor|moduleauthor|_[^:\n]*|index|highlight(?:lang)?|testsetup|XXX)(?:::|:).*\n", re.M
)


class MissingCorpusError(FileNotFoundError):
    """A source folder is absent or holds no document."""


@dataclass(frozen=True)
class Source:
    """One folder of documents and the licence it came under."""

    name: str
    package: str
    root: Path
    pattern: str
    licence: str


DEBIAN_SOURCES = (
    Source("python", "python3.11-doc", DOC_ROOT / "python3.11" / "html" / "_sources", "*.rst.txt*", "PSF-2.0"),
    Source("sqlite", "sqlite3-doc", DOC_ROOT / "sqlite3", "*.html*", "public domain"),
    Source("postgresql", "postgresql-doc-15", DOC_ROOT / "postgresql-doc-15" / "html", "*.html*", "PostgreSQL"),
)


def folder_source(root: Path) -> tuple[Source, ...]:
    """Every ``.txt`` file of a folder of the caller's own, for trying the recipe on other text."""
    return (Source("folder", str(root), root, "*.txt", "the folder's own"),)


@dataclass(frozen=True)
class Document:
    """One page of plain text; ``path`` is relative to the source's folder."""

    source: str
    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether this page is kept from training, by the SHA-256 of its name."""
        digest = hashlib.sha256(f"{self.source}/{self.path}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


class PageText(HTMLParser):
    """Collects the text of an HTML page: blank lines between blocks, ``pre`` kept as it stands."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._skipped: str | None = None
        self._skip_depth = 0
        self._pre_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipped is not None:
            self._skip_depth += tag == self._skipped
            return
        classes = set((dict(attrs).get("class") or "").split())
        if tag not in VOID_TAGS and (tag in SKIPPED_TAGS or classes & SKIPPED_CLASSES):
            self._skipped, self._skip_depth = tag, 1
        elif tag in BLOCK_TAGS:
            self.pieces.append("\n\n")
        elif tag in LINE_TAGS:
            self.pieces.append("\n")
        elif tag in ("td", "th"):
            self.pieces.append("\t")
        self._pre_depth += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if self._skipped is not None:
            self._skip_depth -= tag == self._skipped
            if self._skip_depth == 0:
                self._skipped = None
            return
        if tag in BLOCK_TAGS:
            self.pieces.append("\n\n")
        self._pre_depth -= tag == "pre" and self._pre_depth > 0

    def handle_data(self, data: str) -> None:
        if self._skipped is None:
            self.pieces.append(data if self._pre_depth else re.sub(r"\s+", " ", data))


def plain_html(page: str) -> str:
    """The readable text of an HTML page."""
    parser = PageText()
    parser.feed(page)
    parser.close()
    return _tidy("".join(parser.pieces))


def plain_rst(page: str) -> str:
    """reStructuredText with its roles (``:mod:`re```) reduced to what a reader sees."""
    return _tidy(visible_rst(page))


def visible_rst(page: str) -> str:
    """The same with its indentation as it stands."""
    return ROLE.sub(_role_text, RST_NOISE.sub("", page))


def _role_text(match: re.Match[str]) -> str:
    content = match[1].lstrip("!")
    target = ROLE_TARGET.match(content)
    return (target[1] if target else content.rpartition(".")[2] if content.startswith("~") else content).strip()


def _tidy(text: str) -> str:
    text = text.replace("\xa0", " ").expandtabs(4)
    text = re.sub(r"(?<=\S) +", " ", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n {1,3}(?=\S)", "\n", text) if "\n    " not in text else text
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def read_page(path: Path) -> str:
    """The raw text of a page, gzipped or not."""
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8", errors="replace")


def plain_text(path: Path) -> str:
    """The text of a page by the kind of file it is."""
    page = read_page(path)
    if ".html" in path.suffixes:
        return plain_html(page)
    return plain_rst(page) if ".rst" in path.suffixes else page.strip()


def read_documents(sources: tuple[Source, ...]) -> Iterator[Document]:
    """Every document, each paragraph only where it is first seen.

    Raises:
        MissingCorpusError: if a source has no file; the message names the package to install.
    """
    seen: set[bytes] = set()
    for source in sources:
        paths = sorted(p for p in source.root.rglob(source.pattern) if p.is_file() and not INDEX_PAGES.search(p.name))
        if not paths:
            raise MissingCorpusError(f"no {source.pattern} under {source.root}: install {source.package}")
        for path in paths:
            text = _first_seen(plain_text(path), seen)
            if len(text) >= MIN_DOCUMENT_CHARS:
                yield Document(source.name, path.relative_to(source.root).as_posix(), text)


def _first_seen(text: str, seen: set[bytes]) -> str:
    kept = []
    for paragraph in text.split("\n\n"):
        digest = hashlib.sha256(" ".join(paragraph.split()).encode()).digest()[:12]
        if len(paragraph) < MIN_PARAGRAPH_CHARS or digest not in seen:
            kept.append(paragraph)
        seen.add(digest)
    return "\n\n".join(kept).strip()
