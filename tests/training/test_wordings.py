"""Freely worded questions: what they may look like, what they never lose, and what is kept for the measurement."""

from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from training.facts import KINDS, Fact, Knowledge
from training.frames import ABOUT, ABOUT_HELD_OUT, CLOSINGS, CLOSINGS_HELD_OUT, MANNERS, OPENINGS, OPENINGS_HELD_OUT, PLACES
from training.lessons import Lessons
from training.questions import DO_NOT_KNOW, phrasings
from training.typing_slips import SUBJECT, mark, misspell, misspell_words
from training.wordings import Wordings, plain

KIND_OF_NAME = {kind.name: kind for kind in KINDS}
TOKENIZER = Path(__file__).parents[2] / "src" / "cloister" / "models" / "embedded" / "cloister-5m" / "tokenizer.json"
GENERAL = {frame for family in ABOUT.values() for frame in family}
GENERAL_HELD_OUT = {frame for family in ABOUT_HELD_OUT.values() for frame in family}


@pytest.fixture
def knowledge() -> Knowledge:
    names = ("python_module", "python_builtin", "python_function", "postgresql_type", "sqlite_code", "sqlite_function")
    facts = [
        Fact("python_module", "json", "Encode and decode the JSON format."),
        Fact("python_module", "zipfile", "Read and write ZIP-format archive files."),
        Fact("python_builtin", "sorted", "Return a new sorted list from the items in iterable."),
        Fact("postgresql_type", "json", "textual JSON data"),
        Fact("sqlite_code", "SQLITE_BUSY", "5"),
        Fact("python_function", "shutil.move", "Recursively move a file or directory to another location."),
        Fact("sqlite_function", "abs", "Return the absolute value of X."),
    ]
    unknown = {"python_function": ("sorted",), "sqlite_function": ("json",), "python_builtin": ("breakpoint",)}
    return Knowledge({name: KIND_OF_NAME[name] for name in names}, tuple(facts), unknown)


def draw(knowledge: Knowledge, kind: str, name: str, count: int, **options: bool) -> list[str]:
    wordings, rng = Wordings(knowledge), Random(f"{kind} {name}")
    return [wordings.draw(KIND_OF_NAME[kind], name, rng, **options) for _ in range(count)]


@pytest.mark.parametrize("kind", KIND_OF_NAME)
def test_every_kind_has_frames_of_its_own_and_some_that_training_never_sees(kind: str) -> None:
    chat_format = MANNERS[kind]
    trained, held_out = set(chat_format.trained), set(chat_format.held_out)
    if chat_format.general:
        trained, held_out = trained | GENERAL, held_out | GENERAL_HELD_OUT
    assert len(trained) >= 15
    assert len(held_out) >= 3
    assert not {plain(f) for f in trained} & {plain(f) for f in held_out}
    assert all(frame.count("{n}") == 1 for frame in trained | held_out)
    assert KIND_OF_NAME[kind].source in PLACES


def test_what_is_said_around_a_question_is_held_out_as_well() -> None:
    assert not set(OPENINGS) & set(OPENINGS_HELD_OUT)
    assert not set(CLOSINGS) & set(CLOSINGS_HELD_OUT)


def test_no_free_wording_is_a_phrasing_that_is_kept_for_the_measurement(knowledge: Knowledge) -> None:
    kept = {plain(question) for question in phrasings(KIND_OF_NAME["python_module"], "zipfile", held_out=True)}
    drawn = {plain(question) for question in draw(knowledge, "python_module", "zipfile", 3000)}
    assert not drawn & kept


def test_a_fact_is_asked_for_in_hundreds_of_ways(knowledge: Knowledge) -> None:
    assert len({plain(question) for question in draw(knowledge, "sqlite_code", "SQLITE_BUSY", 500)}) > 400


def test_nearly_every_question_has_the_name_as_it_is_written(knowledge: Knowledge) -> None:
    drawn = draw(knowledge, "sqlite_code", "SQLITE_BUSY", 500)
    assert sum("sqlite_busy" in question.casefold() for question in drawn) > 430


def test_a_name_of_two_kinds_is_never_asked_for_alone(knowledge: Knowledge) -> None:
    modules, types = (set(map(plain, draw(knowledge, kind, "json", 1000))) for kind in ("python_module", "postgresql_type"))
    assert not modules & types
    assert plain("What is json?") not in modules | types
    assert "zipfile" in set(map(plain, draw(knowledge, "python_module", "zipfile", 1000)))


def test_what_is_drawn_depends_on_the_random_source_alone(knowledge: Knowledge) -> None:
    used, kind = Wordings(knowledge), KIND_OF_NAME["python_module"]
    for name in ("zipfle", "zipfil", "zpfile", "izpfile", "zipfiel", "zipflie", "zippfile"):  # may be what a slip makes of it
        used.draw(kind, name, Random(0))
        used.is_answered(kind, name)
    fresh = Wordings(knowledge)
    for seed in range(1000):
        assert used.draw(kind, "zipfile", Random(seed)) == fresh.draw(kind, "zipfile", Random(seed))


def test_a_whole_question_says_where_the_name_belongs(knowledge: Knowledge) -> None:
    slips = 0
    for question in draw(knowledge, "python_module", "zipfile", 300, whole=True):
        slips += not any(place.casefold() in question.casefold() for place in PLACES["python"])
    assert slips < 60  # `python` itself may have a slip in it


def test_a_name_that_a_question_could_mean_otherwise_is_not_declined(knowledge: Knowledge) -> None:
    wordings = Wordings(knowledge)
    assert wordings.is_answered(KIND_OF_NAME["python_function"], "sorted")
    assert not wordings.is_answered(KIND_OF_NAME["sqlite_function"], "json")
    lessons, rng = Lessons(knowledge, Tokenizer.from_file(str(TOKENIZER)), free=True), Random(0)
    declined = [question for question, reply in (lessons.unknown(rng) for _ in range(500)) if reply == DO_NOT_KNOW]
    about = [question for question in declined if "sorted" in question and "function sorted" not in question]
    assert not [question for question in about if "sqlite" not in question.casefold() and "result code" not in question]


def test_lessons_are_freely_worded_where_asked(knowledge: Knowledge) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    distinct: dict[bool, float] = {}
    for free in (False, True):
        lessons, rng = Lessons(knowledge, tokenizer, free=free), Random(1)
        asked = [question for question, reply in (lessons.turn(rng) for _ in range(2000)) if reply == "5"]
        distinct[free] = len(set(asked)) / len(asked)
    assert distinct[True] > 0.7 > 0.5 > distinct[False]


def test_a_slip_changes_one_letter_or_two_that_stand_together() -> None:
    rng = Random(0)
    for _ in range(300):
        slipped = misspell("function", rng)
        assert abs(len(slipped) - len("function")) <= 1
        common = sum(a == b for a, b in zip(slipped, "function", strict=False))
        tail = sum(a == b for a, b in zip(reversed(slipped), reversed("function"), strict=False))
        assert common + tail >= len("function") - 2


def test_haste_never_touches_the_name() -> None:
    rng = Random(0)
    for _ in range(300):
        assert mark(misspell_words(f"what does the pragma {SUBJECT} do?", rng, 2), rng).count(SUBJECT) == 1
