"""Small things the model can do with what stands before it: repeat, count, pick, write JSON, call a tool, recall.

Every skill makes a chat from a random source. With ``held_out`` it uses a phrasing that training never uses.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from training.chat import Chat, Message
from training.questions import DO_NOT_KNOW, invented_word
from training.words import CITIES, FIELDS, NAMES, THINGS, VERBS

Skill = Callable[[Random, bool], Chat]

NUMBERS = frozenset({"age", "size", "price", "level", "port", "unit", "count"})
"""Fields whose value is a number."""
WORLD = (
    "Who is the king of {w}?", "What is the capital of {w}?", "How do I cook {w}?", "Where can I buy a {w}?",
    "Why is the {w} blue?", "Who won the {w} cup?", "How far is it to {w}?", "What is the price of {w}?",
    "When was {w} born?", "What is the weather in {w}?", "What time is it in {w}?", "Write a poem about {w}.",
    "Translate {w} into French.", "What happened to {w} yesterday?", "Who invented the {w}?", "Tell me a joke about {w}.",
    "What should I wear in {w}?", "Can you book a flight to {w}?", "How many people live in {w}?", "Is it raining in {w}?",
    "What does {w} taste like?", "I feel sad about {w}.", "Do you like {w}?", "Recommend a film about {w}.",
    "Explain the history of {w}.", "What is {w} plus two?", "Write a program that sorts {w}.", "Should I marry {w}?",
    "Which language do they speak in {w}?", "Where is {w}?", "What colour is a {w}?", "How heavy is the {w}?",
)  # fmt: skip
WORLD_HELD_OUT = ("How old is {w}?", "Who wrote {w}?", "How tall is {w}?", "Is {w} good for me?")
GREETING = "Hello. I am Cloister 5M. Ask me about Python, SQLite or PostgreSQL."
IDENTITY = "I am Cloister 5M, a small language model trained on the documentation of Python, SQLite and PostgreSQL."
ABILITY = "I know short facts about Python, SQLite and PostgreSQL. I can repeat, count, write JSON and call tools."
SMALL_TALK = (
    (("Hello", "Hi", "Hello!", "Hi there", "Hey", "Good morning", "Hello, how are you?", "Hi!", "Good evening", "Hello there",
      "Hey, what's up?", "How are you?", "Anybody there?", "Greetings"), GREETING),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Are you a human?", "Who is this?",
      "Which model are you?", "Who am I talking to?", "Are you ChatGPT?", "Say who you are.", "Introduce yourself.",
      "Are you a robot?", "What model is this?", "Do you have a name?"), IDENTITY),
    (("What can you do?", "Help", "How can you help me?", "What do you know?", "What are you good for?", "What can I ask you?",
      "What can I ask?", "What do you know about?", "Help me", "What are your skills?", "How do I use you?",
      "Tell me what you can do.", "What topics do you know?", "What should I ask you?", "Which questions can you answer?",
      "Give me some examples of what you can do."), ABILITY),
    (("Thanks", "Thank you", "Thank you!", "Thanks a lot.", "Great, thanks", "Thx", "Cool, thank you.", "Perfect, thanks!",
      "That helped, thank you."), "You are welcome."),
    (("Bye", "Goodbye", "Good night", "See you", "Bye!", "See you later", "Bye bye", "I have to go."), "Goodbye."),
)  # fmt: skip
NATURAL_TOOLS = (
    # names, descriptions, parameters, what it takes, questions, a question kept from training
    (("get_weather", "weather", "current_weather", "get_current_weather", "weather_forecast"),
     ("Weather of a city", "Get the current weather in a city.", "Tells the weather", "Current weather for a location"),
     ("city", "city", "location", "place"), CITIES,
     ("What is the weather in {x}?", "Weather in {x}?", "How is the weather in {x}?", "What's the weather like in {x}?",
      "weather in {x}", "Is it raining in {x}?", "Weather in {x} please"),
     "Tell me the weather in {x}."),
    (("get_time", "time", "current_time", "clock"), ("Time of day in a city", "Get the time in a city.", "Local time"),
     ("city", "location", "place"), CITIES,
     ("What time is it in {x}?", "Tell me the time in {x}.", "Time in {x}?", "What's the time in {x}?"),
     "What is the time in {x}?"),
    (("find_user", "get_user", "user", "lookup_user"), ("Find a user by name.", "User with a name", "Look up a person"),
     ("name", "user"), NAMES, ("Who is {x}?", "Find the user {x}.", "Look up {x}.", "Get me the user {x}."),
     "Please find {x}."),
    (("search", "web_search", "find", "search_documents"), ("Search the web.", "Full text search", "Find documents"),
     ("query", "text", "q"), THINGS, ("Search for {x}.", "Look for {x}.", "Find something about {x}.", "search {x}"),
     "Please search for {x}."),
    (("get_price", "price", "price_of", "lookup_price"), ("Price of an item", "Get the price of an item."),
     ("item", "product"), THINGS, ("What does the {x} cost?", "Price of the {x}?", "How much is the {x}?"),
     "Tell me the price of the {x}."),
)  # fmt: skip
PLAIN_RESULT_SHARE = 0.25
"""How often a tool gives text and no object; the answer is then that text."""
TOLD = ("My name is {n}.", "I am {n}.", "Call me {n}.", "Hello, my name is {n}.", "my name is {n}", "I'm {n}", "Hi, I am {n}.")
ASKED_NAME = (
    "What is my name?", "Who am I?", "Say my name.", "what's my name?", "Tell me my name.", "What am I called?",
    "Do you know my name?", "Can you tell me my name?", "my name?", "And what is my name?", "Which name did I tell you?",
)  # fmt: skip
SMALL_TALK_HELD_OUT = (("Good day", GREETING), ("May I ask who you are?", IDENTITY), ("Many thanks!", "You are welcome."))


def echo(rng: Random, held_out: bool) -> Chat:
    """Say the same again."""
    words = [_word(rng) for _ in range(rng.randint(1, 8))]
    text = " ".join(words)
    frames = ("Repeat after me: {t}", "Say: {t}", "Repeat: {t}", "Echo this: {t}", "Copy this text: {t}", 'Say "{t}"')
    return Chat.of(_frame(rng, held_out, frames, ("Please repeat: {t}", "Write exactly this: {t}")).format(t=text), text)


def count(rng: Random, held_out: bool) -> Chat:
    """Count the items of a list of at most eight."""
    items = [rng.choice(THINGS) for _ in range(rng.randint(1, 8))]
    frames = (
        "How many items: {t}", "Count the items: {t}", "How many words are here: {t}", "Count: {t}", "Count these: {t}",
        "How many are there: {t}", "How long is this list: {t}", "Please count: {t}", "count: {t}",
    )  # fmt: skip
    held = ("Please count these items: {t}", "How many things are in this list: {t}")
    return Chat.of(_frame(rng, held_out, frames, held).format(t=", ".join(items)), str(len(items)))


def pick(rng: Random, held_out: bool) -> Chat:
    """Name the first or the last item of a list."""
    items = [_word(rng) for _ in range(rng.randint(2, 7))]
    end, item = rng.choice((("first", items[0]), ("last", items[-1])))
    frames = ("What is the {e} item of {t}?", "Name the {e} of these: {t}", "The {e} item: {t}", "Give the {e} word: {t}")
    held = ("Tell me the {e} item of this list: {t}", "Which item is {e}: {t}")
    return Chat.of(_frame(rng, held_out, frames, held).format(e=end, t=", ".join(items)), item)


def write_json(rng: Random, held_out: bool) -> Chat:
    """Write given fields as a JSON object."""
    fields = {name: _value(rng) for name in rng.sample(FIELDS, rng.randint(1, 4))}
    joint, mark = rng.choice(((" ", "="), (", ", "="), (", ", " is "), (", ", ": ")))
    text = joint.join(f"{name}{mark}{value}" for name, value in fields.items())
    frames = (
        "Write JSON: {t}", "Make JSON with {t}", "Give me JSON of {t}", "As JSON: {t}", "JSON with the fields {t}",
        "{t} as JSON", "Convert to JSON: {t}", "Make a JSON object: {t}", "Write {t} as JSON.", "Put this into JSON: {t}",
        "json: {t}", "Please write JSON with {t}",
    )  # fmt: skip
    held = ("Please turn this into JSON: {t}", "I need a JSON object with {t}")
    return Chat.of(_frame(rng, held_out, frames, held).format(t=text), json.dumps(fields))


def recall(rng: Random, held_out: bool) -> Chat:
    """Remember a name given earlier in the chat."""
    name = rng.choice(NAMES) if rng.random() < 0.5 else invented_word(rng).capitalize()
    told = rng.choice(TOLD).format(n=name)
    asked = _frame(rng, held_out, ASKED_NAME, ("Do you remember my name?",))
    return Chat.of(told, f"Hello {name}.", asked, f"Your name is {name}.")


def call_tool(rng: Random, held_out: bool) -> Chat:
    """Choose the tool that is asked for and fill in its arguments."""
    if rng.random() < 0.4:
        return _natural_call(rng, held_out)
    tools = _tools(rng, 3)
    name, fields = _signature(rng.choice(tools))
    arguments = {field: _value(rng, numeric=field in NUMBERS) for field in fields}
    given = ", ".join(f"{field} {value}" for field, value in arguments.items())
    verb, _, thing = name.partition("_")
    frames = ("Use {f} with {t}.", "Call {f} with {t}.", "Run {f}: {t}", "{v} the {o} with {t}.", "Please {v} the {o} for {t}.")
    held = ("Can you call {f} with {t}?", "I want you to {v} the {o} with {t}.")
    asked = _frame(rng, held_out, frames, held).format(f=name, v=verb, o=thing, t=given)
    return _calling(asked, name, arguments, tools)


def _natural_call(rng: Random, held_out: bool) -> Chat:
    names, descriptions, parameters, values, questions, held = rng.choice(NATURAL_TOOLS)
    name, parameter = rng.choice(names), rng.choice(parameters)
    value = rng.choice((rng.choice(values), invented_word(rng).capitalize()))
    fields: dict[str, Any] = {parameter: {"type": "string"}}
    tools = [*_tools(rng, 2)[1:], _tool(rng, name, fields, rng.choice(descriptions))]
    rng.shuffle(tools)
    return _calling(_frame(rng, held_out, questions, (held,)).format(x=value), name, {parameter: value}, tools)


def _calling(asked: str, name: str, arguments: dict[str, Any], tools: list[dict[str, Any]]) -> Chat:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages: tuple[Message, ...] = (
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )
    return Chat(messages, tuple(tools))


def tell_result(rng: Random, held_out: bool) -> Chat:
    """Call a tool and put what it gave back into words."""
    chat = call_tool(rng, held_out)
    result = {name: _value(rng) for name in rng.sample(FIELDS, rng.randint(1, 2))}
    told, said = json.dumps(result), " ".join(f"The {name} is {value}." for name, value in result.items())
    if rng.random() < PLAIN_RESULT_SHARE:
        told = said = ", ".join(f"{value} {name}" for name, value in result.items())
    answer: list[Message] = [{"role": "tool", "content": told}, {"role": "assistant", "content": said}]
    return Chat((*chat.messages, *answer), chat.tools)


def small_talk(rng: Random, held_out: bool) -> Chat:
    """Greet, say who it is, take thanks."""
    if held_out:
        return Chat.of(*rng.choice(SMALL_TALK_HELD_OUT))
    questions, answer = rng.choice(SMALL_TALK)
    return Chat.of(rng.choice(questions), answer)


def decline(rng: Random, held_out: bool) -> Chat:
    """Say that it does not know what the documentation does not say."""
    what = rng.choice((rng.choice(CITIES), rng.choice(THINGS), invented_word(rng), rng.choice(NAMES)))
    return Chat.of(_frame(rng, held_out, WORLD, WORLD_HELD_OUT).format(w=what), DO_NOT_KNOW)


SKILLS: dict[str, Skill] = {
    "echo": echo,
    "count": count,
    "pick": pick,
    "json": write_json,
    "recall": recall,
    "tool_call": call_tool,
    "tool_result": tell_result,
    "small_talk": small_talk,
    "decline": decline,
}


def _frame(rng: Random, held_out: bool, frames: tuple[str, ...], held: tuple[str, ...]) -> str:
    return rng.choice(held if held_out else frames)


def _word(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(THINGS)
    if kind < 0.6:
        return str(rng.randint(0, 9999))
    return invented_word(rng) if kind < 0.85 else rng.choice(NAMES + CITIES)


def _value(rng: Random, *, numeric: bool | None = None) -> str | int:
    if numeric or (numeric is None and rng.random() < 0.4):
        return rng.randint(0, 999)
    return rng.choice((rng.choice(NAMES), rng.choice(CITIES), rng.choice(THINGS), invented_word(rng)))


def some_tools(rng: Random) -> tuple[dict[str, Any], ...]:
    """Tools that a question has nothing to do with."""
    return tuple(_tools(rng, 2))


def _signature(tool: dict[str, Any]) -> tuple[str, list[str]]:
    function = tool["function"]
    return function["name"], list(function["parameters"]["properties"])


def _tools(rng: Random, most: int) -> list[dict[str, Any]]:
    tools = []
    for verb in rng.sample(VERBS, rng.randint(1, most)):
        thing = rng.choice((rng.choice(FIELDS), rng.choice(THINGS), invented_word(rng)))
        names = rng.sample(FIELDS, rng.randint(1, 2))
        fields = {name: {"type": "integer" if name in NUMBERS else "string"} for name in names}
        tools.append(_tool(rng, f"{verb}_{thing}", fields))
    return tools


def _tool(rng: Random, name: str, fields: dict[str, Any], description: str = "") -> dict[str, Any]:
    described: dict[str, Any] = {"name": name}
    if rng.random() < 0.7:
        described["description"] = description or name.replace("_", " ").capitalize() + rng.choice((".", ""))
    described["parameters"] = {"type": "object", "properties": fields}
    if rng.random() < 0.6:
        described["parameters"]["required"] = list(fields)
    return {"type": "function", "function": described}
