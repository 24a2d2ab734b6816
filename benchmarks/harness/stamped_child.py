"""An engine process that logs when it sampled a certain token: for each time a line of nanoseconds, by
CLOCK_MONOTONIC.

``python -m holdfast.benchmarks.harness.stamped_child TOKEN FILE --fd N --crash-report M``
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

MODULE = "holdfast.benchmarks.harness.stamped_child"


def program(token: int, file: Path) -> Sequence[str]:
    return (sys.executable, "-m", MODULE, str(token), str(file))


def main(token: int, file: Path) -> int:
    """Serve as the engine's process does, and write a line into ``file`` for each step that has sampled
    ``token``."""
    from holdfast.runtime import __main__, build
    from holdfast.runtime.link.engine_end import LoadedEngine
    from holdfast.runtime.verbs import AnyVerb, Step

    load_engine = build.load_engine

    class Stamped:
        """Wraps the engine, and logs the steps that have sampled the token."""

        def __init__(self, engine: Any) -> None:
            self._engine = engine

        def apply(self, verb: AnyVerb) -> Any:
            return self._engine.apply(verb)

        def step(self) -> Step | None:
            """Run a step. If it has sampled the token, log the time at its end."""
            done: Step | None = self._engine.step()
            if done is not None and any(token in row.tokens for row in done.rows):
                with file.open("a", encoding="ascii") as stamps:
                    stamps.write(f"{time.monotonic_ns()}\n")
            return done

    def load(*given: Any) -> LoadedEngine:
        loaded = load_engine(*given)
        return replace(loaded, engine=Stamped(loaded.engine))

    vars(build)["load_engine"] = load
    del sys.argv[1:3]
    return __main__.main()


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), Path(sys.argv[2])))
