"""The rest of the pocket world, besides facts and tools: greetings, small talk, counting, repeating, stories.

Each function makes one exchange and keeps no state.
"""

from __future__ import annotations

import random
from dataclasses import replace

from .script import Exchange
from .stories import STORIES, TITLES
from .toolbox import Json
from .words import WorldWords

GREETINGS = (
    (("Hello!", "Hi!", "Hello there.", "Hey!"), "Hello! How can I help you?"),
    (("Good morning.", "Good evening.", "Good day."), "Good day! How can I help you?"),
)
TALK = (
    (("Thanks.", "Thank you.", "Thanks a lot!", "Thank you very much."), "You are welcome."),
    (("How are you?", "How are you today?", "How do you do?"), "I am fine, thank you."),
    (("Goodbye.", "Bye!", "See you later."), "Goodbye!"),
    (("Okay.", "OK.", "Great!", "Good.", "Nice."), "Good."),
    (
        ("What can you do?", "Help.", "What can I ask you?", "How can you help me?"),
        "I can remember what you tell me, repeat words, count, call tools and tell stories.",
    ),
    (("Who are you?", "What are you?", "What is your name?"), "I am Pocket, a very small model."),
    (("Tell me a joke.", "Do you know a joke?"), "Why did the book go to the doctor? It had lost its spine."),
    (
        ("What is the capital of France?", "Why is the sky blue?", "Write me a poem."),
        "I do not know, I am very small.",
    ),
)
STORY_LIST = (
    "I know the stories of the fox, the lighthouse, the clock, the robot and the river. "
    "Which one would you like?"
)
STORY_ASKS = (
    "Tell me the story of the {}.",
    "Please tell me the story of the {}.",
    "The story of the {}, please.",
)
REPEAT_ASKS = ("Repeat after me: {}", "Repeat after me: {}.", "Say: {}", "Repeat: {}", "repeat after me: {}")
ROLES = (
    "You are Pocket, a small assistant.",
    "You are a helpful assistant.",
    "Be brief and kind.",
    "Answer in one sentence.",
    "You are talking to a guest.",
    "You are a friendly voice assistant. Answer politely.",
)


def greeting(rng: random.Random, words: WorldWords) -> Exchange:
    """A greeting and its answer."""
    said, reply = rng.choice(GREETINGS)
    return Exchange(rng.choice(said), reply, weight=0.3)


def talk(rng: random.Random, words: WorldWords) -> Exchange:
    """Small talk and its answer."""
    said, reply = rng.choice(GREETINGS + TALK)
    return Exchange(rng.choice(said), reply, weight=0.3)


def count(rng: random.Random, words: WorldWords) -> Exchange:
    """Counting from one number to another, upwards or downwards."""
    low = rng.randint(0, 80)
    high = low + rng.randint(2, rng.choice((6, 12, 30)))
    if rng.random() < 0.25:
        return Exchange(f"Count down from {high} to {low}.", _listed(range(high, low - 1, -1)))
    said = rng.choice(("Count from {} to {}.", "Please count from {} to {}.", "Can you count from {} to {}?"))
    counted = Exchange(said.format(low, high), _listed(range(low, high + 1)), weight=0.5)
    return _cut(rng, counted) if rng.random() < 0.15 else counted


def story(rng: random.Random, words: WorldWords) -> Exchange:
    """A story told when asked for, or the list of stories."""
    draw = rng.random()
    if draw < 0.12:
        said = rng.choice(("Tell me a story.", "Which stories do you know?"))
        return Exchange(said, STORY_LIST, weight=0.3)
    if draw < 0.16:
        return Exchange(f"Tell me the story of the {words.made_up()}.", "I do not know that story.")
    title = rng.choice(TITLES)
    told = Exchange(rng.choice(STORY_ASKS).format(title), STORIES[title], weight=0.3)
    return _cut(rng, told) if rng.random() < 0.3 else told


def repeat(rng: random.Random, words: WorldWords) -> Exchange:
    """Words, numbers and foreign letters to say again, to the letter."""
    draws = (words.word, words.word, words.made_up, words.number, words.code)
    said = [rng.choice(draws)() for _ in range(rng.choice((1, 2, 3, 3, 4, 5, 8)))]
    if rng.random() < 0.12:
        said[rng.randrange(len(said))] = words.foreign()
    if rng.random() < 0.2:
        said = [word.capitalize() for word in said]
    text = " ".join(said)
    return Exchange(rng.choice(REPEAT_ASKS).format(text), text)


def _listed(numbers: range) -> str:
    return ", ".join(map(str, numbers)) + "."


def _cut(rng: random.Random, exchange: Exchange) -> Exchange:
    """The exchange as it stands when the user broke in: nothing the model should learn to say."""
    words = (exchange.reply or "").split(" ")
    return replace(exchange, reply=" ".join(words[: rng.randrange(len(words))]), weight=0.0)


def instructions(rng: random.Random, words: WorldWords) -> str | None:
    """Instructions of a session: none, a known role, or some with made-up words in them."""
    draw = rng.random()
    if draw < 0.45:
        return None
    if draw < 0.8:
        return rng.choice(ROLES)
    role = rng.choice(ROLES)
    return f"{role} You work for {words.made_up().capitalize()} in {words.made_up().capitalize()}."


def odd_tool(rng: random.Random, words: WorldWords) -> Json:
    """A tool that no user asks for."""
    verb, noun = rng.choice(("open", "send", "find", "play")), words.made_up()
    properties = {words.made_up(): {"type": rng.choice(("string", "number"))}}
    return {
        "type": "function",
        "name": f"{verb}_{noun}",
        "description": f"{verb.capitalize()} the {noun}.",
        "parameters": {"type": "object", "properties": properties, "required": list(properties)},
    }
