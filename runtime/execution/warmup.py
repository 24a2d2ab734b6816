"""Warm-up steps, run before the engine serves: they compile kernels, touch memory and teach the watchdog the
pace.

Without them a slow first step could not be told from a hung one for two minutes, and on a GPU each kernel would
be compiled during the first step that needs it. Knows plans; what is computed is thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from ..errors import EngineDied
from ..grammar.llguidance import ANY_TOKEN
from ..plan import NO_SEQUENCE, BlockCopy, PlanRow, RowAsks, Runner, plan_of
from ..verbs import Sampling

FIRST_STEP = -1000
"""The number of the first warm-up step: a scheduler's numbers are higher."""

GREEDY = Sampling()
DRAWN = (
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, typical_p=0.9),
    Sampling(repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1),
    Sampling(logit_bias=((0, 1.0),), bad_words=((0, 1),), logprobs=0),
    Sampling(logprobs=20),
    Sampling(logprobs=100),
)
"""Sampling parameters that together need each sampling kernel."""


def rehearse(runner: Runner, block_tokens: int, max_context: int, *, kernels: bool = False) -> None:
    """Run warm-up steps: a prompt within one block, and one token behind it, in block 0, which holds nothing
    yet.

    ``kernels``: also run steps that compile each kernel that a later step may need. They read block 0, and
    write block 0 and, if ``max_context`` reaches there, block 1. Errors are ignored: a step that fails here
    fails again with a sequence, which then ends with the error. Raises ``EngineDied``.
    """
    plans = _steps(block_tokens, max_context)
    more = _kernels(block_tokens, max_context) if kernels else ()
    for step, (rows, copies) in enumerate(chain(plans, more), FIRST_STEP):
        try:
            runner.launch(plan_of(step, rows, copies=copies)).tokens()
        except EngineDied:
            raise
        except Exception:
            if not kernels:
                return


Step = tuple[tuple[PlanRow, ...], tuple[BlockCopy, ...]]


def _steps(block_tokens: int, max_context: int) -> Iterator[Step]:
    prompt = max(1, min(block_tokens, max_context) - 1)
    yield (_row(0, prompt, block_tokens),), ()
    if prompt < min(block_tokens, max_context):
        yield (_row(prompt, 1, block_tokens),), ()


def _kernels(block_tokens: int, max_context: int) -> Iterator[Step]:
    """Yield steps (rows, block copies) that together need each kernel: single tokens at each order of context
    length, rows with a chunk, each way to sample, a copy."""
    first = 1
    while first < max_context - 1:
        yield (_row(first, 1, block_tokens),), ()
        first *= 2
    yield (_row(max_context - 1, 1, block_tokens),), ()
    short = min(block_tokens, max_context) - 1
    yield (_row(short, 1, block_tokens), _row(0, 1, block_tokens), _row(0, short or 1, block_tokens)), ()
    for sampling in DRAWN:
        yield (_row(short, 1, block_tokens, sampling), _row(0, 1, block_tokens, sampling)), ()
    yield (_row(short, 1, block_tokens, grammar=ANY_TOKEN),), ()
    if max_context > block_tokens:  # then there are two blocks
        yield (), (BlockCopy(0, 1),)


def _row(
    first: int, count: int, block_tokens: int, sampling: Sampling = GREEDY, grammar: int | None = None
) -> PlanRow:
    tokens = np.zeros(count, dtype=np.int64)
    table = np.zeros(-(-(first + count) // block_tokens), dtype=np.int32)
    past = np.zeros(first + count - 1, dtype=np.int32)
    asks = RowAsks(grammar=grammar)
    return PlanRow(NO_SEQUENCE, 0, first, count, tokens, table, sampling, past=past, asks=asks)
