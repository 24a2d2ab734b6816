"""The progress of loading a model: a bar on a terminal, elsewhere a line for each phase. Heartbeats feed it."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from ...runtime.link.messages import Heartbeat, Phase

LINE_SHARE = 0.25
"""The share of a phase after which a further line tells of it."""


class Loading:
    """Shows on stderr what is loaded, and how far it is."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("starting the engine", total=1.0)
        self._loaded = False
        self._told = ("", 0.0)  # the last line's phase, and its share

    def __enter__(self) -> Loading:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begun(self, line: str) -> None:
        """Show what is about to be loaded."""
        self._print(line)

    def heard(self, beat: Heartbeat) -> None:
        """Show the progress that a heartbeat tells."""
        if self._loaded or beat.phase not in (Phase.LOADING, Phase.COMPILING):
            return
        detail = beat.detail or "loading"
        if self._console.is_terminal:
            self._progress.update(self._task, description=detail, completed=beat.fraction)
            return
        phase, share = detail.partition(" ")[0], beat.fraction
        if phase != self._told[0] or share >= self._told[1] + LINE_SHARE:
            self._told = phase, share
            self._print(f"holdfast: {detail} ({share:.0%})" if share else f"holdfast: {detail}")

    def loaded(self, line: str) -> None:
        """Remove the bar and show what was loaded."""
        self._loaded = True
        self._progress.stop()
        self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
