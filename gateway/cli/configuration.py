"""Where the settings of ``holdfast serve`` come from: the command line, the environment, a file, the default.

The first of them that names a setting counts. The file (``--config``) is TOML, with the names of the options
without the dashes in front: ``max-context = 4096`` or ``max_context = 4096``. The variable of an option is
``HOLDFAST_`` and its name. `ServeCommand` is the command that reads them; `printed` writes the result.
"""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

import msgspec
import typer
from typer.core import TyperCommand

from ...kvstore.log_lines import LogSettings
from ...kvstore.options import settings_of
from ...runtime.errors import RuntimeFault
from ...runtime.settings import EngineSettings
from ..errors import GatewayError
from ..settings import GatewaySettings, Network
from . import options
from .vllm_names import HINTS

PREFIX = "HOLDFAST"
MOST_FILE_BYTES = 1 << 20
KINDS = (GatewaySettings, Network, EngineSettings, LogSettings)
"""The settings that `serve` takes."""
SECRETS = {setting.name for kind in KINDS for setting in settings_of(kind) if setting.secret}
"""The names of settings that are secret: `printed` does not show their values."""
NO_SETTINGS = frozenset({"config", "print_config", "help"})
"""The names of options that a configuration file cannot set."""


class ServeCommand(TyperCommand):
    """The command ``serve``. It adds two error messages: for an option of vLLM's, what to do instead; for a
    wrong value from the file or the environment, where that value is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read argv, the environment and the file, as Typer's command does. Ends with exit code 2 and one line
        for what cannot be used."""
        known = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        for word in args[: args.index("--") if "--" in args else None]:
            name = word.partition("=")[0]
            if name not in known and (instead := HINTS.get(name)) is not None:
                options.refuse(f"{name}: {instead}")
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            source = None if error.param is None else origin(ctx, error.param.name or "")
            if source is None:
                raise
            options.refuse(f"{source}: {' '.join(error.message.split())}")


class ChatCommand(TyperCommand):
    """The command ``chat``: its ``--resume`` may stand alone, and then means the last session."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read argv, as Typer's command does."""
        if "--resume" in args:
            at = args.index("--resume") + 1
            if at == len(args) or args[at].startswith("-") or ":" in args[at]:  # an option, or the address
                args = [*args[:at], "last", *args[at:]]
        return super().parse_args(ctx, args)


def origin(context: typer.Context, name: str) -> str | None:
    """Where the value of a setting was written, if that is the file or the environment: ``FILE: KEY`` or the
    variable's name; None for the command line and defaults."""
    source = context.get_parameter_source(name)
    kind = "" if source is None else source.name
    if kind == "DEFAULT_MAP":
        return f"{context.params.get('config') or ''}: {name}"
    return f"{PREFIX}_{name.upper()}" if kind == "ENVIRONMENT" else None


@contextmanager
def refusing(context: typer.Context) -> Iterator[None]:
    """Leave the command with exit code 2 and one line if no valid settings can be made in the block. It names
    the lines at which the settings concerned are written, as far as these are in the file or the
    environment."""
    try:
        yield
    except (ValueError, GatewayError, RuntimeFault) as error:
        cause = str(error.args[0])
    else:
        return
    named = set(re.findall(r"^\w+|(?<![\w-])--[\w-]+", cause))  # the setting it begins with, and options
    lines = [
        line
        for param in context.command.params
        if named & {param.name, *param.opts} and (line := origin(context, param.name or "")) is not None
    ]
    options.refuse(f"{cause} ({', '.join(lines)})" if lines else cause)


# --- the file -----------------------------------------------------------------------------------------------


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """The callback of ``--config``: make the values of the file at ``path`` the defaults of all other options.
    Returns ``path``.

    Ends with exit code 2 and one line if the file cannot be read, or a key or a value in it is no valid
    setting.
    """
    if path is not None:
        context.default_map = _checked(context, path, _table(path))
    return path


def _table(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            options.refuse(f"{path} has more than {MOST_FILE_BYTES} bytes")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else str(error)
        options.refuse(f"{path}: {cause}")
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        options.refuse(f"{path}: {' '.join(str(error).split())}")


def _checked(context: typer.Context, path: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    """The values of ``table``, the content of the file at ``path``, by the names of the settings. Ends with
    exit code 2 if a key is no setting or a value is wrong."""
    params = {
        name.lstrip("-").replace("-", "_"): param.name or ""
        for param in context.command.params
        if param.name not in NO_SETTINGS
        for name in (*param.opts, param.name or "")
    }
    callback = context.command.callback
    assert callback is not None, "the command is a function"
    kinds = inspect.signature(callback, eval_str=True).parameters
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = params.get(key.replace("-", "_"))
        if name is None:
            options.refuse(f"{path}: {_unknown(key, list(params))}")
        if name in found:
            options.refuse(f"{path}: {key}: this setting is there twice")
        try:
            found[name] = _value(value, kinds[name].annotation.__origin__)
        except msgspec.ValidationError as error:
            options.refuse(f"{path}: {key}: {error}")
    return found


def _unknown(key: str, known: list[str]) -> str:
    instead = HINTS.get(f"--{key.replace('_', '-')}")
    close = get_close_matches(key.replace("-", "_"), known, 1)
    why = instead or (f"do you mean {close[0]}?" if close else "holdfast serve --help lists the options")
    return f"{key} is no setting: {why}"


def _value(value: Any, kind: Any) -> Any:
    """A value of the file, converted to ``kind``, the type of its option. A text may stand for a list of one,
    and a number for a size. Raises ``msgspec.ValidationError``."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    plain = next(one for one in kinds if one is not type(None))
    if plain is Path:
        plain = str
    if get_origin(plain) is list and isinstance(value, str):
        value = [value]
    if plain is str and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if get_origin(plain) is Literal and not isinstance(value, str):
        plain = str
    return msgspec.convert(value, plain)


# --- the result ---------------------------------------------------------------------------------------------


def printed(context: typer.Context, **resolved: Any) -> Iterator[str]:
    """All settings, each with its source, as lines of a file that ``--config`` accepts.

    ``resolved``: values to show instead of the options' own, because they were computed from several. A
    setting without a value, and a secret, is shown as a comment.
    """
    for param in context.command.params:
        name = param.name or ""
        if name in NO_SETTINGS:
            continue
        value = resolved.get(name, context.params[name])
        yield f"{_line(name, value)}  # {_source(context, name)}"


def _line(name: str, value: Any) -> str:
    if value is None or value == [] or value == ():
        return f"# {name} is not set"
    if name in SECRETS:
        return f"# {name} is set, and not shown"
    if isinstance(value, tuple):
        value = list(value)
    return f"{name} = {json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)}"


def _source(context: typer.Context, name: str) -> str:
    """Where the value of a setting comes from, as text: a file, a variable, ``command line`` or ``default``."""
    line = origin(context, name)
    if line is not None:
        return line.removesuffix(f": {name}")
    source = context.get_parameter_source(name)
    return "command line" if source is not None and source.name == "COMMANDLINE" else "default"
