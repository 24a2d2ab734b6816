"""Options: the settings that an operator can write. The field of a settings object declares one:

    port: Annotated[int, Option(least=0, most=65535)] = 8040
    '''0 takes a free one.'''

From it come the option of the command line, of which the text below is the help, its variable in the
environment, its key in a file, the check of what is written, and the field's value. It stands in the lowest
room, which all rooms that have settings can import.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

T = TypeVar("T")

MOST_BYTES = 1 << 63
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<prefix>[kmgt]?)(i?b)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """How a field of settings is written. A field that ends with ``_bytes`` is written as a size: ``8GiB``.

    ``name``: if it is not the field's; ``also``: another name, vLLM's. ``least``, ``most``: bounds of a number.
    ``choices``: all texts that it may be. ``words``: the field's value by what is written for it, where that
    differs. ``form``: what a list of numbers looks like.
    """

    name: str = ""
    also: str = ""
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()
    words: Mapping[Any, Any] = field(default_factory=dict)
    form: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of ``kind`` that is an option. ``name``: the option's, with ``_``. ``type``: the field's, without
    None. ``default``: of the field. ``secret``: it is not shown, as the field is not in the settings'
    ``repr``."""

    kind: Callable[..., Any]
    field: str
    name: str
    type: Any
    default: Any
    option: Option
    secret: bool

    @property
    def help(self) -> str:
        """The text below the field, in one line; empty if there is none."""
        return _texts(self.kind).get(self.field, "")

    @property
    def written_type(self) -> Any:
        """The type of what is written: a number, a text, a path, a flag, one of some texts, or a list."""
        texts = tuple(word for word in self.option.words if isinstance(word, str))
        if choices := (*texts, *map(str, self.type)) if self._is_enum else (*self.option.choices, *texts):
            return Literal[choices]
        if True in self.option.words:
            return bool
        if get_origin(self.type) is tuple:
            return list[str] if str in get_args(self.type) else str
        return str if self._is_size else self.type

    @property
    def written_default(self) -> Any:
        """What stands for the default; None: nothing does."""
        words = (word for word, value in self.option.words.items() if value == self.default)
        if (word := next(words, None)) is not None:
            return word
        if isinstance(self.default, tuple):
            return ",".join(f"{number:g}" for number in self.default) or None
        return self.default

    def read(self, written: Any) -> Any:
        """The field's value for what is ``written``; None: nothing is. Raises ``ValueError``."""
        flag = f"--{self.name.replace('_', '-')}"
        if written is None:
            return self.default
        if self.option.words and written in self.option.words:
            return self.option.words[written]
        if isinstance(written, list):
            return tuple(written)
        if self._is_size:
            try:
                return bytes_of(written)
            except ValueError as error:
                raise ValueError(f"{flag} {error}") from None
        if get_origin(self.type) is tuple:
            try:
                return msgspec.convert(written.replace(",", " ").split(), self.type, strict=False)
            except msgspec.ValidationError:
                raise ValueError(f"{flag}: {written!r} is not {self.option.form}") from None
        return self.type(written) if self._is_enum else written

    @property
    def _is_size(self) -> bool:
        return self.field.endswith("_bytes")

    @property
    def _is_enum(self) -> bool:
        return isinstance(self.type, type) and issubclass(self.type, StrEnum)


@cache
def settings_of(kind: Callable[..., Any]) -> tuple[Setting, ...]:
    """The fields of a class of settings that are options."""
    hidden = {one.name for one in fields(kind) if not one.repr} if is_dataclass(kind) else set()
    defaults, found = inspect.signature(kind).parameters, []
    for field_, hint in get_type_hints(kind, include_extras=True).items():
        for option in getattr(hint, "__metadata__", ()):
            setting = Setting(
                kind=kind,
                field=field_,
                name=option.name or field_,
                type=get_args(hint.__origin__ | None)[0],
                default=defaults[field_].default,
                option=option,
                secret=field_ in hidden,
            )
            found.append(setting)
    return tuple(found)


@cache
def _texts(kind: Callable[..., Any]) -> dict[str, str]:
    """The texts below the fields of a class, which Python itself drops: they are read from its source."""
    tree, found = ast.parse(inspect.getsource(sys.modules[kind.__module__])), {}
    for one in tree.body:
        if isinstance(one, ast.ClassDef) and one.name == kind.__name__:
            for declared, text in pairwise(one.body):
                if isinstance(declared, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[ast.unparse(declared.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


def make(kind: Callable[..., T], written: Mapping[str, Any], **others: Any) -> T:
    """Settings of what is ``written`` for each option, by its name, and of ``others``, by their fields. Raises
    ``ValueError`` for what cannot be read, and what the settings raise."""
    read = {one.field: one.read(written[one.name]) for one in settings_of(kind)}
    return kind(**{**read, **others})


def invalid(settings: object) -> str:
    """A line about a value in ``settings`` that its option does not allow; empty if there is none."""
    kind: Callable[..., Any] = type(settings)
    for one in settings_of(kind):
        value, option = getattr(settings, one.field), one.option
        if option.choices and value not in (*option.choices, one.default):
            return f"{one.name} is {value!r}, not one of {', '.join(option.choices)}"
        if value is not None and option.least is not None and value < option.least:
            return f"{one.name} is {value}, less than {option.least}"
        if value is not None and option.most is not None and value > option.most:
            return f"{one.name} is {value}, more than {option.most}"
    return ""


def expanded(path: str | Path) -> Path:
    """The path with the home folder for ``~``, or a user's for ``~user``; that of an unknown user stays as it
    is written."""
    return Path(os.path.expanduser(path))


def bytes_of(text: str) -> int:
    """Read a size, such as ``8GiB``, ``512 MiB`` or ``4096``, as a number of bytes. All units are powers of
    1024. Raises ``ValueError``."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 8GiB")
    size = float(found["number"]) * 1024 ** " kmgt".index(found["prefix"].lower() or " ")
    if size >= MOST_BYTES:
        raise ValueError(f"{text!r} is more bytes than any machine has")
    return int(size)
