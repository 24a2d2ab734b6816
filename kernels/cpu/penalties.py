"""The loop that applies penalties for counted tokens to logits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from .compiling import exact


@exact
def penalize(parts: int, rows: Any, lines: Any, strengths: Any, logits: Any, tally: Any) -> None:
    """Penalize ``rows`` of ``logits`` fp32 ``[all rows, vocab]`` for the tokens counted in ``lines`` of
    ``tally``, int32 ``[lines, vocab]``, in place, on ``parts`` threads. Compiled numba code. Rows and lines:
    int64 ``[n]``; ``strengths``: fp32 ``[n, 3]``, of repetition, frequency and presence."""
    count = len(rows)
    for part in prange(parts):
        for at in range(count * part // parts, count * (part + 1) // parts):
            row, line, factor = rows[at], lines[at], strengths[at, 0]
            for token in range(tally.shape[1]):
                cell = tally[line, token]
                if cell:
                    logit, times = logits[row, token], np.float32(cell >> 1)
                    logit = logit * factor if logit < 0 else logit / factor
                    logit -= strengths[at, 1] * times
                    logits[row, token] = logit - strengths[at, 2] * min(times, np.float32(1))
