"""Facts that a user can tell the pocket model and ask for: subjects, their phrases and canonical replies.

A subject is data: `{v}` stands for the value told. It knows nothing of dialogues.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .words import ANIMALS, COLOURS, DRINKS, FOODS, NOUNS, WorldWords

Draw = Callable[[WorldWords], str]


@dataclass(frozen=True)
class Subject:
    """One thing that may be told: how people say it, how they ask for it, what the model answers."""

    key: str
    draw: Draw
    tells: tuple[str, ...]
    asks: tuple[str, ...]
    answer: str
    untold: str
    note: str
    ack: str = ""

    def acknowledge(self, value: str) -> str:
        """The reply to being told."""
        ack = self.ack or "Got it, " + self.answer[0].lower() + self.answer[1:]
        return ack.format(v=value)

    def recall(self, value: str | None) -> str:
        """The reply to being asked; None: never told."""
        return f"You have not told me {self.untold}." if value is None else self.answer.format(v=value)


def named(noun: str) -> Subject:
    """A pet, relative or thing with a name."""
    return Subject(
        key=noun,
        draw=WorldWords.name,
        tells=(
            f"My {noun} is called {{v}}.",
            f"My {noun}'s name is {{v}}.",
            f"The name of my {noun} is {{v}}.",
        ),
        asks=(f"What is my {noun} called?", f"What is my {noun}'s name?", f"What is the name of my {noun}?"),
        answer=f"Your {noun} is called {{v}}.",
        untold=f"your {noun}'s name",
        note=f"The user's {noun} is called {{v}}.",
    )


def favourite(noun: str, draw: Draw) -> Subject:
    """A favourite thing of some sort."""
    thing = f"favourite {noun}"
    return Subject(
        key=thing,
        draw=draw,
        tells=(f"My {thing} is {{v}}.", f"{{v}} is my {thing}.", f"I like the {noun} {{v}} best."),
        asks=(f"What is my {thing}?", f"What's my {thing}?", f"Which {noun} do I like best?"),
        answer=f"Your {thing} is {{v}}.",
        untold=f"your {thing}",
        note=f"The user's {thing} is {{v}}.",
    )


def secret(noun: str) -> Subject:
    return Subject(
        key=f"{noun} code",
        draw=WorldWords.code,
        tells=(f"My {noun} code is {{v}}.", f"The code of my {noun} is {{v}}.", f"{{v}} is my {noun} code."),
        asks=(f"What is my {noun} code?", f"What's my {noun} code?", f"What is the code of my {noun}?"),
        answer=f"Your {noun} code is {{v}}.",
        untold=f"your {noun} code",
        note=f"The user's {noun} code is {{v}}.",
    )


def event(noun: str) -> Subject:
    """Something that happens at a time of day."""
    return Subject(
        key=noun,
        draw=WorldWords.time,
        tells=(f"The {noun} is at {{v}}.", f"My {noun} is at {{v}}.", f"The time of the {noun} is {{v}}."),
        asks=(f"When is the {noun}?", f"What time is the {noun}?", f"When is my {noun}?"),
        answer=f"The {noun} is at {{v}}.",
        untold=f"when the {noun} is",
        note=f"The {noun} is at {{v}}.",
    )


def code_word(key: str) -> Subject:
    """The secret word that stands for another word."""
    return Subject(
        key=f"code word for {key}",
        draw=WorldWords.word,
        tells=(f"The code word for {key} is {{v}}.", f"The word for {key} is {{v}}."),
        asks=(f"What is the code word for {key}?", f"What's the word for {key}?"),
        answer=f"The code word for {key} is {{v}}.",
        untold=f"the code word for {key}",
        note=f"The code word for {key} is {{v}}.",
    )


def lives(person: str) -> Subject:
    """Where another person lives."""
    return Subject(
        key=f"home of {person}",
        draw=WorldWords.place,
        tells=(f"{person} lives in {{v}}.", f"The home of {person} is {{v}}."),
        asks=(f"Where does {person} live?", f"In which town does {person} live?"),
        answer=f"{person} lives in {{v}}.",
        untold=f"where {person} lives",
        note=f"{person} lives in {{v}}.",
        ack=f"Got it, {person} lives in {{v}}.",
    )


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
_NAMED = "dog cat horse parrot rabbit sister brother mother friend teacher boat"
PETS = tuple(map(named, _NAMED.split()))
FAVOURITES = (
    favourite("colour", lambda words: words.one_of(COLOURS)),
    favourite("food", lambda words: words.one_of(FOODS)),
    favourite("animal", lambda words: words.one_of(ANIMALS)),
    favourite("drink", lambda words: words.one_of(DRINKS)),
    favourite("number", WorldWords.number),
    favourite("city", WorldWords.place),
    favourite("game", WorldWords.word),
)
SECRETS = tuple(map(secret, ("locker", "door", "bike", "safe")))
EVENTS = tuple(map(event, ("meeting", "train", "flight", "party", "lesson", "dinner")))
FIXED = (NAME, HOME, AGE, *PETS, *FAVOURITES, *SECRETS, *EVENTS)


def any_subject(rng: random.Random, words: WorldWords, keyed: float = 1.0) -> Subject:
    """A subject drawn at large: a name rather often, now and then (`keyed` times as often) one with a key."""
    draw = rng.random()
    if draw < 0.12:
        return NAME
    if draw < 0.12 + 0.08 * keyed:
        return code_word(rng.choice(NOUNS))
    if draw < 0.12 + 0.14 * keyed:
        return lives(words.made_up().capitalize())
    return rng.choice(FIXED)


def family(subject: Subject) -> tuple[Subject, ...]:
    """The subjects near to one, to be mistaken for it."""
    near = (PETS, FAVOURITES, SECRETS, EVENTS)
    return next((group for group in near if subject in group), FIXED)
