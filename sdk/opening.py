"""Clients and sessions that are opened by `async with` or `with`, and say so when they are used without it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar

from .errors import NotEntered

_Opened = TypeVar("_Opened", covariant=True)
_P = ParamSpec("_P")


class _NotOpened:
    """What is made and not opened yet. Each use of it but the one that opens it raises `NotEntered`, with the
    line ``written``, which opens it."""

    def __init__(self, written: str) -> None:
        self.written = written

    def _refuse(self) -> NoReturn:
        raise NotEntered(f"This is not open yet: write `{self.written}` and use that name in the block")

    if not TYPE_CHECKING:  # a type checker knows by itself that these are not there

        def __getattr__(self, name: str):
            if name.startswith("_"):  # Python and debuggers ask for such names
                raise AttributeError(name)
            self._refuse()

        def __await__(self):
            self._refuse()

        def __enter__(self):
            self._refuse()

        def __aenter__(self):
            self._refuse()

        def __exit__(self, *error):
            return None

        async def __aexit__(self, *error):
            return None


class AsyncOpening(_NotOpened, AbstractAsyncContextManager[_Opened], Generic[_Opened]):
    """A client or a session for ``async with``, which opens it and closes it at the end of the block."""

    def __init__(self, manager: AbstractAsyncContextManager[_Opened], written: str) -> None:
        super().__init__(written)
        self._manager = manager

    async def __aenter__(self) -> _Opened:
        return await self._manager.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._manager.__aexit__(*error)


class SyncOpening(_NotOpened, AbstractContextManager[_Opened], Generic[_Opened]):
    """A client or a session for ``with``, which opens it and closes it at the end of the block. ``opening``:
    what ``manager`` opens by ``async with``."""

    def __init__(self, manager: AbstractContextManager[_Opened], opening: AsyncOpening[Any]) -> None:
        super().__init__(opening.written.removeprefix("async "))
        self._manager = manager

    def __enter__(self) -> _Opened:
        return self._manager.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._manager.__exit__(*error)


def opens_async(
    written: str,
) -> Callable[[Callable[_P, AsyncIterator[_Opened]]], Callable[_P, AsyncOpening[_Opened]]]:
    """As `contextlib.asynccontextmanager`; what the function returns is an `AsyncOpening`. ``written``: the
    line that opens it."""

    def decorated(function: Callable[_P, AsyncIterator[_Opened]]) -> Callable[_P, AsyncOpening[_Opened]]:
        manager = asynccontextmanager(function)
        return wraps(function)(lambda *args, **named: AsyncOpening(manager(*args, **named), written))

    return decorated
