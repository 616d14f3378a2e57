"""Short facts drawn from the documentation: a subject, what is asked about it, and the answer in its own words.

Every drawer reads one regular part of the documentation (a table, a list of definitions, titles) and yields pairs of a
subject and an answer. Answers too long for a small model to know by heart are not facts; their subjects count as
*unknown*: real names the model has to say it does not know.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from training.corpus import Source, plain_html, read_page, visible_rst

MAX_ANSWER_CHARS = 84
MAX_SUBJECT_CHARS = 40

Pair = tuple[str, str]
Drawer = Callable[[Path], Iterator[Pair]]


@dataclass(frozen=True)
class Kind:
    """A sort of fact.

    ``nouns`` name a subject ``{x}``; ``attributes`` say what is asked of it, none meaning what it is. ``most`` bounds
    how many facts of the kind are taught, so that no kind drowns the others.
    """

    name: str
    source: str
    nouns: tuple[str, ...]
    draw: Drawer
    attributes: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    most: int = 200


@dataclass(frozen=True)
class Fact:
    """One answer about one subject of a kind."""

    kind: str
    subject: str
    answer: str


@dataclass(frozen=True)
class Knowledge:
    """What the model is taught, and the real names it is not taught."""

    kinds: dict[str, Kind]
    facts: tuple[Fact, ...]
    unknown: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def of_kind(self, kind: str) -> list[Fact]:
        """The facts of one kind."""
        return [fact for fact in self.facts if fact.kind == kind]


def stable_order(text: str) -> bytes:
    """A key that shuffles names the same way on every machine."""
    return hashlib.sha256(text.encode()).digest()


def first_sentence(text: str) -> str:
    """The first sentence of a paragraph, its white space made single, marks of emphasis and code dropped."""
    flat = re.sub(r"\s+", " ", text).strip().replace("``", "").replace("*", "")
    return re.split(r"(?<=[a-z0-9)`'\"]\.)\s+(?=[A-Z(`])", flat, maxsplit=1)[0]


def _html(path: Path) -> str:
    return read_page(next(p for p in (path, path.with_name(path.name + ".gz")) if p.exists()))


@cache
def _rst(path: Path) -> str:
    return visible_rst(read_page(path))


def _library_pages(root: Path) -> list[Path]:
    # test.rst speaks of modules it does not name, in a way the drawers cannot follow.
    return sorted(p for p in (root / "library").glob("*.rst.txt") if p.name != "test.rst.txt")


def _entries(text: str, directive: str) -> Iterator[tuple[str, str]]:
    """Header and body of every ``.. directive::`` at the margin."""
    for match in re.finditer(rf"^\.\. {directive}:: (.+(?:\\\n.+)*)\n((?:\n|[ \t]+.*\n)*)", text, re.MULTILINE):
        header = re.sub(r"\\\n\s*", " ", match[1])
        yield re.sub(r"\s+", " ", header).strip(), match[2]


def _first_paragraph(body: str) -> str:
    for paragraph in re.split(r"\n\s*\n", body):
        if paragraph.strip() and not re.match(r"\s*(\.\.|:\w+:|\w+\()", paragraph):
            return paragraph
    return ""


def python_modules(root: Path) -> Iterator[Pair]:
    """``.. module:: re`` and its synopsis."""
    for path in _library_pages(root):
        for name, body in _entries(_rst(path), "module"):
            synopsis = re.search(r":synopsis: (.+(?:\n {4,}(?!:)\S.*)*)", body)
            if synopsis:
                yield name, first_sentence(synopsis[1])


def python_terms(root: Path) -> Iterator[Pair]:
    """Terms of the glossary."""
    text = _rst(root / "glossary.rst.txt")
    for match in re.finditer(r"^   (\S.*)\n((?:      .*\n|\n)+)", text, re.MULTILINE):
        if not match[1].startswith((".", "`")):
            yield match[1].strip(), first_sentence(_first_paragraph(match[2]))


def _python_functions(root: Path) -> Iterator[tuple[str, str, str]]:
    for path in _library_pages(root):
        text = _rst(path)
        module = re.search(r"^\.\. (?:module|currentmodule):: (\S+)", text, re.MULTILINE)
        prefix = "" if path.name == "functions.rst.txt" or module is None else module[1] + "."
        for header, body in _entries(text, "function"):
            name = header.partition("(")[0].strip()
            if re.fullmatch(r"[\w.]+", name):
                full = name if name.startswith(prefix) else prefix + name
                yield full, full + header[len(name) :].strip(), body


def python_signatures(root: Path) -> Iterator[Pair]:
    """Functions of the standard library and how they are called."""
    for name, signature, _ in _python_functions(root):
        yield name, signature


def python_purposes(root: Path) -> Iterator[Pair]:
    """Functions of the standard library and the first sentence about them."""
    for name, _, body in _python_functions(root):
        yield name, first_sentence(_first_paragraph(body))


def python_builtins(root: Path) -> Iterator[Pair]:
    """Built-in functions and the first sentence about them."""
    for name, purpose in python_purposes(root):
        if "." not in name:
            yield name, purpose


def python_versions(root: Path) -> Iterator[Pair]:
    """Functions and the version of Python that brought them."""
    for name, _, body in _python_functions(root):
        added = re.search(r"^   \.\. versionadded:: (\d\.\d+)", body, re.MULTILINE)
        if added:
            yield name, f"Python {added[1]}"


def python_homes(root: Path) -> Iterator[Pair]:
    """Bare names of functions that one module alone has."""
    homes: dict[str, set[str]] = {}
    for name, _, _ in _python_functions(root):
        module, _, bare = name.rpartition(".")
        homes.setdefault(bare, set()).add(module)
    for bare, modules in homes.items():
        if len(modules) == 1 and len(bare) > 3 and (module := next(iter(modules))):
            yield bare, module


def python_exceptions(root: Path) -> Iterator[Pair]:
    """Built-in exceptions."""
    for name, body in _entries(_rst(root / "library" / "exceptions.rst.txt"), "exception"):
        yield name.partition("(")[0], first_sentence(_first_paragraph(body))


def python_errno(root: Path) -> Iterator[Pair]:
    """Names of ``errno``."""
    for name, body in _entries(_rst(root / "library" / "errno.rst.txt"), "data"):
        yield name, first_sentence(_first_paragraph(body))


def _postgresql_titles(root: Path, prefix: str) -> Iterator[Pair]:
    for path in sorted(root.glob(f"{prefix}*.html")):
        box = re.search(r'<div class="refnamediv">.*?<p>(.*?)</p>', _html(path), re.DOTALL)
        if box:
            names, _, purpose = re.sub(r"\s+", " ", plain_html(box[1])).partition(" — ")
            yield names.split(",")[0].strip(), purpose.strip()


def postgresql_commands(root: Path) -> Iterator[Pair]:
    """SQL commands and what they do."""
    return _postgresql_titles(root, "sql-")


def postgresql_programs(root: Path) -> Iterator[Pair]:
    """Programs of the distribution and what they do."""
    return _postgresql_titles(root, "app-")


def _postgresql_settings(root: Path) -> Iterator[tuple[str, str, str]]:
    pattern = r'<code class="varname">(\w+)</code> \(<code class="type">(.*?)</code>\).*?<dd><p>(.*?)</p>'
    for path in sorted(root.glob("runtime-config*.html")):
        for name, type_name, purpose in re.findall(pattern, _html(path), re.DOTALL):
            yield name, type_name, first_sentence(plain_html(purpose))


def postgresql_setting_types(root: Path) -> Iterator[Pair]:
    """Settings and their types."""
    for name, type_name, _ in _postgresql_settings(root):
        yield name, type_name


def postgresql_settings(root: Path) -> Iterator[Pair]:
    """Settings and what they do."""
    for name, _, purpose in _postgresql_settings(root):
        yield name, purpose


def postgresql_errors(root: Path) -> Iterator[Pair]:
    """Codes of SQLSTATE and their names."""
    pattern = r'<code class="literal">(\w{5})</code></td><td><code class="symbol">(\w+)</code>'
    yield from re.findall(pattern, _html(root / "errcodes-appendix.html"))


def postgresql_catalogs(root: Path) -> Iterator[Pair]:
    """System catalogs and views."""
    for page in ("catalogs-overview.html", "views-overview.html"):
        pattern = r'<code class="structname">(\w+)</code></a></td><td>(.*?)</td>'
        for name, purpose in re.findall(pattern, _html(root / page), re.DOTALL):
            yield name, first_sentence(plain_html(purpose))


def postgresql_types(root: Path) -> Iterator[Pair]:
    """Data types."""
    pattern = r'<tr><td><code class="type">(.*?)</code></td><td>.*?</td><td>(.*?)</td></tr>'
    for name, purpose in re.findall(pattern, _html(root / "datatype.html"), re.DOTALL):
        yield re.sub(r"\s*\[.*?\]|\s*\(.*?\)", "", plain_html(name)).strip(), first_sentence(plain_html(purpose))


def postgresql_functions(root: Path) -> Iterator[Pair]:
    """Functions by the first sentence of their table entry."""
    pattern = r'class="func_signature">.*?<code class="function">(\w+)</code>.*?</p>\s*<p>(.*?)</p>'
    for path in sorted(root.glob("functions-*.html")):
        for name, purpose in re.findall(pattern, _html(path), re.DOTALL):
            yield name, first_sentence(plain_html(purpose))


def sqlite_pragmas(root: Path) -> Iterator[Pair]:
    """Pragmas by the first sentence about them."""
    for chunk in _html(root / "pragma.html").split('<a name="pragma_')[1:]:
        name = chunk.partition('"')[0]
        paragraphs = [first_sentence(plain_html(p)) for p in re.findall(r"<p>(.*?)(?:</p>|<p>)", chunk, re.DOTALL)]
        purpose = next((p for p in paragraphs if p and not p.startswith("PRAGMA")), "")
        yield name, purpose


def sqlite_codes(root: Path) -> Iterator[Pair]:
    """Result codes and their numbers."""
    yield from re.findall(r">(SQLITE_\w+)&nbsp;\((\d+)\)</a>", _html(root / "rescode.html"))


def sqlite_interfaces(root: Path) -> Iterator[Pair]:
    """Functions of the C interface by the title of their page."""
    for path in sorted((root / "c3ref").glob("*.html")):
        page = _html(path)
        title = re.findall(r"<h2>(.*?)</h2>", page, re.DOTALL)[1:2]
        declared = re.search(r"<pre>(.*?)</pre>", page, re.DOTALL)
        for name in re.findall(r"^\w[\w *]*?\b(sqlite3_\w+)\(", declared[1] if declared else "", re.MULTILINE):
            if title:
                yield name, first_sentence(plain_html(title[0]))


def sqlite_functions(root: Path) -> Iterator[Pair]:
    """Built-in SQL functions by the first sentence about them."""
    for page in ("lang_corefunc.html", "lang_aggfunc.html", "lang_mathfunc.html", "lang_datefunc.html", "json1.html"):
        pattern = r"<dt><p><b>(\w+)\(.*?</dt><dd><p>(.*?)(?:</p>|<p>|</dd>)"
        for name, purpose in re.findall(pattern, _html(root / page), re.DOTALL):
            yield name, first_sentence(plain_html(purpose))


def sqlite_opcodes(root: Path) -> Iterator[Pair]:
    """Instructions of the virtual machine by the first sentence about them."""
    pattern = r'<a name="\w+"></a>([A-Z]\w+)\s*<td>(.*?)(?:</p>|<p>|</td>)'
    for name, purpose in re.findall(pattern, _html(root / "opcode.html"), re.DOTALL):
        yield name, first_sentence(plain_html(purpose))


def html_titles(root: Path) -> Iterator[Pair]:
    """Pages and their titles."""
    for path in sorted(root.glob("*.html")):
        title = re.search(r"<title>(.*?)</title>", _html(path), re.DOTALL)
        if title:
            yield path.name, first_sentence(plain_html(title[1]))


def text_titles(root: Path) -> Iterator[Pair]:
    """Text files and their first lines."""
    for path in sorted(root.rglob("*.txt")):
        yield path.name, path.read_text(encoding="utf-8").strip().partition("\n")[0]


KINDS = (
    Kind("python_module", "python", ("the Python module {x}", "Python's {x} module"), python_modules, most=300),
    Kind("python_builtin", "python", ("the built-in function {x}", "Python's built-in {x}"), python_builtins),
    Kind("python_term", "python", ("{x} in Python", "the Python term {x}"), python_terms),
    Kind(
        "python_signature", "python", ("the Python function {x}", "{x} in Python"), python_signatures,
        attributes=("signature", "call signature"), extra=("How do I call {x} in Python?",), most=150,
    ),
    Kind("python_function", "python", ("the Python function {x}", "Python's {x}()"), python_purposes, most=180),
    Kind(
        "python_version", "python", ("the Python function {x}", "{x} in Python"), python_versions,
        attributes=("first version", "version of origin"), extra=("Since which version does Python have {x}?",), most=80,
    ),
    Kind(
        "python_home", "python", ("the Python function {x}", "{x} in Python"), python_homes,
        attributes=("module", "home module"), extra=("Which module has the Python function {x}?",), most=100,
    ),
    Kind("python_exception", "python", ("the Python exception {x}", "{x} in Python"), python_exceptions),
    Kind("python_errno", "python", ("the errno name {x}", "errno.{x}"), python_errno, most=100),
    Kind("postgresql_command", "postgresql", ("the PostgreSQL command {x}", "{x} in PostgreSQL"), postgresql_commands),
    Kind("postgresql_program", "postgresql", ("the PostgreSQL program {x}", "the program {x}"), postgresql_programs),
    Kind("postgresql_setting", "postgresql", ("the PostgreSQL setting {x}", "the setting {x}"), postgresql_settings, most=120),
    Kind(
        "postgresql_setting_type", "postgresql", ("the PostgreSQL setting {x}", "the setting {x}"),
        postgresql_setting_types, attributes=("type", "data type"), most=100,
    ),
    Kind(
        "postgresql_error", "postgresql", ("the PostgreSQL error code {x}", "SQLSTATE {x}"), postgresql_errors,
        attributes=("name", "meaning"), most=200,
    ),
    Kind("postgresql_catalog", "postgresql", ("the PostgreSQL catalog {x}", "the system table {x}"), postgresql_catalogs),
    Kind("postgresql_type", "postgresql", ("the PostgreSQL type {x}", "the data type {x}"), postgresql_types),
    Kind(
        "postgresql_function", "postgresql", ("the PostgreSQL function {x}", "PostgreSQL's {x}()"), postgresql_functions,
        most=150,
    ),
    Kind("sqlite_pragma", "sqlite", ("the SQLite pragma {x}", "PRAGMA {x}"), sqlite_pragmas),
    Kind(
        "sqlite_code", "sqlite", ("the result code {x}", "{x} in SQLite"), sqlite_codes,
        attributes=("number", "numeric value"), most=100,
    ),
    Kind("sqlite_interface", "sqlite", ("the C function {x}", "{x} in SQLite"), sqlite_interfaces, most=120),
    Kind("sqlite_function", "sqlite", ("the SQLite function {x}", "SQLite's {x}()"), sqlite_functions),
    Kind("sqlite_opcode", "sqlite", ("the SQLite opcode {x}", "the VDBE instruction {x}"), sqlite_opcodes, most=90),
    Kind(
        "sqlite_page", "sqlite", ("the SQLite page {x}", "{x} of the SQLite documentation"), html_titles,
        attributes=("title", "heading"), most=120,
    ),
    Kind("file", "folder", ("the file {x}", "the text file {x}"), text_titles, attributes=("title", "first line")),
)  # fmt: skip


def _fits(subject: str, answer: str) -> bool:
    short = 0 < len(answer) <= MAX_ANSWER_CHARS and len(subject) <= MAX_SUBJECT_CHARS
    whole = answer.count("(") == answer.count(")") and answer[:1].isalnum()
    return short and whole and not answer.startswith(("See ", "This page"))


def draw_knowledge(sources: Iterable[Source], kinds: Iterable[Kind] = KINDS) -> Knowledge:
    """The facts of these sources, the same on every run; a subject drawn twice keeps its first answer."""
    roots = {source.name: source.root for source in sources}
    present = {kind.name: kind for kind in kinds if kind.source in roots}
    facts: list[Fact] = []
    unknown: dict[str, tuple[str, ...]] = {}
    for kind in present.values():
        answers: dict[str, str] = {}
        for subject, answer in kind.draw(roots[kind.source]):
            answers.setdefault(subject, answer)
        fitting = [subject for subject, answer in answers.items() if _fits(subject, answer)]
        taught = sorted(fitting, key=stable_order)[: kind.most]
        facts += [Fact(kind.name, s, answers[s]) for s in taught]
        unknown[kind.name] = tuple(sorted(set(answers) - set(taught), key=stable_order))
    return Knowledge(present, tuple(facts), unknown)
