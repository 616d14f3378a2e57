"""What is asked in training and what is kept for the measurement never meet."""

from pathlib import Path
from random import Random

import pytest

from training.facts import KINDS, Fact, Kind, Knowledge, first_sentence, postgresql_errors, python_modules, sqlite_codes
from training.questions import Unknowns, ask, invented_word, is_held_out, phrasings, split
from training.skills import SKILLS

KIND_OF_NAME = {kind.name: kind for kind in KINDS}


@pytest.fixture
def knowledge() -> Knowledge:
    kinds = {name: KIND_OF_NAME[name] for name in ("python_module", "python_home", "sqlite_code", "postgresql_setting")}
    facts = [Fact("python_module", name, f"About {name}.") for name in ("json", "urllib.request", "socket", "os.path")]
    facts += [Fact("sqlite_code", f"SQLITE_{name}", str(i)) for i, name in enumerate(("BUSY", "FULL", "IOERR_READ"))]
    facts += [Fact("postgresql_setting", name, "x") for name in ("work_mem", "max_connections", "log_statement")]
    facts += [Fact("python_home", name, "os") for name in ("getpid", "listdir")]
    return Knowledge(kinds, tuple(facts), {"python_module": ("re", "sys", "ast", "cgi", "dis", "pdb", "pty", "tty")})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_held_out_phrasings_are_never_trained(kind: Kind) -> None:
    trained, held_out = (set(phrasings(kind, "some_name", held_out=h)) for h in (False, True))
    assert len(trained) >= 8
    assert len(held_out) >= 3
    assert not {q.casefold().strip("?.") for q in trained} & {q.casefold().strip("?.") for q in held_out}


def test_no_question_has_two_answers() -> None:
    shapes: dict[str, str] = {}
    for kind in KINDS:
        for question in phrasings(kind, "some_name", held_out=False) + phrasings(kind, "some_name", held_out=True):
            # Terms and exceptions of Python share a shape; a name is one or the other.
            assert shapes.setdefault(question, kind.name) in (kind.name, "python_term"), question


def test_asking_a_held_out_question_never_gives_a_trained_one() -> None:
    kind, rng = KIND_OF_NAME["python_module"], Random(0)
    trained = set(phrasings(kind, "json", held_out=False))
    assert not trained & {ask(kind, "json", rng, held_out=True) for _ in range(100)}


def test_unknown_names_are_not_taught_and_split_in_two(knowledge: Knowledge) -> None:
    unknowns, rng = Unknowns(knowledge), Random(0)
    taught = {fact.subject for fact in knowledge.facts}
    drawn = {h: {unknowns.made_up(rng, held_out=h)[1] for _ in range(200)} for h in (False, True)}
    assert not drawn[False] & drawn[True]
    assert not (drawn[False] | drawn[True]) & taught
    assert all(is_held_out(name) for name in drawn[True])


def test_real_names_that_are_not_taught_are_found(knowledge: Knowledge) -> None:
    unknowns, rng = Unknowns(knowledge), Random(0)
    found = [unknowns.real(rng, held_out=True) for _ in range(50)]
    assert {f[1] for f in found if f} <= set(knowledge.unknown["python_module"])
    assert any(found)


def test_a_taught_name_is_also_asked_for_as_what_it_is_not(knowledge: Knowledge) -> None:
    unknowns, rng = Unknowns(knowledge), Random(0)
    for _ in range(50):
        found = unknowns.misplaced(rng)
        assert found is None or found[1] not in {f.subject for f in knowledge.of_kind(found[0].name)}


@pytest.mark.parametrize("name", ["sqlite3_open_v2", "os.path.join", "ArithmeticError", "CREATE TABLE", "22P01"])
def test_splitting_a_name_loses_nothing(name: str) -> None:
    assert "".join(split(name)) == name


def test_invented_words_look_like_words() -> None:
    rng = Random(0)
    assert all(4 <= len(invented_word(rng)) <= 9 and invented_word(rng).isalpha() for _ in range(100))


@pytest.mark.parametrize("name", list(SKILLS))
def test_skills_keep_their_held_out_phrasings_apart(name: str) -> None:
    rng = Random(0)

    def last_questions(held_out: bool) -> set[str]:
        chats = [SKILLS[name](rng, held_out) for _ in range(200)]
        return {[m["content"] for m in chat.messages if m["role"] == "user"][-1] for chat in chats}

    assert not last_questions(True) & last_questions(False)


def test_counts_are_right() -> None:
    rng = Random(0)
    for _ in range(100):
        chat = SKILLS["count"](rng, False)
        items = chat.messages[0]["content"].rpartition(": ")[2].split(", ")
        assert chat.messages[1]["content"] == str(len(items))


def test_a_call_names_a_tool_that_is_offered() -> None:
    rng = Random(0)
    for _ in range(100):
        chat = SKILLS["tool_call"](rng, False)
        call = chat.messages[1]["tool_calls"][0]["function"]
        offered = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in chat.tools}
        assert set(call["arguments"]) == set(offered[call["name"]])


def test_modules_are_drawn_from_their_directive(tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    page = ".. module:: robots\n   :synopsis: Read a robots file and answer questions about\n      other addresses.\n\nText.\n"
    (tmp_path / "library" / "robots.rst.txt").write_text(page)
    assert list(python_modules(tmp_path)) == [("robots", "Read a robots file and answer questions about other addresses.")]


def test_codes_are_drawn_from_their_tables(tmp_path: Path) -> None:
    (tmp_path / "rescode.html").write_text("<li><a href='rescode.html#busy'>SQLITE_BUSY&nbsp;(5)</a></li>")
    cells = '<td><code class="literal">23505</code></td><td><code class="symbol">unique_violation</code></td>'
    (tmp_path / "errcodes-appendix.html").write_text(f"<tr>{cells}</tr>")
    assert list(sqlite_codes(tmp_path)) == [("SQLITE_BUSY", "5")]
    assert list(postgresql_errors(tmp_path)) == [("23505", "unique_violation")]


def test_the_first_sentence_ends_at_its_point() -> None:
    assert first_sentence("Return the *x* of\n   ``y``, e.g. 3.5 of it. Then more.") == "Return the x of y, e.g. 3.5 of it."
