"""The command line: ``holdfast serve | store | sessions | key | chat | demo | fetch | doctor | bench``.

It alone reads argv and the environment; everything below takes settings objects. A command imports what it
needs when it runs, so that ``--help`` is quick. Exit codes: 0 done, 1 it ran and failed, 2 it could not start.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from ... import __version__
from ...kvstore.log_lines import LogSettings
from ...kvstore.options import expanded, make
from ...runtime.settings import EngineSettings
from ..settings import DEFAULT_HOST, DEFAULT_PORT, GatewaySettings, Network
from . import configuration, options

SessionsAction = Literal["list", "show", "export", "close", "delete"]
StoreAction = Literal["stat", "verify", "gc", "clear", "repair", "backup", "erase"]

app = typer.Typer(name="holdfast", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _version(asked: bool) -> None:
    if asked:
        print(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def holdfast(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """An async streaming LLM inference engine. Its unit is the session."""


EVERY_OPTION = (
    "Each option has a variable in the environment, HOLDFAST_ and its name: HOLDFAST_MAX_CONTEXT; lists are"
    " separated by blanks. An option goes before its variable, that before --config, that before the default."
)


_option = partial(typer.Option, show_envvar=False)  # `EVERY_OPTION` says it
CONFIG = _option(
    callback=configuration.read_config, is_eager=True, help="A TOML file of options: `port = 8040`."
)
PRINT_CONFIG = _option("--print-config", help="Print all settings, each with where it comes from, and leave.")
NO_STORE = _option("--no-store", help="Keep sessions in memory only: they end with the server.")


@app.command(
    cls=configuration.ServeCommand,
    context_settings={"auto_envvar_prefix": configuration.PREFIX},
    epilog=EVERY_OPTION,
)
@options.of(*configuration.KINDS)
def serve(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            envvar="HOLDFAST_MODEL",
            show_envvar=False,
            help="A local folder, a GGUF file, a hub id, `pocket`, which ships with Holdfast, or `smollm2`.",
        ),
    ],
    config: Annotated[Path | None, CONFIG] = None,
    print_config: Annotated[bool, PRINT_CONFIG] = False,
    no_store: Annotated[bool, NO_STORE] = False,
    **given: Any,
) -> None:
    """Serve MODEL over the Realtime WebSocket protocol, its engine in a supervised process of its own."""
    from ...runtime.link.child import spawned_early

    folder = None if no_store else expanded(given["store"] or options.default_store(model))
    with configuration.refusing(context):
        settings = make(GatewaySettings, given, store=folder, network=make(Network, given))
        store, logs = None if folder is None else str(folder), make(LogSettings, given)
        engine = make(EngineSettings, given, model=model, store=store, logs=logs)
    if print_config:
        for line in configuration.printed(context, store=folder):
            print(line)
        return
    with spawned_early() as first:  # it imports torch beside what follows
        gc.disable()  # importing leaves next to none, and looking for it takes a sixth of the time
        try:
            from .serve import run
        finally:
            gc.enable()
        code = run(settings, engine, first)
    raise typer.Exit(code)


@app.command(cls=configuration.ChatCommand)
def chat(
    url: Annotated[
        str | None,
        typer.Argument(
            envvar="HOLDFAST_URL",
            help=f"Of a running server. Default: ws://{DEFAULT_HOST}:{DEFAULT_PORT}, or the resumed session's.",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[HANDLE]", help="Go on with a session: its handle, its id in /sessions, or the last one."
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option("--system", "--instructions", help="What the model is told before all turns."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: the model's own.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="The most tokens of a reply.")] = None,
    api_key: options.Key = None,
) -> None:
    """Talk with the model of a running server; Ctrl-C cuts a reply short, Ctrl-D leaves, /help lists commands.
    If stdin is a pipe or a file, each of its lines is a message or a command; a backslash at the end of a line
    goes on in the next. If stdout is no terminal, it gets the replies alone."""
    from .chat import run

    given = {"instructions": system, "temperature": temperature, "max_output_tokens": max_tokens}
    fields = {name: value for name, value in given.items() if value is not None}
    raise typer.Exit(run(url, api_key, resume, fields))  # type: ignore[arg-type]  # as `UpdateOptions` has them


@app.command()
def demo(
    voice: Annotated[
        bool,
        typer.Option(
            "--voice",
            help="A voice call: speech that is recognised piece by piece, and replies that are interrupted.",
        ),
    ] = False,
    model: Annotated[str, typer.Option(help="Another model, such as `smollm2`.")] = "pocket",
) -> None:
    """Start a server on a free port and converse over a real WebSocket, counting every token prefilled."""
    if voice and model != "pocket":
        options.refuse("--voice is a script for the pocket model: give no --model")
    if voice:
        from ...benchmarks.voice_demo import run as call

        raise typer.Exit(call())
    from .demo import run

    raise typer.Exit(run(model))


@app.command()
def fetch(
    model: Annotated[str, typer.Argument(help="smollm2: SmolLM2-135M-Instruct, 93 MB, Apache-2.0.")],
) -> None:
    """Download a small real model into the cache folder; `holdfast serve MODEL` then finds it."""
    from .fetch import run

    raise typer.Exit(run(model))


@app.command()
@options.of(EngineSettings)
def doctor(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="A model to look at as well.")] = None,
    keys: Annotated[
        Path | None, typer.Option(help="A keys file as for `serve`: the tenants' limits, checked.")
    ] = None,
    **given: Any,
) -> None:
    """Show device, versions, memory and its arithmetic, and the class of the model's chat template."""
    from .doctor import run

    with configuration.refusing(context):
        settings = None if model is None else make(EngineSettings, given, model=model)
    raise typer.Exit(run(settings, keys))


@app.command()
def store(
    act: Annotated[
        StoreAction,
        typer.Argument(
            help="stat counts; verify reads everything, drops damaged KV and names damaged sessions; gc frees "
            "space; clear removes all KV, no session; repair rewrites a damaged journal; backup copies the "
            "sessions to TARGET, or brings the copy there up to date, also while a server runs; erase removes "
            "all data of --tenant."
        ),
    ],
    folder: Annotated[
        Path | None, typer.Argument(help="The folder given to `serve --store`, or that `serve` names.")
    ] = None,
    target: Annotated[
        Path | None, typer.Argument(help="Of `backup`: a new folder, or one of an earlier run.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Of `erase`: the tenant's name in the keys file.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Of `erase`: the keys file, to see that it has this tenant.")
    ] = None,
) -> None:
    """Maintain what a server left on disk: sessions in the journal, and KV. No server may run on it, except for
    `backup`. Exit code 1: something is damaged."""
    from .store import keep

    if folder is None:
        options.refuse(f"which store? holdfast store {act} DIR, with the folder that `holdfast serve` names")
    if (act == "backup") != (target is not None):
        options.refuse("holdfast store backup DIR TARGET: it alone takes a second folder")
    if (act == "erase") != (tenant is not None):
        options.refuse("holdfast store erase DIR --tenant NAME: it alone takes a tenant")
    raise typer.Exit(keep(act, expanded(folder), target, tenant, keys))


@app.command()
def sessions(
    act: Annotated[
        SessionsAction,
        typer.Argument(
            help="list; show one with its latest items; export it as JSON lines, with which a client can begin "
            "a session on another server; close: end its connection and keep it; delete."
        ),
    ],
    session: Annotated[str | None, typer.Argument(help="The id that `list` shows.")] = None,
    target: Annotated[Path | None, typer.Argument(help="Of `export`: a new file; stdout by default.")] = None,
    url: Annotated[
        str, typer.Option(envvar="HOLDFAST_URL", help="Of a running server.")
    ] = f"ws://{DEFAULT_HOST}:{DEFAULT_PORT}",
    api_key: options.OperatorsKey = None,
    store: Annotated[
        Path | None, typer.Option(help="The folder of a server that does not run, instead of --url.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="With --store: the keys file, to name the tenants.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Of `list`: only those of this tenant.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help="Of `list`: at most so many sessions, all by default; of `show`: items, 20."
        ),
    ] = None,
    after: Annotated[
        str | None, typer.Option(help="Of `list`: only sessions behind this one, by its id.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Of `list` and `show`: JSON, a line each.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Of `delete`: do not ask.")] = False,
) -> None:
    """See, export, close and delete sessions, of a running server with an operator's key, or of a
    store."""
    from . import sessions as command

    if (act == "list") != (session is None):
        options.refuse("holdfast sessions list takes no SESSION; every other action takes one")
    if target is not None and act != "export":
        options.refuse("holdfast sessions export SESSION FILE: it alone takes a file")
    if keys is not None and store is None:
        options.refuse("--keys is for --store: a running server knows its tenants")
    folder = None if store is None else expanded(store)

    def where() -> command.SessionSource:
        if folder is None:
            return command.ServerSessions(url, api_key)
        return command.StoredSessions(folder, keys)

    def work(found: command.SessionSource) -> Iterator[str]:
        one = session or ""
        match act:
            case "list":
                return command.list_(found, limit, after, tenant, as_json=as_json)
            case "show":
                return command.show(found, one, 20 if limit is None else min(limit, 100), as_json=as_json)
            case "export":
                return command.export(found, one, target)
            case "close":
                return command.close(found, one)
            case "delete":
                return command.delete(found, one, sure=yes)

    raise typer.Exit(command.run(where, work))


@app.command()
def key(
    act: Annotated[
        Literal["new", "digest"],
        typer.Argument(
            help="new prints a fresh key and its line for the keys file; digest reads keys from stdin, one on "
            "a line, and prints their lines. The lines hold digests instead of the keys."
        ),
    ],
    tenant: Annotated[str, typer.Argument(help="The name of the keys' tenant.")],
) -> None:
    """Make API keys for `serve --keys`. No file is read or written."""
    from .key import run

    raise typer.Exit(run(act, tenant))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="Which benchmark: a module of holdfast.benchmarks, such as `pocket`.")
    ] = "--help",
) -> None:
    """Run one of the benchmarks; what follows its name goes to it (`bench NAME --help`)."""
    found = _benchmarks()
    if name == "--help":
        print(
            f"Usage: holdfast bench NAME [OPTIONS]\n\nNAME: {', '.join(sorted(found))}; each has its own --help"
        )
        return
    if name not in found:
        options.refuse(f"no benchmark is named {name!r}; there are {', '.join(sorted(found))}")
    signal.signal(signal.SIGTERM, _leave)  # so that the servers that it started end with it
    raise typer.Exit(import_module(found[name]).main(context.args))


def _leave(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> None:
    """Run the command line; the console script ``holdfast`` calls this."""
    app()


def _benchmarks() -> dict[str, str]:
    """The dotted module of each benchmark, by the benchmark's name. A benchmark is
    ``benchmarks/NAME/bench.py``, or a file ``benchmarks/NAME.py`` that has a ``main``."""
    home, package = Path(__file__).resolve().parents[2] / "benchmarks", __package__.partition(".")[0]
    files = (path for path in home.glob("*.py") if "\ndef main(" in path.read_text())
    alone = {path.stem: f"{package}.benchmarks.{path.stem}" for path in files}
    folders = {path.parent.name for path in home.glob("*/bench.py")}
    return {**alone, **{name: f"{package}.benchmarks.{name}.bench" for name in folders}}
