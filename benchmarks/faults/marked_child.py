"""An engine process that dies or hangs when it computes a marked token.

``python -m holdfast.benchmarks.faults.marked_child WHAT TOKEN FLAG --fd N --crash-report M``. WHAT: ``exit``
ends the process in each step that computes TOKEN; ``hang`` creates the file FLAG and waits for ever, if there
is no such file.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

EXIT_CODE = 9
MODULE = "holdfast.benchmarks.faults.marked_child"


def program(what: str, token: int = -1, flag: str | Path = "none") -> Sequence[str]:
    return (sys.executable, "-m", MODULE, what, str(token), str(flag))


def main(what: str, token: int, flag: Path) -> int:
    """Serve as the engine's process does, with a runner that ends or hangs as the module says. ``what``:
    ``exit`` or ``hang``."""
    from holdfast.runtime import __main__, build
    from holdfast.runtime.execution.runner import TorchHandle, TorchRunner
    from holdfast.runtime.plan import Plan

    class MarkedRunner(TorchRunner):
        """Computes as usual, except for the step in which it ends the process or hangs."""

        def launch(self, plan: Plan) -> TorchHandle:
            if what == "exit" and token in plan.tokens:
                os._exit(EXIT_CODE)
            if what == "hang" and not flag.exists():
                self.hang_for_ever()
            return super().launch(plan)

        def hang_for_ever(self) -> None:
            flag.touch()
            threading.Event().wait()

    vars(build)["TorchRunner"] = MarkedRunner
    del sys.argv[1:4]
    return __main__.main()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
