"""Notes to learn from, and what is asked about them: invented names, numbers and words, in several wordings.

None of their kinds, names and sentences is in `benchmarks/prompt_modules.py`, which measures what was learned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Lesson:
    """A prompt of notes, and how its answer goes on behind the question."""

    prefix: str
    notes: Sequence[str]
    question: str
    answer: str


@dataclass(frozen=True)
class Kind:
    """One sort of notes.

    Attributes:
        prefixes: what precedes the notes.
        names: what they are about.
        values: what is asked about them; empty for numbers.
        wordings: sentences that say it, with {name} and {value}.
        heads: beginnings of notes, with {name}.
        fillers: other sentences of a note.
        questions: (question, how its answer begins), with {name}.
    """

    prefixes: Sequence[str]
    names: Sequence[str]
    values: Sequence[str]
    wordings: Sequence[str]
    heads: Sequence[str]
    fillers: Sequence[str]
    questions: Sequence[tuple[str, str]]


_COLOURS = ["red", "blue", "green", "yellow", "black", "white", "purple", "brown", "grey", "pink", "golden", "violet"]
_METALS = ["iron", "copper", "zinc", "bronze", "tin", "lead", "nickel", "steel", "brass", "cobalt", "chrome"]
KINDS = (
    Kind(
        ["Here are notes about ships. Give the code that is asked for.\n\n", "Notes of the port office.\n\n"],
        ["Aurora", "Neptune", "Hermes", "Odin", "Siren", "Condor", "Pelican", "Triton", "Vesta", "Juno", "Comet", "Orion", "Atlas", "Boreas", "Calypso", "Delphin"],
        (),
        ["The code of the {name} is {value}.", "Its code is {value}.", "Use the code {value} for the {name}."],
        ["Ship {name}: ", "The {name}. ", "Note about the ship {name}: "],
        ["It left on Monday.", "The crew is small.", "It carries timber and salt.", "The captain is new.", "Its engine is old.",
         "It was built in the north.", "The deck was cleaned.", "It waits for better weather."],
        [("What is the code of the {name}?", "The code of the {name} is"), ("Which code has the {name}?", "The {name} has the code")],
    ),
    Kind(
        ["Read about the boxes and answer.\n\n", "These boxes stand in the cellar.\n\n"],
        ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"],
        _COLOURS,
        ["The colour of box {name} is {value}.", "Box {name} was painted {value}.", "Its colour is {value}."],
        ["Box {name}. ", "About box {name}: ", "- box {name}: "],
        ["It is heavy.", "Nobody has opened it.", "It holds old letters.", "The lock is broken.", "It came by train.",
         "There is a label on it.", "It smells of oil.", "A rope is tied around it."],
        [("What is the colour of box {name}?", "The colour of box {name} is"), ("Which colour has box {name}?", "Box {name} is")],
    ),
    Kind(
        ["Rooms of the hotel, and their keys.\n\n", "Use these notes of the hotel to answer.\n\n"],
        ["Paris", "Vienna", "Lisbon", "Cairo", "Quebec", "Sydney", "Dublin", "Kyoto", "Lima", "Geneva", "Bergen", "Porto", "Delhi", "Havana"],
        (),
        ["The key of room {name} is {value}.", "Guests of room {name} get the key {value}.", "Its number is {value}."],
        ["Room {name}: ", "The room {name}. ", "Notes about room {name}: "],
        ["The window looks to the yard.", "The bed is wide.", "It was cleaned today.", "Breakfast is included.",
         "The lamp does not work.", "It has two chairs.", "A guest forgot a coat here.", "It is on the second floor."],
        [("What is the key of room {name}?", "The key of room {name} is"), ("Which number opens room {name}?", "Room {name} is opened by")],
    ),
    Kind(
        ["Workers and what they carry.\n\n", "Answer with the metal that the worker carries.\n\n"],
        ["Smith", "Baker", "Cooper", "Mason", "Fisher", "Carter", "Turner", "Potter", "Weaver", "Miller", "Taylor", "Hunter", "Porter", "Shepherd"],
        _METALS,
        ["{name} carries {value}.", "The metal of {name} is {value}.", "Today {name} works with {value}."],
        ["{name}: ", "Worker {name}. ", "What we know of {name}: "],
        ["The shift begins at six.", "There is a break at noon.", "Gloves must be worn.", "The boots are new.",
         "A bicycle stands outside.", "The tools are in the shed.", "The work is hard.", "Lunch was bread and cheese."],
        [("What is the metal of {name}?", "The metal of {name} is"), ("What does {name} carry?", "{name} carries")],
    ),
    Kind(
        ["Readings of the weather posts.\n\n", "Notes with a measured value for each hill. Answer with it.\n\n"],
        ["Maple", "Cedar", "Willow", "Birch", "Aspen", "Hazel", "Juniper", "Laurel", "Poplar", "Linden", "Alder", "Rowan"],
        (),
        ["The value of {name} hill is {value}.", "On {name} hill {value} was measured.", "The last value was {value}."],
        ["{name} hill: ", "Post on {name} hill. ", "From {name} hill: "],
        ["The wind was weak.", "Snow lies on the path.", "The post is painted white.", "Fog came in the evening.",
         "A fox was seen.", "The battery is full.", "It rained at night.", "The view is good."],
        [("What is the value of {name} hill?", "The value of {name} hill is"), ("What was measured on {name} hill?", "On {name} hill it was")],
    ),
)  # fmt: skip


def draw_lesson(rng: Random, num_notes: int) -> Lesson:
    """Returns notes of one kind, each with a value that no other has, and a question about one of them."""
    kind = rng.choice(KINDS)
    names = rng.sample(kind.names, num_notes)
    numbers = [str(number) for number in rng.sample(range(1000, 10_000), num_notes)]
    values = rng.sample(kind.values, num_notes) if kind.values else numbers
    head, wording = rng.choice(kind.heads), rng.choice(kind.wordings)
    notes = []
    for name, value in zip(names, values, strict=True):
        sentences = [rng.choice(kind.fillers) for _ in range(rng.randrange(5))]
        sentences.insert(rng.randrange(len(sentences) + 1), wording.format(name=name, value=value))
        notes.append(head.format(name=name) + " ".join(sentences) + "\n")
    asked = rng.randrange(num_notes)
    question, start = (text.format(name=names[asked]) for text in rng.choice(kind.questions))
    return Lesson(rng.choice(kind.prefixes), notes, f"\nQuestion: {question}\nAnswer: {start}", f" {values[asked]}.")
