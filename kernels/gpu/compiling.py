"""Reports when Triton compiles a kernel, as it does for the first call with new kinds of arguments."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from triton import knobs


def tell_compiling(begun: Callable[[str], None], ended: Callable[[], None]) -> None:
    """Call ``begun`` with a kernel's name before this thread compiles it or reads it from disk, and ``ended``
    after it.

    ``ended`` is not called if compiling fails. A second call replaces the first.
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
