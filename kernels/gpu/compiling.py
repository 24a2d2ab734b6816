"""Who is told when Triton compiles: a kernel that gets arguments of a new kind keeps its caller waiting.

Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import knobs


def tell_compiling(begun: Callable[[str], None], ended: Callable[[], None]) -> None:
    """From now on, in this process: ``begun`` gets a kernel's name before it is compiled or read from disk,
    ``ended`` is called when it can run; not where that fails.
    """

    def before(*, fn: Any, **_: Any) -> None:
        begun(fn.name)

    def behind(**_: Any) -> None:
        ended()

    knobs.runtime.jit_cache_hook = before
    knobs.runtime.jit_post_compile_hook = behind
