"""Parts of interleaved rounds: prompts by seed, rotated orders, ratios within a round, lines through points.

Figures of different rounds are never divided by each other, because machines are shared.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import takewhile
from statistics import median
from typing import TypeVar

from ..toys import ASSISTANT, SHAPES, USER

T = TypeVar("T")


def vocabulary(model: str) -> int:
    return int(SHAPES[model]["vocab_size"])


def prompt(rng: random.Random, length: int, vocabulary_size: int) -> list[int]:
    """A user's message as the toys' chat template writes it: ``length`` random tokens, those included that mark
    its beginning and the reply's."""
    inner = [rng.randrange(2, vocabulary_size) for _ in range(length - 2)]
    return [USER, *inner, ASSISTANT]


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The items rotated by ``by``, so that each comes first once."""
    by %= len(items)
    return [*items[by:], *items[:by]]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return median(one / other for one, other in zip(ours, theirs, strict=True))


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Slope of the least-squares line through the points."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    rising = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return rising / sum((x - mean_x) ** 2 for x in xs)


def agreeing(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The number of equal tokens before the first one that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
