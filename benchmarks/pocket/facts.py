"""Facts that a user can tell the pocket model and ask for: subjects, their phrases and the expected replies.

A subject is data: in its texts `{v}` stands for the value that is told; in a kind of subjects `{n}` stands for
the noun of each. How they are used is decided in `dialogues`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from .words import ANIMALS, COLOURS, DRINKS, FOODS, NOUNS, WorldWords

Draw = Callable[[WorldWords], str]


@dataclass(frozen=True)
class Subject:
    """One thing that the user may tell. ``key``: its name. ``draw``: draws a value. ``tells``: ways to tell it;
    ``asks``: ways to ask for it; ``answer``: the reply if it was told; ``untold``: what the reply says was not
    told. ``note``: the fact as the system states it. ``ack``: the reply to being told; empty: made of
    ``answer``."""

    key: str
    draw: Draw
    tells: tuple[str, ...]
    asks: tuple[str, ...]
    answer: str
    untold: str
    note: str
    ack: str = ""

    def of(self, noun: str) -> Subject:
        """The subject for a noun, if this is a kind of subjects."""

        def put(*texts: str) -> tuple[str, ...]:
            return tuple(text.replace("{n}", noun) for text in texts)

        key, answer, untold, note, ack = put(self.key, self.answer, self.untold, self.note, self.ack)
        return Subject(key, self.draw, put(*self.tells), put(*self.asks), answer, untold, note, ack)

    def acknowledge(self, value: str) -> str:
        """The model's reply to being told this value."""
        ack = self.ack or "Got it, " + self.answer[0].lower() + self.answer[1:]
        return ack.format(v=value)

    def recall(self, value: str | None) -> str:
        """The model's reply to being asked. ``value``: what was told; None: nothing was."""
        return f"You have not told me {self.untold}." if value is None else self.answer.format(v=value)


_NAMED = Subject(
    key="{n}",
    draw=WorldWords.name,
    tells=("My {n} is called {v}.", "My {n}'s name is {v}.", "The name of my {n} is {v}."),
    asks=("What is my {n} called?", "What is my {n}'s name?", "What is the name of my {n}?"),
    answer="Your {n} is called {v}.",
    untold="your {n}'s name",
    note="The user's {n} is called {v}.",
)
_FAVOURITE = Subject(
    key="favourite {n}",
    draw=WorldWords.word,
    tells=("My favourite {n} is {v}.", "{v} is my favourite {n}.", "I like the {n} {v} best."),
    asks=("What is my favourite {n}?", "What's my favourite {n}?", "Which {n} do I like best?"),
    answer="Your favourite {n} is {v}.",
    untold="your favourite {n}",
    note="The user's favourite {n} is {v}.",
)
_SECRET = Subject(
    key="{n} code",
    draw=WorldWords.code,
    tells=("My {n} code is {v}.", "The code of my {n} is {v}.", "{v} is my {n} code."),
    asks=("What is my {n} code?", "What's my {n} code?", "What is the code of my {n}?"),
    answer="Your {n} code is {v}.",
    untold="your {n} code",
    note="The user's {n} code is {v}.",
)
_EVENT = Subject(
    key="{n}",
    draw=WorldWords.time,
    tells=("The {n} is at {v}.", "My {n} is at {v}.", "The time of the {n} is {v}."),
    asks=("When is the {n}?", "What time is the {n}?", "When is my {n}?"),
    answer="The {n} is at {v}.",
    untold="when the {n} is",
    note="The {n} is at {v}.",
)
_CODE_WORD = Subject(
    key="code word for {n}",
    draw=WorldWords.word,
    tells=("The code word for {n} is {v}.", "The word for {n} is {v}."),
    asks=("What is the code word for {n}?", "What's the word for {n}?"),
    answer="The code word for {n} is {v}.",
    untold="the code word for {n}",
    note="The code word for {n} is {v}.",
)
_LIVES = Subject(
    key="home of {n}",
    draw=WorldWords.place,
    tells=("{n} lives in {v}.", "The home of {n} is {v}."),
    asks=("Where does {n} live?", "In which town does {n} live?"),
    answer="{n} lives in {v}.",
    untold="where {n} lives",
    note="{n} lives in {v}.",
    ack="Got it, {n} lives in {v}.",
)


def code_word(key: str) -> Subject:
    """The subject of the secret word that stands for the word ``key``."""
    return _CODE_WORD.of(key)


def lives(person: str) -> Subject:
    """The subject of where another person lives."""
    return _LIVES.of(person)


NAME = Subject(
    key="name",
    draw=WorldWords.name,
    tells=("My name is {v}.", "I am {v}.", "I'm {v}.", "I am called {v}.", "Call me {v}."),
    asks=("What is my name?", "What's my name?", "Who am I?", "What am I called?"),
    answer="Your name is {v}.",
    untold="your name",
    note="The user's name is {v}.",
    ack="Nice to meet you, {v}.",
)
HOME = Subject(
    key="home",
    draw=WorldWords.place,
    tells=("I live in {v}.", "My home is in {v}.", "I am living in {v}."),
    asks=("Where do I live?", "In which town do I live?", "Where is my home?"),
    answer="You live in {v}.",
    untold="where you live",
    note="The user lives in {v}.",
)
AGE = Subject(
    key="age",
    draw=WorldWords.age,
    tells=("I am {v} years old.", "My age is {v}."),
    asks=("How old am I?", "What is my age?"),
    answer="You are {v} years old.",
    untold="how old you are",
    note="The user is {v} years old.",
)
_PETS = "dog cat horse parrot rabbit sister brother mother friend teacher boat"
PETS = tuple(map(_NAMED.of, _PETS.split()))
_FAVOURITE_DRAWS: dict[str, Draw] = {
    "colour": lambda words: words.one_of(COLOURS),
    "food": lambda words: words.one_of(FOODS),
    "animal": lambda words: words.one_of(ANIMALS),
    "drink": lambda words: words.one_of(DRINKS),
    "number": WorldWords.number,
    "city": WorldWords.place,
    "game": WorldWords.word,
}
FAVOURITES = tuple(replace(_FAVOURITE.of(noun), draw=draw) for noun, draw in _FAVOURITE_DRAWS.items())
SECRETS = tuple(map(_SECRET.of, ("locker", "door", "bike", "safe")))
EVENTS = tuple(map(_EVENT.of, ("meeting", "train", "flight", "party", "lesson", "dinner")))
FIXED = (NAME, HOME, AGE, *PETS, *FAVOURITES, *SECRETS, *EVENTS)


def any_subject(rng: random.Random, words: WorldWords, keyed: float = 1.0) -> Subject:
    """Draw a subject at random: the user's name rather often; now and then, `keyed` times as often as usual,
    one about a word or another person."""
    draw = rng.random()
    if draw < 0.12:
        return NAME
    if draw < 0.12 + 0.08 * keyed:
        return code_word(rng.choice(NOUNS))
    if draw < 0.12 + 0.14 * keyed:
        return lives(words.made_up().capitalize())
    return rng.choice(FIXED)


def family(subject: Subject) -> tuple[Subject, ...]:
    """Subjects that could be mistaken for this one: those of the same kind, or all fixed ones."""
    near = (PETS, FAVOURITES, SECRETS, EVENTS)
    return next((group for group in near if subject in group), FIXED)
