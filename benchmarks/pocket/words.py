"""The words and numbers in the pocket model's training dialogues: made-up words, real names and places, codes,
times.

Every value belongs to one of two splits by its hash: the training split or the held-out split. Sentences are
made elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from zlib import crc32


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


NAMES = _listed(
    "Ana Ben Clara David Emma Felix Greta Hugo Ida Jonas Kira Leo Mona Nils Olga Paul Rosa Sam Tina "
    "Uma Viktor Wanda Yusuf Zoe Alice Bruno Carla Dora Elias Fatima George Hanna Ivan Julia Karim "
    "Lena Mia Noah Oscar Petra Rex Bella Max Luna Rocky Daisy Milo Coco Simba Nala Otto Frida Pepe "
    "Lola Bob Tom Anna Eva Maria Peter"
)
PLACES = _listed(
    "Oslo Paris Rome Lima Cairo Tokyo Berlin Madrid Dublin Vienna Prague Athens Lisbon Warsaw Boston "
    "Denver Quito Delhi Seoul Sydney Zagreb Geneva Bergen Malaga Porto Turin Basel London Nairobi "
    "Havana Kyoto Lyon Ghent Riga"
)
COLOURS = _listed(
    "red blue green yellow purple orange pink black white brown grey silver gold turquoise violet"
)
FOODS = _listed(
    "pizza pasta soup rice bread cheese salad sushi curry cake pancakes apples noodles tacos beans"
)
ANIMALS = _listed("fox owl bear wolf otter whale eagle tiger panda horse rabbit deer seal goat crow")
DRINKS = _listed("tea coffee water milk juice cocoa lemonade cider cola")
NOUNS = _listed(
    "apple bridge candle door engine forest garden hammer island jacket kettle ladder mirror needle "
    "ocean pencil river spoon table umbrella valley window yard stone cloud lamp paper chair train "
    "boat"
)

_ONSETS = _listed("b d f g h j k l m n p r s t v w z br dr kr tr st sh ch pl fl gr")
_VOWELS = _listed("a e i o u a e i o ai ou ee")
_CODAS = ("", "", "", "", "n", "r", "l", "s", "k", "m", "t", "x", "nd", "rt")
_WIDE_ONSETS = ("", "", "", "", *_listed("c c qu y x th sp sc sl sw tw cl cr pr gl bl wh ph sn sm"))
_WIDE_VOWELS = _listed("a e i o u y ea oo ie au ia io")
_WIDE_CODAS = ("", "", *_listed("ck ng st ll ss sh th ct p b d g f c ne te"))
_FOREIGN = tuple("éèüöäßøåñçłžšőíáóúабвгдежзиклмнопрстуя日本語中文山川海空αβγδλπσω")
_EMOJI = tuple("😀🎉🐶🐱🌍🚀🍕🌻🔥💧🎈🦊")

HELD_OUT_SHARE = 8
"""One value in so many is held out of training."""


def is_held_out(value: str) -> bool:
    """Whether a value, in upper or lower case, belongs to the held-out split."""
    return crc32(value.lower().encode()) % HELD_OUT_SHARE == 0


@dataclass(frozen=True)
class WorldWords:
    """Draws the values of one dialogue, all of one split, by its random numbers. ``held_out``: from the
    held-out split; false: from the training split.

    `wide` is the share of syllables with sounds that the others do not have. `early`: values and outputs of
    tools are written as in the dialogues that the tokenizer was learnt from: words that are looked up have no
    quotation marks; outputs have all their fields and are JSON with spaces.
    """

    rng: random.Random
    held_out: bool = False
    wide: float = 0.0
    early: bool = False

    def made_up(self) -> str:
        """A lower-case word of two or three made-up syllables."""
        while True:
            more = self.rng.choice((1, 1, 1, 2))
            word = "".join(self._syllable(last=left == 0) for left in range(more, -1, -1))
            if len(word) >= 4 and self._mine(word):
                return word

    def foreign(self) -> str:
        """A short word with letters outside ASCII, or an emoji."""
        while True:
            letters = "".join(self.rng.choice(_FOREIGN) for _ in range(self.rng.randint(1, 3)))
            if self.rng.random() < 0.2:
                return self.rng.choice(_EMOJI)
            word = self._syllable(last=True) + letters
            if self._mine(word):
                return word

    def name(self) -> str:
        return self._named(NAMES)

    def place(self) -> str:
        return self._named(PLACES)

    def word(self) -> str:
        """A word to remember or repeat: mostly made-up, sometimes a plain noun."""
        return self.rng.choice(NOUNS) if not self.held_out and self.rng.random() < 0.25 else self.made_up()

    def one_of(self, known: Sequence[str]) -> str:
        """One of the words in ``known``, or, as often, a made-up word instead."""
        return self.rng.choice(known) if self.rng.random() < 0.5 else self.made_up()

    def code(self) -> str:
        """Four digits."""
        return self._draw(lambda: f"{self.rng.randrange(10_000):04d}")

    def number(self) -> str:
        """A number of one to three digits."""
        return str(self.rng.randint(1, self.rng.choice((9, 99, 99, 999))))

    def age(self) -> str:
        return str(self.rng.randint(5, 99))

    def time(self) -> str:
        """A time of day, hours and minutes."""
        return self._draw(lambda: f"{self.rng.randint(0, 23)}:{self.rng.randrange(60):02d}")

    def _named(self, known: Sequence[str]) -> str:
        draw = self.rng.random()
        if draw < 0.3:
            return self._draw(lambda: self.rng.choice(known))
        if draw < 0.34:
            return self.foreign().capitalize()
        if draw < 0.38:
            return f"{self.made_up().capitalize()} {self.made_up().capitalize()}"
        return self.made_up().capitalize()

    def _syllable(self, last: bool) -> str:
        if self.wide and self.rng.random() < self.wide:
            return "".join(map(self.rng.choice, (_WIDE_ONSETS, _WIDE_VOWELS, _WIDE_CODAS)))
        coda = self.rng.choice(_CODAS) if last or self.rng.random() < 0.3 else ""
        return self.rng.choice(_ONSETS) + self.rng.choice(_VOWELS) + coda

    def _mine(self, value: str) -> bool:
        return is_held_out(value) == self.held_out

    def _draw(self, draw: Callable[[], str]) -> str:
        while not self._mine(value := draw()):
            pass
        return value
