"""The options of the command line, and the functions that make settings of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from ...kvstore.log_lines import LogForm, LogLevel
from ...runtime.errors import RuntimeFault
from ...runtime.settings import EngineSettings
from ..access.quotas import bytes_of
from ..errors import NameUnusable, NetworkInvalid, TracingUnavailable
from ..settings import GatewaySettings, MetricsCompat, Network

AUTO: Literal["auto"] = "auto"
CallChoice = Literal[
    "auto",
    "hermes",
    "llama3-json",
    "mistral",
    "pythonic",
    "granite",
    "phi4-mini",
    "functools",
    "deepseek-v3",
    "deepseek-v3.1",
    "command-r",
    "command-r7b",
    "qwen3-coder",
    "seed-oss",
    "harmony",
]
ReasoningChoice = Literal["auto", "none", "think", "think-opened", "command", "mistral", "seed"]

Dtypes = Literal["auto", "float32", "bfloat16", "float16", "float", "half"]
KVDtypes = Literal["auto", "float8_e4m3fn", "fp8", "fp8_e4m3"]
Backends = Literal["auto", "reference", "cpu", "triton", "triton-invariant"]
TORCH_NAMES = {"float": "float32", "half": "float16", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
"""torch's name for each element type that vLLM names otherwise."""

Model = Annotated[
    str,
    typer.Argument(
        envvar="HOLDFAST_MODEL",
        help="A local folder, a GGUF file, a hub id, `pocket`, which ships with Holdfast, or `smollm2`.",
    ),
]
PrintConfig = Annotated[
    bool,
    typer.Option("--print-config", help="Print all settings, each with where it comes from, and leave."),
]
Key = Annotated[
    str | None, typer.Option("--api-key", envvar="HOLDFAST_API_KEY", help="Bearer key of the server.")
]
OperatorsKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="HOLDFAST_API_KEY", help="An operator's key, if the server has keys."),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto.")]
Dtype = Annotated[Dtypes, typer.Option(help="Of weights and computing. auto: as stored.")]
KVDtype = Annotated[
    KVDtypes, typer.Option("--kv-dtype", "--kv-cache-dtype", help="Of KV. auto: as the model computes.")
]
KVScales = Annotated[
    str, typer.Option("--kv-scales", help="Of keys and values, powers of two such as 1,0.125: for 8-bit KV.")
]
Backend = Annotated[Backends, typer.Option("--kernels", help="auto: the fastest there is.")]
Bytes = Annotated[
    str | None,
    typer.Option("--kv-bytes", "--kv-cache-memory-bytes", help="Memory for KV, such as 512MiB or 8GiB."),
]
BlockTokens = Annotated[
    int, typer.Option("--block-tokens", "--block-size", min=1, help="Tokens in one block of KV.")
]
HostBytes = Annotated[
    str | None,
    typer.Option("--host-bytes", help="Memory for KV below the device; 0 for none, a share by default."),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        "--max-model-len",
        min=1,
        help="Longest sequence in tokens; the model's own by default.",
    ),
]
Store = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the journal, in which sessions outlive the server; by default one per model under the "
        "user's state folder.",
    ),
]
OperatorKey = Annotated[
    str | None,
    typer.Option("--operator-key", help="Bearer key that sees all of /metrics, and all sessions."),
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
    typer.Option(help="Password of the private key."),
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
KeysFile = Annotated[
    Path | None,
    typer.Option(
        help="Keys and tenants: `KEY TENANT` on each line, or TOML with limits (gateway/README.md)."
    ),
]
StepTokens = Annotated[
    int | None,
    typer.Option(
        "--max-step-tokens",
        "--max-num-batched-tokens",
        min=1,
        help="Tokens computed by one step; by default 512 on a CPU, 8192 on a GPU, 2048 on a small one.",
    ),
]
Sequences = Annotated[
    int | None,
    typer.Option(
        "--max-sequences",
        "--max-num-seqs",
        min=1,
        help="Sequences that run at once; by default 64 on a CPU, 256 on a GPU, 128 on a small one.",
    ),
]
Utilization = Annotated[
    float,
    typer.Option(
        "--gpu-memory-utilization",
        help="Fraction of the GPU's memory for weights, activations, graphs and KV together.",
    ),
]
Eager = Annotated[
    bool, typer.Option("--enforce-eager", help="Launch each kernel of a step on its own: no CUDA graphs.")
]
CaptureSizes = Annotated[
    str | None,
    typer.Option(
        "--cudagraph-capture-sizes",
        help="Rows of the steps that are captured as CUDA graphs, such as 1,2,4,8; empty for none.",
    ),
]
CaptureLazily = Annotated[
    bool,
    typer.Option(
        "--cudagraph-capture-lazily", help="Capture a graph when a step first needs it, not at start."
    ),
]
MetricsNames = Annotated[
    MetricsCompat,
    typer.Option(
        "--metrics-compat", help="vllm: /metrics has vLLM's names, too, for routers and dashboards."
    ),
]
TracesEndpoint = Annotated[
    str | None,
    typer.Option(
        "--otlp-traces-endpoint",
        help="URL of an OpenTelemetry collector (OTLP over HTTP) that gets a span of each turn; needs the extra"
        " otel.",
    ),
]
QueueSeconds = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="A turn that would wait longer for the engine is refused with Retry-After; 0: every turn waits.",
    ),
]
DrainSeconds = Annotated[
    float, typer.Option(min=0.0, help="At SIGTERM running replies may end within this time.")
]
Policy = Annotated[
    str,
    typer.Option(
        help="Order of turns: fair_shares, which shares the engine between tenants; first_come_first_served; or"
        " package.module:Class."
    ),
]
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

LogLevelOption = Annotated[LogLevel, typer.Option("--log-level", help="The least level that is logged.")]
LogFormOption = Annotated[
    LogForm, typer.Option("--log-format", help="text: a line for each event; json: an object for each.")
]
ToolFallback = Annotated[
    bool,
    typer.Option(
        "--tool-fallback",
        help="If the model's template does not show tools, write them into the instructions.",
    ),
]


ServedNames = Annotated[
    list[str] | None,
    typer.Option(
        "--served-model-name", help="A name that clients may ask for, in place of MODEL's; may be repeated."
    ),
]
DefaultTokens = Annotated[
    int,
    typer.Option(
        min=0,
        max=2**31 - 1,
        help="Most tokens of a reply that sets no `max_output_tokens`; 0: as many as the context holds.",
    ),
]
EndCycles = Annotated[
    bool,
    typer.Option(
        "--end-cycles/--no-end-cycles",
        help="End a reply that has repeated one cycle of at most 128 tokens for 512 tokens.",
    ),
]


Page = Annotated[
    bool,
    typer.Option("--page/--no-page", help="Serve the playground at / and the documents of the API at /docs."),
]


class OptionUnusable(Exception):
    """Options from which no valid settings can be made. ``message``: why, in one line."""

    @property
    def message(self) -> str:
        """Why, in one line."""
        return str(self.args[0])


def refuse(cause: str) -> NoReturn:
    """Print on stderr why a command cannot start, and leave it with exit code 2."""
    print(f"holdfast: {cause}", file=sys.stderr)
    raise typer.Exit(2)


def gateway_settings(
    calls: CallChoice, reasoning: ReasoningChoice, keys: Path | None, api_key: str | None, **named: Any
) -> GatewaySettings:
    """Make the gateway's settings from options. ``calls``, ``reasoning``: the forms in which the model writes
    tool calls and reasoning; ``auto``: found from its template. ``keys``, ``api_key``: where the valid keys
    come from, one of them at most. ``named``: other fields of `GatewaySettings`. Raises ``OptionUnusable``."""
    from ...sessions.tools.formats import CallForm, ReasoningForm

    if keys is not None and api_key is not None:
        raise OptionUnusable("--keys and --api-key both set the valid keys: give one of them")
    try:
        return GatewaySettings(
            keys=keys,
            api_key=api_key,
            calls=None if calls == AUTO else CallForm(calls),
            reasoning=None if reasoning == AUTO else ReasoningForm(reasoning),
            **named,
        )
    except (NameUnusable, TracingUnavailable) as error:
        raise OptionUnusable(error.message) from None


def network_settings(
    hosts: list[str] | None,
    origins: list[str] | None,
    proxies: list[str] | None,
    root_path: str,
    *secured: Any,
) -> Network:
    """Make the settings of host names, proxies and TLS from options. ``hosts``: names in the Host header that
    are accepted; ``origins``: of web pages that may connect; ``proxies``: addresses or networks, also several
    in one text with commas between; ``secured``: the TLS certificate, its private key, and the key's password.
    Raises ``OptionUnusable``."""
    trusted = tuple(one.strip() for word in proxies or () for one in word.split(","))
    try:
        return Network(tuple(hosts or ()), tuple(origins or ()), trusted, root_path.rstrip("/"), *secured)
    except NetworkInvalid as error:
        raise OptionUnusable(error.message) from None


def engine_settings(
    model: str,
    *,
    kv_bytes: str | None = None,
    host_bytes: str | None = None,
    disk_bytes: str | None = None,
    kv_scales: str = "1,1",
    dtype: str = AUTO,
    kv_dtype: str = AUTO,
    capture_sizes: str | None = None,
    **named: Any,
) -> EngineSettings:
    """Make the engine's settings from options. Sizes are texts such as ``8GiB``; ``kv_scales`` is the text of
    two numbers, for keys and values, ``capture_sizes`` of any; types may have vLLM's names. ``named``: other
    fields of `EngineSettings`. Raises ``OptionUnusable``."""
    try:
        return EngineSettings(
            model=model,
            kv_bytes=_bytes("--kv-bytes", kv_bytes),
            host_bytes=_bytes("--host-bytes", host_bytes),
            disk_bytes=_bytes("--disk-bytes", disk_bytes),
            kv_scales=_scales(kv_scales),
            dtype=TORCH_NAMES.get(dtype, dtype),
            kv_dtype=TORCH_NAMES.get(kv_dtype, kv_dtype),
            capture_sizes=None if capture_sizes is None else _rows(capture_sizes),
            **named,
        )
    except RuntimeFault as fault:
        raise OptionUnusable(fault.message) from None


def default_store(model: str) -> Path:
    """The folder that is a model's store if none is given: ``$XDG_STATE_HOME/holdfast/<model>``, by default
    under ``~/.local/state``."""
    from ...runtime.model.folder import model_name

    state = os.environ.get("XDG_STATE_HOME", "")
    root = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return root / "holdfast" / model_name(model).replace("/", "--")


def _scales(text: str) -> tuple[float, float]:
    try:
        key, value = (float(one) for one in text.split(","))
    except ValueError:
        raise OptionUnusable(f"--kv-scales: '{text}' is not two numbers such as 1,0.125") from None
    return key, value


def _rows(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(one) for one in text.replace(",", " ").split())
    except ValueError:
        raise OptionUnusable(
            f"--cudagraph-capture-sizes: '{text}' is not a list of numbers such as 1,2,4,8, each 1 or more"
        ) from None


def _bytes(option: str, text: str | None) -> int | None:
    """The number of bytes that ``text``, such as ``8GiB``, stands for; None for None. ``option``: its name, for
    the error. Raises ``OptionUnusable`` if it is not a size."""
    try:
        return None if text is None else bytes_of(text)
    except ValueError as error:
        raise OptionUnusable(f"{option} {error}") from None
