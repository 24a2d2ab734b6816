"""Makes dialogues for the pocket model by random numbers: one seed, one dialogue.

The only state of a dialogue is what its user has told; the replies follow from that alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from . import chatter
from .facts import Subject, any_subject, code_word, family, lives
from .script import Dialogue, Exchange
from .toolbox import TOOLS, WorldTool
from .words import NOUNS, WorldWords

Makers = dict[Callable[[], Exchange], float]
"""Functions that make an exchange, each with the weight by which it is drawn."""
CHARS_PER_TOKEN = 2.55
"""Characters per token of dialogues in the pocket tokenizer, a little less than measured."""


@dataclass(frozen=True)
class Style:
    """How a user types: in lower case (``lower``), and without the punctuation mark at the end (``bare``)."""

    lower: bool = False
    bare: bool = False

    def write(self, text: str) -> str:
        text = text.lower() if self.lower else text
        return text.rstrip(".?!") if self.bare else text


@dataclass
class Writer:
    """Writes the exchanges of one dialogue. ``told``: by a subject's name, the subject and the value that the
    user has told. ``tools``: those that the dialogue offers. ``keyed``: how often subjects about a word or
    another person are drawn, against the usual."""

    rng: random.Random
    words: WorldWords
    keyed: float = 1.0
    tools: tuple[WorldTool, ...] = ()
    told: dict[str, tuple[Subject, str]] = field(default_factory=dict)

    def style(self) -> Style:
        return Style(lower=self.rng.random() < 0.12, bare=self.rng.random() < 0.25)

    def tell(self, subject: Subject | None = None) -> Exchange:
        """The user tells a fact, sometimes two in one sentence. A subject that was told before gets another
        value."""
        if subject is None and (draw := self.rng.random()) < 0.06:
            return self._unanswered(note=draw < 0.03 and bool(self.told))
        first, first_ack = self._told(subject or self._subject(), alone=True)
        if subject is not None or self.rng.random() > 0.12:
            return Exchange(first, first_ack)
        second, second_ack = self._told(self._subject(), alone=False)
        joined = f"{first.rstrip('.')} and {_uncapital(second)}"
        return Exchange(joined, f"{first_ack} {second_ack}")

    def ask(self, subject: Subject) -> Exchange:
        """The user asks for a fact, which was told before or not."""
        style = Style(bare=self.rng.random() < 0.25) if subject.key.startswith("home of") else self.style()
        question = _american(self.rng, self.rng.choice(subject.asks))
        if self.rng.random() < 0.12:
            lead = self.rng.choice(("Remind me: ", "Hey, ", "And ", "Do you know: "))
            question = lead + _uncapital(question)
        value = self.told[subject.key][1] if subject.key in self.told else None
        return Exchange(style.write(question), subject.recall(value))

    def ask_told(self) -> Exchange:
        """The user asks for one of the facts told so far."""
        return self.ask(self.rng.choice(list(self.told.values()))[0]) if self.told else self.ask_untold()

    def ask_untold(self) -> Exchange:
        """The user asks for a fact that was never told, often one that is near to a fact that was."""
        return self.ask(self.untold())

    def untold(self) -> Subject:
        """A subject that the user has not told, often one that is near to a subject that was told."""
        while True:
            subject = any_subject(self.rng, self.words, self.keyed)
            if self.told and self.rng.random() < 0.5:
                subject = self._near(self.rng.choice(list(self.told.values()))[0])
            if subject.key not in self.told:
                return subject

    def tool(self) -> Exchange:
        """The user asks for something that needs a tool."""
        at_hand = self.tools and self.rng.random() < 0.85
        return self.tool_use(self.rng.choice(self.tools if at_hand else TOOLS))

    def tool_use(self, tool: WorldTool) -> Exchange:
        """The user asks for what this tool does. The model calls it if the dialogue offers it, else says that
        it has no such tool."""
        style = self.style()
        use = tool.use(self.rng, self.words, style.lower)
        request = style.write(use.request)
        if tool in self.tools:
            return Exchange(request, use.reply, use.call, use.output)
        return Exchange(request, use.refusal)

    def chat(self, make: Callable[[random.Random, WorldWords], Exchange]) -> Exchange:
        """An exchange that ``make`` makes, such as small talk, with the user's text in a style of typing."""
        exchange = make(self.rng, self.words)
        user = Style(bare=self.rng.random() < 0.2).write(exchange.user)
        return replace(exchange, user=user.lower() if self.rng.random() < 0.1 else user)

    def repeat(self) -> Exchange:
        return chatter.repeat(self.rng, self.words)

    def _unanswered(self, note: bool) -> Exchange:
        subject = self._subject()
        if not note:
            return Exchange(self._told(subject, alone=True)[0], None)
        value = subject.draw(self.words)
        self.told[subject.key] = (subject, value)
        return Exchange(subject.note.format(v=value), None, role="system")

    def _near(self, subject: Subject) -> Subject:
        if subject.key.startswith("code word"):
            return code_word(self.rng.choice(NOUNS))
        if subject.key.startswith("home of"):
            return lives(self.words.made_up().capitalize())
        return self.rng.choice(family(subject))

    def _subject(self) -> Subject:
        if self.told and self.rng.random() < 0.15:
            return self.rng.choice(list(self.told.values()))[0]
        return any_subject(self.rng, self.words, self.keyed)

    def _told(self, subject: Subject, alone: bool) -> tuple[str, str]:
        style = Style() if not alone or subject.key.startswith("home of") else self.style()
        known = subject.key in self.told
        value = subject.draw(self.words)
        value = value.lower() if style.lower else value
        tell = _american(self.rng, self.rng.choice(subject.tells))
        if alone and known and self.rng.random() < 0.8:
            tell = self.rng.choice(("Actually, ", "Sorry, ", "No, ", "Correction: ")) + _uncapital(tell)
        elif alone and self.rng.random() < 0.15:
            tell = self.rng.choice(("Remember: ", "By the way, ", "Note that ", "Hi, ")) + _uncapital(tell)
        self.told[subject.key] = (subject, value)
        return style.write(tell).format(v=value), subject.acknowledge(value)


def _uncapital(text: str) -> str:
    keeps = text.startswith(("I ", "I'm ", "{v}")) or text.split()[0].lower() not in _OPENERS
    return text if keeps else text[0].lower() + text[1:]


_OPENERS = frozenset(("my", "the", "call", "what", "what's", "which", "where", "when", "who", "how", "in"))


def _american(rng: random.Random, text: str) -> str:
    if "favourite" in text and rng.random() < 0.15:
        return text.replace("favourite", "favorite").replace("colour", "color")
    return text


@dataclass(frozen=True)
class Mix:
    """How often each kind of exchange comes, as weights. `keyed`: how often subjects about a word or another
    person are drawn, against the usual. `wide`: the share of made-up syllables with rarer sounds
    (`WorldWords`)."""

    tell: float = 5
    ask_told: float = 5
    ask_untold: float = 2.5
    repeat: float = 2
    tool: float = 2.5
    count: float = 0.6
    talk: float = 1.2
    story: float = 0.25
    keyed: float = 1.0
    wide: float = 0.0


def dialogue(
    seed: int, tokens: int, mix: Mix | None = None, held_out: bool = False, early: bool = False
) -> Dialogue:
    """A dialogue of about so many tokens, by this seed; in its last sixth the user mostly asks for facts told
    before. ``mix``: how often each kind of exchange comes. ``held_out``: its values are those that training
    never sees. ``early``: outputs of tools are written as in the dialogues that the tokenizer was learnt
    from."""
    rng, mix = random.Random(seed), mix or Mix()
    writer = Writer(rng, WorldWords(rng, held_out, mix.wide, early), mix.keyed)
    made = opening(writer)
    chars, budget = sum(len(str(tool)) for tool in made.tools), tokens * CHARS_PER_TOKEN
    if rng.random() < 0.25:
        chars += _add(made, writer.chat(chatter.greeting))
    usual, late = _makers(writer, mix), _late_makers(writer)
    while not made.exchanges or chars <= budget:
        makers = late if chars > budget * 5 / 6 else usual
        chars += _add(made, rng.choices(list(makers), list(makers.values()))[0]())
    return made


def opening(writer: Writer, tools: float = 0.5) -> Dialogue:
    """The start of a dialogue: its instructions, sometimes with a fact in them, and its tools. ``tools``: the
    chance that it has tools."""
    rng = writer.rng
    system = chatter.instructions(rng, writer.words)
    if rng.random() < 0.2:
        subject = any_subject(rng, writer.words)
        value = subject.draw(writer.words)
        writer.told[subject.key] = (subject, value)
        system = " ".join(filter(None, (system, subject.note.format(v=value))))
    schemas = []
    if rng.random() < tools:
        chosen = rng.sample(TOOLS, rng.choice((1, 2, 2, 2, 3, 4)))
        writer.tools = tuple(chosen)
        schemas = [tool.schema(rng) for tool in chosen]
        if rng.random() < 0.2:
            schemas.insert(rng.randint(0, len(schemas)), chatter.odd_tool(rng, writer.words))
    return Dialogue(system, schemas)


def _makers(writer: Writer, mix: Mix) -> Makers:
    return {
        writer.tell: mix.tell,
        writer.ask_told: mix.ask_told,
        writer.ask_untold: mix.ask_untold,
        writer.repeat: mix.repeat,
        writer.tool: mix.tool,
        lambda: writer.chat(chatter.count): mix.count,
        lambda: writer.chat(chatter.talk): mix.talk,
        lambda: writer.chat(chatter.story): mix.story,
    }


def _late_makers(writer: Writer) -> Makers:
    return {writer.ask_told: 3.0, writer.ask_untold: 1.0, writer.tell: 0.3}


def _add(made: Dialogue, exchange: Exchange) -> int:
    """Add an exchange to the dialogue. Returns about how many characters it takes."""
    made.exchanges.append(exchange)
    return len(exchange.user) + len(exchange.output) + len(exchange.reply or "") + 20
