"""The progress of loading a model: a bar on a terminal, elsewhere a log line for each phase."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from ...runtime.link.messages import Heartbeat, Phase

log = logging.getLogger(__name__)

LINE_SHARE = 0.25
"""Where there is no terminal, a phase of loading gets another log line after each such part of it."""


class Loading(Progress):
    """Shows on stderr, or on ``console``, what the engine loads and how much of that is done. Use it in a
    ``with`` block: a bar is shown there on a terminal, log lines elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._bar = self.add_task("starting the engine", total=1.0)
        self._loaded = False
        self._told = ("", 0.0)  # the last line's phase, and its share

    def heard(self, beat: Heartbeat) -> None:
        """Called with each heartbeat of the engine: shows the progress of loading that it reports."""
        if self._loaded or beat.phase not in (Phase.LOADING, Phase.COMPILING):
            return
        detail = beat.detail or "loading"
        if not self.disable:
            self.update(self._bar, description=detail, completed=beat.fraction)
            return
        phase, share = detail.partition(" ")[0], beat.fraction
        if phase != self._told[0] or share >= self._told[1] + LINE_SHARE:
            self._told = phase, share
            log.info("%s", f"{detail} ({share:.0%})" if share else detail)

    def loaded(self) -> None:
        """Called when the engine is loaded: removes the bar and shows nothing more."""
        self._loaded = True
        self.stop()
