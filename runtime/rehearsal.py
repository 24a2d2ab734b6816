"""Two small steps before anybody waits for one: what is built or touched first is, and the pace is known.

Without them nothing tells a slow first step from a hung one for two minutes. Knows plans; what is computed is
thrown away.
"""

from __future__ import annotations

import numpy as np

from .errors import EngineDied
from .link.messages import Sampling
from .plan import NOBODY, Plan, PlanRow, Runner


def rehearse(runner: Runner, block_tokens: int, max_context: int) -> None:
    """A prompt within one block and a token behind it, in block 0, which holds nothing yet.

    A step that fails here fails again with a sequence that can be told so. Raises ``EngineDied``.
    """
    prompt = max(1, min(block_tokens, max_context) - 1)
    counts = (prompt, 1) if prompt < min(block_tokens, max_context) else (prompt,)
    first = 0
    for step, count in enumerate(counts):
        tokens, table = np.zeros(count, dtype=np.int64), np.zeros(1, dtype=np.int32)
        row = PlanRow(NOBODY, 0, first, count, tokens, table, Sampling())
        try:
            runner.launch(Plan(step, (row,))).tokens()
        except EngineDied:
            raise
        except Exception:
            return
        first += count
