"""The options of the command line, and the settings that they become."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from ...runtime.errors import RuntimeFault
from ...runtime.settings import EngineSettings
from ..errors import NetworkInvalid
from ..quotas import bytes_of
from ..settings import GatewaySettings, Network

AUTO: Literal["auto"] = "auto"
CallChoice = Literal["auto", "hermes", "llama3-json", "mistral", "pythonic"]
ReasoningChoice = Literal["auto", "none", "think", "think-opened"]

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
        help="Folder of the journal, in which sessions outlive the server; by default one per model under the "
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
    typer.Option(help="A name of the server in the Host header: NAME, *.NAME or *; may be repeated."),
]
AllowOrigin = Annotated[
    list[str] | None,
    typer.Option(
        help="An origin of pages that may connect without a key: SCHEME://HOST[:PORT] or *; may be repeated."
    ),
]
TrustedProxies = Annotated[
    list[str] | None,
    typer.Option(
        help="Addresses or networks, separated by commas: their X-Forwarded-For, -Proto and -Host count."
    ),
]
RootPath = Annotated[
    str, typer.Option(help="The prefix below which a proxy serves this server, such as /holdfast.")
]
Certificate = Annotated[Path | None, typer.Option(help="TLS certificate chain in PEM.")]
PrivateKey = Annotated[Path | None, typer.Option(help="Its private key, if not in the same file.")]
PrivateKeyPassword = Annotated[
    str | None,
    typer.Option(envvar="HOLDFAST_SSL_KEYFILE_PASSWORD", help="Password of the private key."),
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(envvar="HOLDFAST_PORT", min=0, max=65535, help="0 takes a free one.")]
KeysFile = Annotated[
    Path | None,
    typer.Option(help="Keys and tenants: `KEY TENANT` on each line, or TOML with limits (README)."),
]
StepTokens = Annotated[int, typer.Option(min=1, help="Tokens computed by one step.")]
Sequences = Annotated[int, typer.Option(min=1, help="Sequences that run at once.")]
DiskBytes = Annotated[
    str | None,
    typer.Option("--disk-bytes", help="KV that the store may hold while its disk has room; a share of that."),
]
NoStore = Annotated[
    bool, typer.Option("--no-store", help="Keep sessions in memory only: they end with the server.")
]
CallParser = Annotated[CallChoice, typer.Option(help="How the model writes tool calls.")]
ReasoningParser = Annotated[
    ReasoningChoice, typer.Option(help="How the model writes its reasoning, which is sent separately.")
]

ToolFallback = Annotated[
    bool,
    typer.Option(
        "--tool-fallback",
        help="If the model's template does not show tools, write them into the instructions.",
    ),
]


def refuse(cause: str) -> NoReturn:
    """Say why a command cannot start, and leave with exit code 2."""
    print(f"holdfast: {cause}", file=sys.stderr)
    raise typer.Exit(2)


def gateway_settings(
    calls: CallChoice, reasoning: ReasoningChoice, keys: Path | None, api_key: str | None, **named: Any
) -> GatewaySettings:
    """The gateway's settings. ``named`` are fields of `GatewaySettings`."""
    from ...sessions.tools.formats import CallForm, ReasoningForm

    if keys is not None and api_key is not None:
        refuse("--keys and --api-key both set the valid keys: give one of them")
    return GatewaySettings(
        keys=keys,
        api_key=api_key,
        calls=None if calls == AUTO else CallForm(calls),
        reasoning=None if reasoning == AUTO else ReasoningForm(reasoning),
        **named,
    )


def network_settings(
    hosts: list[str] | None,
    origins: list[str] | None,
    proxies: list[str] | None,
    root_path: str,
    *secured: Any,
) -> Network:
    """How the server is reached. ``secured``: certificate, private key and its password."""
    trusted = tuple(one.strip() for word in proxies or () for one in word.split(","))
    try:
        return Network(tuple(hosts or ()), tuple(origins or ()), trusted, root_path.rstrip("/"), *secured)
    except NetworkInvalid as error:
        refuse(error.message)


def engine_settings(
    model: str,
    *,
    kv_bytes: str | None = None,
    host_bytes: str | None = None,
    disk_bytes: str | None = None,
    kv_scales: str = "1,1",
    **named: Any,
) -> EngineSettings:
    """The engine's settings. ``named`` are fields of `EngineSettings`."""
    try:
        return EngineSettings(
            model=model,
            kv_bytes=_bytes("--kv-bytes", kv_bytes),
            host_bytes=_bytes("--host-bytes", host_bytes),
            disk_bytes=_bytes("--disk-bytes", disk_bytes),
            kv_scales=_scales(kv_scales),
            **named,
        )
    except RuntimeFault as fault:
        refuse(fault.message)


def default_store(model: str) -> Path:
    """``$XDG_STATE_HOME/holdfast/<model>``, by default under ``~/.local/state``."""
    from ..compose import model_name

    state = os.environ.get("XDG_STATE_HOME", "")
    root = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return root / "holdfast" / model_name(model).replace("/", "--")


def _scales(text: str) -> tuple[float, float]:
    try:
        key, value = (float(one) for one in text.split(","))
    except ValueError:
        refuse(f"--kv-scales: '{text}' is not two numbers such as 1,0.125")
    return key, value


def _bytes(option: str, text: str | None) -> int | None:
    """The size that an option names, such as ``8GiB``."""
    try:
        return None if text is None else bytes_of(text)
    except ValueError as error:
        refuse(f"{option} {error}")
