"""The options that settings declare, as those of a command; and options that several commands have."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from ...kvstore.options import Setting, settings_of

F = TypeVar("F", bound=Callable[..., None])

Key = Annotated[str | None, typer.Option(envvar="HOLDFAST_API_KEY", help="Bearer key of the server.")]
OperatorsKey = Annotated[
    str | None,
    typer.Option(envvar="HOLDFAST_API_KEY", help="An operator's key, if the server has keys."),
]


def of(*kinds: type) -> Callable[[F], F]:
    """Give a command the options of these classes of settings. It gets what is written for them, by their
    names, as its other keyword arguments; `make` makes settings of it."""

    def given(command: F) -> F:
        own = inspect.signature(command, eval_str=True).parameters.values()
        named = [one for one in own if one.kind is not one.VAR_KEYWORD]
        declared = [_parameter(setting, kind.__name__) for kind in kinds for setting in settings_of(kind)]
        command.__signature__ = inspect.Signature([*named, *declared])  # type: ignore[attr-defined]
        return command

    return given


def _parameter(setting: Setting, group: str) -> inspect.Parameter:
    option, kind, default = setting.option, setting.written_type, setting.written_default
    flags = [f"--{name.replace('_', '-')}" for name in (setting.name, option.also) if name]
    if default is True:
        flags = [f"{flags[0]}/{flags[0].replace('--', '--no-')}"]
    bounds: dict[str, Any] = {"min": option.least, "max": option.most} if kind in (int, float) else {}
    panel = f"Options: {group.removesuffix('Settings').lower()}"
    typed = typer.Option(*flags, help=setting.help, rich_help_panel=panel, show_envvar=False, **bounds)
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind if default is not None else kind | None, typed],
    )


def refused(cause: str) -> int:
    """Print on stderr why a command cannot do its work. Returns the exit code 2."""
    print(f"holdfast: {cause}", file=sys.stderr)
    return 2


def refuse(cause: str) -> NoReturn:
    """Print on stderr why a command cannot start, and leave it with exit code 2."""
    raise typer.Exit(refused(cause))


def state_folder() -> Path:
    """The folder for what outlives a command: ``holdfast`` in ``$XDG_STATE_HOME``, by default in
    ``~/.local/state``."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "holdfast"


def default_store(model: str) -> Path:
    """The folder that is a model's store if none is given."""
    from ...runtime.model.folder import model_name

    return state_folder() / model_name(model).replace("/", "--")
