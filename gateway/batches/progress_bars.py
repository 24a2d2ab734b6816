"""Progress bars of `offline.LLM`: of loading, and of the prompts of a call. ``tqdm`` is imported when one is
shown."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from ...runtime.link.messages import COMPILING, Heartbeat, Phase
from .completer import PromptTask

UseTqdm: TypeAlias = bool | Callable[..., Any]
"""Whether to show a progress bar; or a callable that makes one, used instead of ``tqdm.auto.tqdm``."""
LONG_SECONDS = 5.0
"""Seconds of compiling kernels after which a line on stderr says so. Reading compiled kernels from disk takes
less."""
COMPILES = "holdfast: compiling kernels, a minute or more; they are kept, so that later starts take seconds"


class LoadingBar:
    """Shows the progress of loading a model: a bar on a terminal; and, on a terminal or not, one line on stderr
    if kernels are compiled for long, as at the first start on a machine. ``clock``: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._bar: Any = None
        self._clock = clock
        self._heard: float | None = None  # when the last heartbeat came that told of compiling
        self._compiled = 0.0  # seconds between such heartbeats, until they are told

    def heard(self, beat: Heartbeat) -> None:
        """Called with each heartbeat of the engine: shows the progress that it reports, and removes the bar
        when loading is over."""
        self._count(beat)
        if beat.phase not in (Phase.LOADING, Phase.COMPILING):
            self.close()
        elif sys.stderr.isatty():
            if self._bar is None:
                shape = "{desc}{percentage:3.0f}%|{bar}| {elapsed}"
                self._bar = _made(True, total=1.0, bar_format=shape, leave=False)
            self._bar.set_description(beat.detail or "loading", refresh=False)
            self._bar.n = beat.fraction
            self._bar.refresh()

    def _count(self, beat: Heartbeat) -> None:
        """Add the time since the heartbeat before, if both report compiling. Print the line about compiling
        once this sum reaches `LONG_SECONDS`."""
        now, before = self._clock(), self._heard
        self._heard = now if beat.phase is Phase.COMPILING and beat.detail.startswith(COMPILING) else None
        if self._heard is None or before is None or self._compiled >= LONG_SECONDS:
            return
        self._compiled += now - before
        if self._compiled >= LONG_SECONDS:
            if self._bar is not None:
                self._bar.clear()
            print(COMPILES, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class PromptBar(AbstractContextManager["PromptBar"]):
    """The progress bar of one call: how many of its ``total`` prompts are completed, and input and output
    tokens per second so far. ``use_tqdm``: false shows none."""

    def __init__(self, use_tqdm: UseTqdm, total: int) -> None:
        shape = {"total": total, "desc": "Processed prompts", "dynamic_ncols": True}
        self._bar = _made(use_tqdm, **shape) if use_tqdm else None
        self._began = time.monotonic()
        self._read = self._written = 0

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def ended(self, task: PromptTask) -> None:
        """Called when all completions of a prompt have ended: counts the prompt and its tokens."""
        if self._bar is None:
            return
        self._read += len(task.prompt.ids)
        self._written += sum(len(output.token_ids) for output in task.outputs)
        seconds = max(time.monotonic() - self._began, 1e-6)
        self._bar.postfix = (
            f"input: {self._read / seconds:.1f} tok/s, output: {self._written / seconds:.1f} tok/s"
        )
        self._bar.update(1)


def _made(use_tqdm: UseTqdm, **shape: Any) -> Any:
    if callable(use_tqdm):
        return use_tqdm(**shape)
    from tqdm.auto import tqdm

    return tqdm(**shape)
