"""What the operator sees while a model loads: a bar, on a terminal alone. Fed by heartbeats."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from ..runtime.link.messages import Heartbeat, Phase


class Loading:
    """A progress bar on stderr from the first heartbeat until the model is loaded."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("starting the engine", total=1.0)

    def __enter__(self) -> Loading:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def heard(self, beat: Heartbeat) -> None:
        """Show how far it is."""
        if beat.phase in (Phase.LOADING, Phase.COMPILING):
            self._progress.update(self._task, description=beat.detail or "loading", completed=beat.fraction)

    def loaded(self, line: str) -> None:
        """Take the bar away and say where the server is."""
        self._progress.stop()
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
