"""``holdfast bench memory``: the peak memory of an engine process that loads a model and fills all its KV.

It is compared with what the process needs: the weights, the pool, and 200 MB for everything else, mainly
interpreter and torch; without host memory for KV, which has its own budget (``--host-bytes``). The peak is the
kernel's own (``VmHWM``, what ``time -v`` calls maximum resident set size).
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.runtime.link.process import ChildEngine
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.verbs import Sampling, TokenLimits

from .harness.options import CannotMeasure, Options, options_of, parser_of, run
from .harness.rounds import prompt, vocabulary
from .harness.servers import memory_bytes
from .report import Goal, show, table
from .toys import make_toy

REST_BYTES = 200_000_000
MOST_TIMES = 1.3
LENGTH = 2048


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("memory", __doc__, ("toy-50m",), rounds=1)
    parser.add_argument("--kv-mib", type=int, default=128, help="the pool, which is filled")
    chosen = parser.parse_args(words)
    options = options_of(chosen)
    return run("memory", lambda: measure(options, (1 if options.quick else chosen.kv_mib) << 20))


def measure(options: Options, kv_bytes: int) -> None:
    figures = {}
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            make_toy(model, Path(folder), seed=options.seed, dtype=options.dtype)
            rng, size = random.Random(options.seed), vocabulary(model)
            drawn = partial(prompt, rng, vocabulary_size=size)
            figures[model] = asyncio.run(peak(Path(folder), options.dtype, kv_bytes, drawn))
    keys = ("weights_bytes", "pool_bytes", "loaded_bytes", "peak_bytes")
    rows = [[model, *(f"{one[key] / 1e6:.1f}" for key in keys)] for model, one in figures.items()]
    table("an engine process, MB", ["model", "weights", "pool", "loaded", "peak"], rows)
    goals = [
        Goal(
            f"{model}: peak ÷ (weights + pool + 200 MB)",
            one["peak_bytes"] / (one["weights_bytes"] + one["pool_bytes"] + REST_BYTES),
            "x",
            MOST_TIMES,
            "lower",
        )
        for model, one in figures.items()
    ]
    show("memory", options.seed, {**options.told(), "on": figures}, goals, options.out)


async def peak(model: Path, dtype: str, kv_bytes: int, drawn: Callable[[int], list[int]]) -> dict[str, Any]:
    """The memory in bytes of an engine process that loads ``model`` and fills ``kv_bytes`` of KV with prompts.
    ``drawn``: draws one of so many tokens."""
    settings = EngineSettings(
        model=str(model),
        device="cpu",
        dtype=dtype,
        kv_bytes=kv_bytes,
        host_bytes=0,
        max_context=None,
    )
    async with (engine := ChildEngine(settings)) as link:
        pid, hello = engine.pid, link.hello
        if pid is None:
            raise CannotMeasure("the engine has no process")
        loaded = memory_bytes(pid)
        room = hello.room
        while room >= hello.block_tokens:
            length = min(LENGTH, hello.max_context - 1, room - 1)
            state = await link.open(drawn(length))
            async for row in await link.generate(state.seq, Sampling(), TokenLimits(1)):
                assert row.error is None
            room -= -(-length // hello.block_tokens) * hello.block_tokens
        filled = await link.statistics()
        return {
            "weights_bytes": hello.weights,
            "pool_bytes": hello.blocks * hello.block_bytes,
            "loaded_bytes": loaded["now"],
            "peak_while_loading_bytes": loaded["peak"],
            "peak_bytes": memory_bytes(pid)["peak"],
            "pool": {name: value for name, value in filled.items() if name.startswith("pool_")},
        }
