"""What the scheduler knows of grammars: a reply's place in one, and who compiles them.

Two protocols; the library behind them is in ``guidance``. No tokenizer, no text.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..link.messages import Grammar


class Matcher(Protocol):
    """Where one reply stands in its grammar; it moves with the reply's tokens, and never back."""

    @property
    def complete(self) -> bool:
        """Whether nothing but an end may follow."""
        ...

    @property
    def fault(self) -> str:
        """Why it allows nothing any more; empty while it is sound."""
        ...

    def take(self, token: int) -> None:
        """The reply goes on with ``token``, which is no end."""
        ...

    def go_on(self, most: int) -> list[int]:
        """Take what must come next, at most so many tokens, written as the tokenizer would; they are no ends.

        They depend on what was taken before alone, and once taken nothing more must come: who takes the same
        tokens one by one, or gets them in the ``said`` of `Compiler.compile`, goes on alike.
        """
        ...

    def fill(self, mask: NDArray[np.int64]) -> None:
        """Set the bits of the tokens that may come next, the ends where it accepts; all others are cleared.

        ``mask``: contiguous ``[words]``, little-endian: token t is bit ``t % 8`` of byte ``t // 8``.
        """
        ...


class Compiler(Protocol):
    """Compiles grammars beside the steps."""

    @property
    def warm(self) -> bool:
        """Whether it has all that it loads once: only then does time spent tell anything of a grammar."""
        ...

    @property
    def threads(self) -> int:
        """So many are compiled at once; who calls `compile` for more has the others wait."""
        ...

    def knows(self, grammar: Grammar) -> bool:
        """Whether it is compiled already."""
        ...

    def compile(
        self, grammar: Grammar, stop_ids: tuple[int, ...], said: NDArray[np.int32]
    ) -> Future[Matcher]:
        """A matcher that has taken ``said``; done at once where the grammar is known.

        ``stop_ids``: what ends the reply; of these, end tokens are allowed exactly where the grammar accepts,
        and those that are text as the grammar has them. The future raises `GrammarInvalid`.
        """
        ...

    def statistics(self) -> dict[str, float]:
        """What it holds and has done."""
        ...
