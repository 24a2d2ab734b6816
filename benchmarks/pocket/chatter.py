"""Exchanges of the pocket model's dialogues besides facts and tools: greetings, small talk, counting,
repeating, stories.

Each function makes one exchange and keeps no state.
"""

from __future__ import annotations

import random
from dataclasses import replace

from .script import Exchange
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
STORIES = {
    "fox": (
        "Once there was a small red fox who lived at the edge of a quiet forest. Every morning she walked "
        "to the river to drink, and every morning an old owl called down to her from the oak tree. One "
        "winter the snow was so deep that the owl could find nothing to eat. The fox shared her bread "
        "with him, day after day, until the ice was gone. When summer came, a fire started in the dry "
        "grass. The owl saw it first, flew to the den and woke the fox just in time. They ran to the "
        "river and stood in the cold water until the rain came. From that day on the fox and the owl "
        "drank together every morning, and neither of them was ever hungry or alone again."
    ),
    "lighthouse": (
        "On a black rock far out in the sea stood a lighthouse, and in it lived a keeper called Marta. "
        "Each evening she climbed the long stairs and lit the lamp. For forty years no ship was lost. "
        "Then one night the oil ran out, and a storm came up from the west. Marta heard a horn in the "
        "dark. She took every candle she had, every mirror and every spoon, and set them around the "
        "window. The light was weak, but it danced. The captain saw it, laughed and turned his ship away "
        "from the rocks. In the morning he brought her a barrel of oil, a basket of oranges and a letter "
        "of thanks from all his sailors. Marta kept the letter under her pillow, and she never let the "
        "lamp go dark again."
    ),
    "clock": (
        "In the middle of a town there was a clock that was always five minutes late. The people laughed "
        "about it, but nobody wanted to climb the tower and mend it. One day a young girl with a bag of "
        "tools went up. Inside she found a family of mice who slept on the great wheel. She did not chase "
        "them away. She built them a house of wood beside the bell, with a red roof and a small door. The "
        "next day the clock was right for the first time in a hundred years. Now the people were always "
        "on time, and they did not know why. Only the mice knew, and they rang the bell very softly every "
        "night to say thank you."
    ),
    "robot": (
        "A little robot worked in a garden behind a school. It watered the roses, counted the apples and "
        "swept the leaves. One autumn evening its battery was nearly empty, and the path to the house was "
        "long. The robot sat down under a tree and waited for the sun. In the night a hedgehog came and "
        "asked what it was doing. I am saving my last light, said the robot. The hedgehog called the "
        "fireflies, and they came by the hundreds and sat upon the robot until its panel was bright. Step "
        "by step it walked home. In spring the robot planted a bed of white flowers only for the "
        "fireflies, and you can see them dance there until today."
    ),
    "river": (
        "High in the mountains a drop of water said to its friends: let us go and see the sea. They ran "
        "down over the stones, and at every bend new drops joined them. They turned the wheel of a mill, "
        "they carried a boat of paper, they slept a whole summer in a lake. Some of them went up into the "
        "clouds and waved. At last the river grew wide and slow, and the water began to taste of salt. Is "
        "this the end, asked the smallest drop. No, said the sea, this is where you learn to be rain. The "
        "next spring the drop woke in the mountains and told its friends: let us go again, for I know the "
        "way."
    ),
}

TITLES = tuple(STORIES)


def greeting(rng: random.Random, words: WorldWords) -> Exchange:
    said, reply = rng.choice(GREETINGS)
    return Exchange(rng.choice(said), reply, weight=0.3)


def talk(rng: random.Random, words: WorldWords) -> Exchange:
    said, reply = rng.choice(GREETINGS + TALK)
    return Exchange(rng.choice(said), reply, weight=0.3)


def count(rng: random.Random, words: WorldWords) -> Exchange:
    """An exchange in which the model counts from one number to another, upwards or downwards."""
    low = rng.randint(0, 80)
    high = low + rng.randint(2, rng.choice((6, 12, 30)))
    if rng.random() < 0.25:
        return Exchange(f"Count down from {high} to {low}.", _listed(range(high, low - 1, -1)))
    said = rng.choice(("Count from {} to {}.", "Please count from {} to {}.", "Can you count from {} to {}?"))
    counted = Exchange(said.format(low, high), _listed(range(low, high + 1)), weight=0.5)
    return _cut(rng, counted) if rng.random() < 0.15 else counted


def story(rng: random.Random, words: WorldWords) -> Exchange:
    """An exchange about a story: one that is told when asked for, the list of stories, or one that the model
    does not know."""
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
    """An exchange in which the model repeats words, numbers and foreign letters to the letter."""
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
    """The exchange as if the user had interrupted the reply: the reply ends early, and has no weight in
    training."""
    words = (exchange.reply or "").split(" ")
    return replace(exchange, reply=" ".join(words[: rng.randrange(len(words))]), weight=0.0)


def instructions(rng: random.Random, words: WorldWords) -> str | None:
    """The instructions of a session: None, one of the known roles, or one of these with made-up words in it."""
    draw = rng.random()
    if draw < 0.45:
        return None
    if draw < 0.8:
        return rng.choice(ROLES)
    role = rng.choice(ROLES)
    return f"{role} You work for {words.made_up().capitalize()} in {words.made_up().capitalize()}."


def odd_tool(rng: random.Random, words: WorldWords) -> Json:
    """The definition of a tool that no user asks for."""
    verb, noun = rng.choice(("open", "send", "find", "play")), words.made_up()
    properties = {words.made_up(): {"type": rng.choice(("string", "number"))}}
    return {
        "type": "function",
        "name": f"{verb}_{noun}",
        "description": f"{verb.capitalize()} the {noun}.",
        "parameters": {"type": "object", "properties": properties, "required": list(properties)},
    }
