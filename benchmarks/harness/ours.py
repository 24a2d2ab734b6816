"""Our engine in a process of its own, without a gateway, as a worker like the other engines: run it with
``python -m``.

Besides the requests that every worker answers (`peers.worker`), it answers `log` (means of the steps since the
last such request) and `profile` (where a step's time goes, by torch's operators).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from holdfast.kernels.cpu.cores import bind
from holdfast.runtime.engine import Engine
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.verbs import Close, Extend, Finish, Generate, Open, Row, Sampling, TokenLimits

from ..peers.worker import answer_all
from .talker import apply, loaded, rest, spoken

Json = dict[str, Any]
KV_BYTES = 1 << 30
LISTED_OPERATORS = 12
COUNTED = ("steps", "rows", "prefilled", "recomputed", "computed")


class Ours:
    """`peers.worker.PeerEngine` for our engine."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._engine: Engine
        self._conversation: int | None = None
        self._before: dict[str, float] = {}

    def load(self, folder: Path, dtype: str, threads: int) -> Json:
        """Load the model in ``folder`` with a server's default settings, except for the memory for KV."""
        torch.set_num_threads(threads)
        settings = EngineSettings(model=str(folder), device="cpu", dtype=dtype, kv_bytes=KV_BYTES)
        self._engine = loaded(settings)
        bind()  # as the engine's own process does
        return {
            "versions": {name: version(name) for name in ("holdfast-llm", "torch")},
            "precision": {"weights": dtype, "kv": dtype},
            "step_tokens": settings.step_size(None).tokens,
        }

    def begin(self) -> None:
        if self._conversation is not None:
            apply(self._engine, Close(0, self._conversation, keep_kv=False))
            self._conversation = None

    def turn(self, tokens: list[int], out: int) -> tuple[float, list[int]]:
        """Append tokens to the conversation and generate ``out``; the engine keeps the history. Returns the
        seconds to the first token, and the generated tokens."""
        began = time.perf_counter()
        if self._conversation is None:
            self._conversation = self._open(tokens)
        else:
            apply(self._engine, Extend(0, self._conversation, tokens))
        self._generate(self._conversation, out)
        first, said, _ = spoken(self._engine, lambda: None)
        return first - began, said

    def decode(self, prompts: list[list[int]], out: int) -> int:
        """Generate ``out`` tokens after each prompt, all prompts at once. Returns the number of tokens."""
        opened = [self._open(prompt) for prompt in prompts]
        for seq in opened:
            self._generate(seq, out)
        tokens = sum(len(row.tokens) for row in self._rows(len(opened)))
        for seq in opened:
            apply(self._engine, Close(0, seq, keep_kv=False))
        rest(self._engine)
        return tokens

    def log(self, request: Json) -> Json:
        """Means over the steps since the last call: milliseconds by part of a step, tokens by class."""
        spent = self._spent()
        steps = spent.pop("steps")
        spent["decoded"] = spent.pop("computed") - spent["prefilled"] - spent["recomputed"]
        means = {name: total / max(1.0, steps) for name, total in spent.items()}
        in_ms = {f"{name}_ms": 1000 * means.pop(name) for name in spent if name.startswith("t_")}
        return {"steps": steps, **in_ms, **means}

    def _spent(self) -> dict[str, float]:
        """What the engine's counters have grown by since the last call: steps, their rows, the seconds of their
        parts, and the tokens that they computed."""
        now = self._engine.statistics()
        now = {name: total for name, total in now.items() if name.startswith("t_") or name in COUNTED}
        grown = {name: total - self._before.get(name, 0.0) for name, total in now.items()}
        self._before = now
        return grown

    def profile(self, request: Json) -> Json:
        """Run `decode` under torch's profiler. Gives the operators with the most time of their own, and the
        share of time outside of operators."""
        self._spent()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self.decode(request["prompts"], request["out"])
        spent = self._spent()
        launched, steps = spent["t_launch"] * 1000, max(1.0, spent["steps"])
        events = sorted(profiler.key_averages(), key=lambda one: -one.self_cpu_time_total)
        inside = sum(one.self_cpu_time_total for one in events) / 1000
        return {
            "steps": steps,
            "launch_ms_per_step": launched / steps,
            "outside_operators_share": max(0.0, 1 - inside / launched) if launched else 0.0,
            "operators": [
                {
                    "name": one.key,
                    "calls_per_step": one.count / steps,
                    "ms_per_step": one.self_cpu_time_total / 1000 / steps,
                    "share": one.self_cpu_time_total / 1000 / launched if launched else 0.0,
                }
                for one in events[:LISTED_OPERATORS]
            ],
        }

    def _open(self, tokens: list[int]) -> int:
        seq = next(self._numbers)
        apply(self._engine, Open(0, seq, b"", tokens))
        return seq

    def _generate(self, seq: int, out: int) -> None:
        apply(self._engine, Generate(0, seq, Sampling(), TokenLimits(out)))

    def _rows(self, running: int) -> Iterable[Row]:
        """The rows of all steps, until ``running`` generations have ended. Raises ``RuntimeError`` if one
        fails."""
        while running:
            step = self._engine.step()
            for row in step.rows if step else ():
                if row.finish is Finish.ERROR:
                    raise RuntimeError(row.error or "the turn failed")
                running -= row.finish is not None
                yield row


if __name__ == "__main__":
    ours = Ours()
    answer_all(ours, {"log": ours.log, "profile": ours.profile})
