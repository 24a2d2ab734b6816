"""Progress bars of `offline.LLM`: of loading, and of the prompts of a call. ``tqdm`` is imported when one is
shown."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias

from ..runtime.link.messages import Heartbeat, Phase
from .completion_batch import PromptTask

UseTqdm: TypeAlias = bool | Callable[..., Any]
"""Whether to show a bar, or what makes one in place of ``tqdm.auto.tqdm``."""


class LoadingBar:
    """The progress of loading a model, on a terminal alone. The first start on a machine compiles kernels."""

    def __init__(self) -> None:
        self._bar: Any = None

    def heard(self, beat: Heartbeat) -> None:
        """Show the progress that a heartbeat of the engine tells."""
        if beat.phase not in (Phase.LOADING, Phase.COMPILING):
            self.close()
        elif sys.stderr.isatty():
            if self._bar is None:
                shape = "{desc}{percentage:3.0f}%|{bar}| {elapsed}"
                self._bar = _made(True, total=1.0, bar_format=shape, leave=False)
            self._bar.set_description(beat.detail or "loading", refresh=False)
            self._bar.n = beat.fraction
            self._bar.refresh()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class PromptBar:
    """Prompts that have ended, of ``total``, and tokens per second so far. ``use_tqdm``: False shows no bar."""

    def __init__(self, use_tqdm: UseTqdm, total: int) -> None:
        shape = {"total": total, "desc": "Processed prompts", "dynamic_ncols": True}
        self._bar = _made(use_tqdm, **shape) if use_tqdm else None
        self._began = time.monotonic()
        self._read = self._written = 0

    def __enter__(self) -> PromptBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def ended(self, task: PromptTask) -> None:
        """A prompt has all its completions."""
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
