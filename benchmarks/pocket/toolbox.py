"""The tools of the pocket model's training dialogues: their schemas, what people ask of them, the call, the
output and the reply.

Schemas are in the flat form of Realtime. How dialogues use the tools is decided in `dialogues`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from .words import WorldWords, is_held_out

Json = dict[str, object]
SKIES = ("cloudy", "sunny", "rainy", "snowy", "windy", "foggy", "clear", "stormy")
WEATHER_PHRASES = (
    "What is the weather in {}?",
    "What's the weather like in {}?",
    "How is the weather in {}?",
    "Weather in {}?",
    "Tell me the weather in {}.",
    "Is it cold in {}?",
)
ADD_PHRASES = (
    "What is {} plus {}?",
    "Add {} and {}.",
    "How much is {} plus {}?",
    "What is the sum of {} and {}?",
)


@dataclass(frozen=True)
class WrittenCall:
    """A call of a tool, as data: the tool's name and the arguments."""

    name: str
    arguments: Json

    def render(self) -> str:
        """The call as the model writes it, in the hermes form."""
        body = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"


@dataclass(frozen=True)
class Use:
    """One request for a tool: what the user says, the call, its output and the model's reply. ``refusal``: the
    reply if the tool is not offered."""

    request: str
    call: WrittenCall
    output: str
    reply: str
    refusal: str


@dataclass(frozen=True)
class WorldTool:
    """A tool: its name, several wordings of its description, its parameters as pairs of name and JSON type, and
    a function that makes a `Use` of it. That function takes random numbers, the source of values, and whether
    the user types in lower case."""

    name: str
    wordings: tuple[str, ...]
    parameters: tuple[tuple[str, str], ...]
    use: Callable[[random.Random, WorldWords, bool], Use]

    def schema(self, rng: random.Random) -> Json:
        """The tool's definition in the flat form of Realtime, with a description worded at random."""
        properties: Json = {}
        for name, kind in self.parameters:
            properties[name] = {"type": kind}
            if rng.random() < 0.15:
                properties[name] = {"type": kind, "description": f"The {name}."}
        required = [name for name, _ in self.parameters]
        return {
            "type": "function",
            "name": self.name,
            "description": rng.choice(self.wordings),
            "parameters": {"type": "object", "properties": properties, "required": required},
        }


def _dump(words: WorldWords, value: object) -> str:
    """A value as JSON in one of the two usual spellings: Python's, with spaces, or JavaScript's, without."""
    spellings = ((", ", ": "), (",", ":"))
    separators = spellings[0] if words.early else words.rng.choice(spellings)
    return json.dumps(value, ensure_ascii=False, separators=separators)


def _weather(rng: random.Random, words: WorldWords, lower: bool) -> Use:
    city = words.place()
    city = city.lower() if lower else city
    degrees, sky = rng.randint(-20, 40), rng.choice(SKIES)
    pairs: list[tuple[str, object]] = [("temperature", degrees), ("sky", sky)]
    if rng.random() < 0.3:
        pairs = [(rng.choice(("temp", "degrees")), degrees), (rng.choice(("conditions", "weather")), sky)]
    told = f"{degrees} degrees and {sky}"
    if not words.early and rng.random() < 0.25:
        part = rng.randrange(2)
        pairs, told = [pairs[part]], (f"{degrees} degrees", sky)[part]
    if rng.random() < 0.3:
        pairs.append(rng.choice((("wind", rng.randint(0, 60)), ("city", city))))
    if rng.random() < 0.3:
        rng.shuffle(pairs)
    output, reply = _dump(words, dict(pairs)), f"It is {told} in {city}."
    if rng.random() < 0.05:
        output = _dump(words, {"error": "unknown city"})
        reply = f"Sorry, I could not find the weather in {city}."
    request = rng.choice(WEATHER_PHRASES).format(city)
    return Use(
        request, WrittenCall("get_weather", {"city": city}), output, reply, "I have no tool for the weather."
    )


def _pair(rng: random.Random, held_out: bool) -> tuple[int, int]:
    while True:
        top = rng.choice((20, 100, 100, 1000))
        a, b = rng.randint(0, top), rng.randint(0, top)
        if is_held_out(f"{a}+{b}") == held_out:
            return a, b


def _add(rng: random.Random, words: WorldWords, lower: bool) -> Use:
    a, b = _pair(rng, words.held_out)
    # The sum is the tool's to say: half of them are wrong, so that it is copied and not worked out.
    total = a + b if rng.random() < 0.5 else rng.randint(0, 2000)
    fields = [_dump(words, {field: total}) for field in ("sum", "sum", "result")]
    output = rng.choice((*fields, str(total)))
    request = rng.choice(ADD_PHRASES).format(a, b)
    reply = f"{a} plus {b} is {total}."
    return Use(request, WrittenCall("add", {"a": a, "b": b}), output, reply, "I have no tool for sums.")


def _timer(rng: random.Random, words: WorldWords, lower: bool) -> Use:
    minutes = rng.randint(2, 120)
    phrases = ("Set a timer for {} minutes.", "Start a timer of {} minutes.", "Wake me in {} minutes.")
    output = rng.choice((_dump(words, {"ok": True}), "ok", _dump(words, {"status": "set"})))
    reply = f"Your timer is set for {minutes} minutes."
    call = WrittenCall("set_timer", {"minutes": minutes})
    return Use(rng.choice(phrases).format(minutes), call, output, reply, "I have no tool for timers.")


def _lookup(rng: random.Random, words: WorldWords, lower: bool) -> Use:
    key, value = words.word(), words.word() if rng.random() < 0.7 else words.code()
    # In quotation marks all the way, so that a made-up word is the same tokens wherever it stands.
    mark = "" if words.early else '"'
    named, told = f"{mark}{key}{mark}", f"{mark}{value}{mark}"
    phrases = ("Look up {}.", "Look up the entry for {}.", "What is the entry for {}?")
    output = rng.choice((_dump(words, {"value": value}), _dump(words, {"key": key, "value": value}), told))
    reply = f"The entry for {named} is {told}."
    call = WrittenCall("lookup", {"key": key})
    return Use(rng.choice(phrases).format(named), call, output, reply, "I have no tool for entries.")


WEATHER = WorldTool(
    "get_weather",
    (
        "Get the weather in a city.",
        "Current weather of a city.",
        "Returns the weather for a city",
        "Weather",
        "",
    ),
    (("city", "string"),),
    _weather,
)
ADD = WorldTool(
    "add",
    ("Add two numbers.", "Returns the sum of two numbers.", "Adds a and b", "The sum of a and b.", ""),
    (("a", "number"), ("b", "number")),
    _add,
)
TIMER = WorldTool(
    "set_timer", ("Set a timer.", "Starts a timer of some minutes.", ""), (("minutes", "integer"),), _timer
)
LOOKUP = WorldTool(
    "lookup", ("Look up an entry.", "Returns the entry for a key.", ""), (("key", "string"),), _lookup
)
TOOLS = (WEATHER, ADD, TIMER, LOOKUP)
