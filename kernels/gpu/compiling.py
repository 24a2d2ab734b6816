"""Who is told when Triton compiles: a kernel that gets arguments of a new kind keeps its caller waiting.

Knows no kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from triton import knobs


def tell_compiling(begun: Callable[[str], None], ended: Callable[[], None]) -> None:
    """From now on, of what this thread calls: ``begun`` gets a kernel's name before it is compiled or read from
    disk, ``ended`` is called when it can run; not where that fails. Whoever was told before is told no more.
    """
    caller = threading.get_ident()

    def before(*, fn: Any, **_: Any) -> None:
        if threading.get_ident() == caller:
            begun(fn.name)

    def behind(**_: Any) -> None:
        if threading.get_ident() == caller:
            ended()

    knobs.runtime.jit_cache_hook = before
    knobs.runtime.jit_post_compile_hook = behind
