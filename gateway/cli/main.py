"""The command line: ``holdfast serve | store | chat | demo | doctor | bench``.

The one place that reads argv and the environment; everything below takes settings objects. Imports what a
command needs when it runs, so that ``--help`` costs nothing. Exit codes: 0 done, 1 it ran and failed, 2 it
could not start.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from enum import StrEnum
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from ...runtime.errors import RuntimeFault
from ...runtime.settings import EngineSettings
from ...sessions.tools.formats import CallForm, ReasoningForm
from ..errors import NetworkInvalid
from ..quotas import bytes_of
from ..settings import DEFAULT_HOST, DEFAULT_PORT, GatewaySettings, Network


class Upkeep(StrEnum):
    """What can be done with a store."""

    STAT = "stat"
    VERIFY = "verify"
    GC = "gc"
    CLEAR = "clear"
    REPAIR = "repair"
    BACKUP = "backup"
    ERASE = "erase"


app = typer.Typer(
    name="holdfast",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str, typer.Argument(help="A local folder, a hub id, or `pocket`, the model that ships with Holdfast.")
]
Key = Annotated[
    str | None, typer.Option("--api-key", envvar="HOLDFAST_API_KEY", help="Bearer key of the server.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto.")]
KVDtype = Annotated[str, typer.Option("--kv-dtype", help="float8_e4m3fn, or auto: as the model computes.")]
KVScales = Annotated[
    str, typer.Option("--kv-scales", help="Of keys and values, powers of two such as 1,0.125: for 8-bit KV.")
]
Backend = Annotated[
    str,
    typer.Option(
        "--kernels", help="reference, cpu, triton, triton-invariant, or auto: the fastest there is."
    ),
]
Bytes = Annotated[str | None, typer.Option("--kv-bytes", help="Memory for KV, such as 512MiB or 8GiB.")]
HostBytes = Annotated[
    str | None,
    typer.Option("--host-bytes", help="Memory for KV below the device; 0 for none, a share by default."),
]
Context = Annotated[
    int | None, typer.Option(min=1, help="Longest sequence in tokens; the model's own by default.")
]
Store = Annotated[
    Path | None,
    typer.Option(
        envvar="HOLDFAST_STORE",
        help="Folder of the journal that sessions outlive the server in; by default one per model under the "
        "user's state folder.",
    ),
]
OperatorKey = Annotated[
    str | None,
    typer.Option(
        "--operator-key", envvar="HOLDFAST_OPERATOR_KEY", help="Bearer key that sees all of /metrics."
    ),
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(help="A name by which the server may be asked (Host): NAME, *.NAME or *; may be repeated."),
]
TrustedProxies = Annotated[
    list[str] | None,
    typer.Option(help="Addresses or networks, by commas, whose X-Forwarded-For, -Proto and -Host count."),
]
RootPath = Annotated[str, typer.Option(help="The prefix below which a proxy serves it, such as /holdfast.")]
Certificate = Annotated[Path | None, typer.Option(help="TLS certificate chain in PEM.")]
PrivateKey = Annotated[Path | None, typer.Option(help="Its private key, if not in the same file.")]
PrivateKeyPassword = Annotated[
    str | None,
    typer.Option(envvar="HOLDFAST_SSL_KEYFILE_PASSWORD", help="Password of the private key."),
]


AUTO: Literal["auto"] = "auto"
CallChoice = Literal["auto", "hermes", "llama3-json", "mistral", "pythonic"]
ReasoningChoice = Literal["auto", "none", "think", "think-opened"]


def _version(asked: bool) -> None:
    if asked:
        print(f"holdfast {metadata.version('holdfast')}")
        raise typer.Exit


@app.callback()
def holdfast(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """An async streaming LLM inference engine whose unit is the session."""


@app.command()
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = DEFAULT_HOST,
    port: Annotated[
        int, typer.Option(envvar="HOLDFAST_PORT", min=0, max=65535, help="0 takes a free one.")
    ] = DEFAULT_PORT,
    api_key: Key = None,
    keys: Annotated[
        Path | None,
        typer.Option(help="Keys and tenants: `KEY TENANT` on each line, or TOML with limits (README)."),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_bytes: Bytes = None,
    host_bytes: HostBytes = None,
    max_context: Context = None,
    kernels: Backend = "auto",
    kv_dtype: KVDtype = "auto",
    kv_scales: KVScales = "1,1",
    max_step_tokens: Annotated[int, typer.Option(min=1, help="Tokens computed by one step.")] = 512,
    max_sequences: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 64,
    store: Store = None,
    disk_bytes: Annotated[
        str | None,
        typer.Option(
            "--disk-bytes", help="KV that the store may hold while its disk has room; a share of that."
        ),
    ] = None,
    no_store: Annotated[
        bool, typer.Option("--no-store", help="Keep sessions in memory only: they end with the server.")
    ] = False,
    tool_call_parser: Annotated[CallChoice, typer.Option(help="How the model writes tool calls.")] = AUTO,
    reasoning_parser: Annotated[
        ReasoningChoice, typer.Option(help="How it writes its reasoning, which is told apart.")
    ] = AUTO,
    operator_key: OperatorKey = None,
    allowed_host: AllowedHost = None,
    trusted_proxies: TrustedProxies = None,
    root_path: RootPath = "",
    ssl_certfile: Certificate = None,
    ssl_keyfile: PrivateKey = None,
    ssl_keyfile_password: PrivateKeyPassword = None,
) -> None:
    """Serve MODEL over the Realtime WebSocket protocol, its engine in a supervised process of its own."""
    from ..server import run

    folder = None if no_store else (store or _default_store(model)).expanduser()
    settings = _gateway_settings(host, port, api_key, keys, folder, tool_call_parser, reasoning_parser)
    network = _network(
        allowed_host, trusted_proxies, root_path, ssl_certfile, ssl_keyfile, ssl_keyfile_password
    )
    settings = replace(settings, operator_key=operator_key, network=network)
    engine = _engine_settings(
        model,
        device,
        dtype,
        kv_bytes,
        max_context,
        host_bytes=host_bytes,
        kernels=kernels,
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
        store=None if folder is None else str(folder),
        disk_bytes=disk_bytes,
        max_step_tokens=max_step_tokens,
        max_sequences=max_sequences,
    )
    raise typer.Exit(run(settings, engine))


@app.command()
def chat(
    url: Annotated[str, typer.Argument(help="Of a running server.")] = f"ws://{DEFAULT_HOST}:{DEFAULT_PORT}",
    instructions: Annotated[str, typer.Option(help="What the model is told before the first turn.")] = "",
    api_key: Key = None,
) -> None:
    """Talk with the model of a running server; Ctrl-C cuts a reply short, Ctrl-D leaves."""
    from .chat import run

    raise typer.Exit(run(url, instructions, api_key))


@app.command()
def demo(
    voice: Annotated[
        bool, typer.Option("--voice", help="A call: speech that is recognised piece by piece, and cut in.")
    ] = False,
) -> None:
    """Start a server on a free port and converse over a real WebSocket, counting every token prefilled."""
    if voice:
        from .voice_demo import run as call

        raise typer.Exit(call())
    from .demo import run

    raise typer.Exit(run())


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(help="A model to look at as well.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_bytes: Bytes = None,
    host_bytes: HostBytes = None,
    max_context: Context = None,
    kernels: Backend = "auto",
    kv_dtype: KVDtype = "auto",
    kv_scales: KVScales = "1,1",
    keys: Annotated[
        Path | None, typer.Option(help="A keys file as for `server`: the tenants' limits, checked.")
    ] = None,
) -> None:
    """Show device, versions, memory and its arithmetic, and the class of the model's chat template."""
    from .doctor import run

    settings = (
        None
        if model is None
        else _engine_settings(
            model,
            device,
            dtype,
            kv_bytes,
            max_context,
            host_bytes=host_bytes,
            kernels=kernels,
            kv_dtype=kv_dtype,
            kv_scales=kv_scales,
        )
    )
    raise typer.Exit(run(settings, keys))


@app.command()
def store(
    act: Annotated[
        Upkeep,
        typer.Argument(
            help="stat counts; verify reads everything, drops damaged KV and names damaged sessions; gc gives "
            "room back; clear removes all KV, no session; repair writes a damaged journal anew; backup copies "
            "the sessions to TARGET, also beside a server; erase removes all that is of --tenant."
        ),
    ],
    folder: Annotated[
        Path | None, typer.Argument(help="The folder given to `serve --store`, or that `server` names.")
    ] = None,
    target: Annotated[Path | None, typer.Argument(help="Of `backup`: a new folder.")] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Of `erase`: the tenant's name in the keys file.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Of `erase`: the keys file, to see that it has this tenant.")
    ] = None,
) -> None:
    """Look after what a server left on disk: sessions in the journal, and KV. No server may hold it, but for
    `backup`. Exit code 1: something is damaged."""
    from .store import keep

    if folder is None:
        _refuse(f"which store? holdfast store {act.value} DIR, with the folder that `holdfast serve` names")
    if (act is Upkeep.BACKUP) != (target is not None):
        _refuse("holdfast store backup DIR TARGET: it alone takes a second folder")
    if (act is Upkeep.ERASE) != (tenant is not None):
        _refuse("holdfast store erase DIR --tenant NAME: it alone takes a tenant")
    raise typer.Exit(keep(act.value, folder.expanduser(), target, tenant, keys))


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
        _refuse(f"no benchmark is named {name!r}; there are {', '.join(sorted(found))}")
    signal.signal(signal.SIGTERM, _leave)  # the servers that it started end with it
    raise typer.Exit(import_module(found[name]).main(context.args))


def _leave(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> None:
    """The console script ``holdfast``."""
    app()


def _gateway_settings(
    host: str,
    port: int,
    api_key: str | None,
    keys: Path | None,
    store: Path | None,
    calls: CallChoice,
    reasoning: ReasoningChoice,
) -> GatewaySettings:
    if keys is not None and api_key is not None:
        _refuse("--keys and --api-key both say who may come in: give one of them")
    return GatewaySettings(
        host=host,
        port=port,
        api_key=api_key,
        keys=keys,
        store=store,
        calls=None if calls == AUTO else CallForm(calls),
        reasoning=None if reasoning == AUTO else ReasoningForm(reasoning),
    )


def _network(
    hosts: list[str] | None,
    proxies: list[str] | None,
    root_path: str,
    certificate: Path | None,
    private_key: Path | None,
    password: str | None,
) -> Network:
    try:
        return Network(
            allowed_hosts=tuple(hosts or ()),
            trusted_proxies=tuple(one.strip() for word in proxies or () for one in word.split(",")),
            root_path=root_path.rstrip("/"),
            certificate=certificate,
            private_key=private_key,
            private_key_password=password,
        )
    except NetworkInvalid as error:
        _refuse(error.message)


def _engine_settings(
    model: str,
    device: str,
    dtype: str,
    kv_bytes: str | None,
    max_context: int | None,
    host_bytes: str | None = None,
    kernels: str = "auto",
    kv_dtype: str = "auto",
    kv_scales: str = "1,1",
    store: str | None = None,
    disk_bytes: str | None = None,
    max_step_tokens: int = 512,
    max_sequences: int = 64,
) -> EngineSettings:
    try:
        return EngineSettings(
            model=model,
            device=device,
            dtype=dtype,
            kv_bytes=None if kv_bytes is None else _bytes("--kv-bytes", kv_bytes),
            host_bytes=None if host_bytes is None else _bytes("--host-bytes", host_bytes),
            store=store,
            disk_bytes=None if disk_bytes is None else _bytes("--disk-bytes", disk_bytes),
            max_context=max_context,
            kernels=kernels,
            kv_dtype=kv_dtype,
            kv_scales=_scales(kv_scales),
            max_step_tokens=max_step_tokens,
            max_sequences=max_sequences,
        )
    except RuntimeFault as fault:
        _refuse(fault.message)


def _scales(text: str) -> tuple[float, float]:
    try:
        key, value = (float(one) for one in text.split(","))
    except ValueError:
        _refuse(f"--kv-scales: '{text}' is not two numbers such as 1,0.125")
    return key, value


def _default_store(model: str) -> Path:
    """``$XDG_STATE_HOME/holdfast/<model>``, by default under ``~/.local/state``."""
    from ..compose import model_name

    state = os.environ.get("XDG_STATE_HOME", "")
    root = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return root / "holdfast" / model_name(model).replace("/", "--")


def _bytes(option: str, text: str) -> int:
    """``8GiB``, ``512 MiB``, ``4096``: a size in bytes."""
    try:
        return bytes_of(text)
    except ValueError as error:
        _refuse(f"{option} {error}")


def _refuse(cause: str) -> NoReturn:
    print(f"holdfast: {cause}", file=sys.stderr)
    raise typer.Exit(2)


def _benchmarks() -> dict[str, str]:
    """Names of benchmarks, and the modules that hold them: ``benchmarks/NAME/bench.py`` or ``NAME.py``."""
    home, package = Path(__file__).resolve().parents[2] / "benchmarks", __package__.partition(".")[0]
    alone = {path.stem: f"{package}.benchmarks.{path.stem}" for path in home.glob("*.py") if _can_run(path)}
    folders = {path.parent.name for path in home.glob("*/bench.py")}
    return {**alone, **{name: f"{package}.benchmarks.{name}.bench" for name in folders}}


def _can_run(path: Path) -> bool:
    return "\ndef main(" in path.read_text()
