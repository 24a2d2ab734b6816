"""``holdfast doctor``: what the machine offers and what a model needs, with the arithmetic.

It reads configurations and headers, and loads no weights.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from math import inf, prod
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import asdict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ... import __version__
from ...runtime.errors import RuntimeFault
from ...runtime.kv_placement.sizing import (
    blocks_of,
    context_of,
    host_kv_bytes,
    machine_bytes,
    memory_line,
    rule_of,
    shown,
)
from ...runtime.kv_placement.tier_setup import host_bytes
from ...runtime.model.kv_format import KV_BYTES
from ...runtime.settings import EngineSettings
from ...runtime.verbs import SamplingDefaults
from ...sessions.errors import SessionError
from ..access.tenants import NOTHING_SET, Tenants, check, check_bound, leasable, runnable, told
from ..errors import KeysUnusable
from ..settings import GatewaySettings
from .options import refused

if TYPE_CHECKING:
    from ...runtime.model.config import ModelConfig

LIBRARIES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "numba"),
    *("msgspec", "starlette", "uvicorn", "websockets", "anyio"),
)

UNBOUNDED = 1 << 16
"""The width, in characters, of a table that no terminal shows: each fact is on one line."""

Fact: TypeAlias = tuple[str, str]


def run(settings: EngineSettings | None, keys: Path | None = None) -> int:
    """Print the tables: the machine, the tenants of the keys file ``keys``, the model of ``settings``; the last
    two only if they are given. Returns the exit code: 0, or 2 with the reason on stderr if the model cannot be
    served or the tenants' limits do not fit."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = UNBOUNDED
    console.print(_table("Machine", machine()))
    try:
        found = Tenants() if keys is None else Tenants.read(keys)
        if found.keys is not None:
            console.print(_table(f"Tenants of {found.source}", limits(found)))
            check(found, GatewaySettings(), settings or EngineSettings(model=""))
        if settings is not None:
            console.print(_table(f"Model {settings.model}", list(model(settings, found))))
    except (RuntimeFault, SessionError, KeysUnusable) as error:
        return refused(error.message)
    return 0


def machine() -> Iterator[Fact]:
    """Facts about the machine and the libraries, as names and values."""
    import torch

    yield "holdfast", f"{__version__} on Python {platform.python_version()}, {platform.platform()}"
    yield "cpu", f"{len(os.sched_getaffinity(0))} cores, torch uses {torch.get_num_threads()} threads"
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield "memory", f"{shown(machine_bytes())}, {shown(free)} free"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield f"cuda:{index}", f"{properties.name}, {shown(total)}, {shown(free)} free"
    if not torch.cuda.is_available():
        yield "cuda", "none"
    yield "libraries", ", ".join(f"{name} {_version(name)}" for name in LIBRARIES)


def limits(found: Tenants) -> Iterator[Fact]:
    """For each tenant of a keys file, its name, and as text how many keys it has and which limits."""
    held = found.keys.tenants.values() if found.keys is not None else ()
    for name in sorted({*held, *found.limits}):
        count = sum(holder == name for holder in held)
        yield name, f"{count} {'key' if count == 1 else 'keys'}; {told(found.limits.get(name, NOTHING_SET))}"


def model(settings: EngineSettings, tenants: Tenants | None = None) -> Iterator[Fact]:
    """Facts about the model and what it needs, as names and values. Its weights are not loaded. ``tenants``:
    their leases are checked against the KV; None: there are none. Raises ``ModelUnreadable``,
    ``SettingsInvalid``, ``LimitsTooLarge`` or a ``SessionError``."""
    from ...runtime.build import keeping, named_backend
    from ...runtime.model.config import read_config, read_defaults
    from ...runtime.model.folder import check_folder, find_model
    from ...runtime.model.load import as_stored, device_named, dtype_named, forms_of, open_weights
    from ...runtime.model.weights import EMBEDDING

    folder = find_model(settings.model)
    check_folder(folder)
    config = read_config(folder, settings.max_context)
    kind = dtype_named(settings.dtype, config)
    with open_weights(folder, config) as weights:
        config, pieces = as_stored(config, weights, kind)
        device = device_named(settings.device)
        asked = (kind, device, settings.kv_format, keeping(settings), settings.quantization)
        forms = forms_of(pieces, weights, *asked)
        multiplied = [piece for piece in pieces if config.tied_head or piece.name != EMBEDDING]
        read = forms_of(multiplied, weights, *asked).bytes
    dtype = str(kind).removeprefix("torch.")
    width = KV_BYTES[dtype]
    parameters = sum(prod(piece.shape) for piece in pieces)
    yield "file" if folder.is_file() else "folder", str(folder)
    yield "architecture", f"{config.architecture}, {config.layers} layers, hidden {config.hidden_size}"
    if forms.words:
        size = f"{forms.bytes:,} B ({shown(forms.bytes)})"
        yield "weights", f"{parameters:,} parameters in {'; '.join(forms.words)}; and {dtype} = {size}"
    else:
        yield "weights", _product((("parameters", parameters), (f"bytes ({dtype})", width)), "B")
    if device.type == "cpu":
        rate = read_per_second()
        speed = f"{shown(read)} a token at {rate / 1e9:.1f} GB/s, as measured now"
        yield "one sequence", f"at most {rate / read:,.0f} tokens/s: {speed}"
    kept = settings.kv_format.stored_as(dtype)
    kept_width = KV_BYTES[kept]
    groups = config.kv_layers
    layers = max(map(len, groups))
    shape = (("layers", layers), ("(k, v)", 2), ("heads", config.kv_heads), ("dim", config.head_dim))
    many = [] if len(groups) == 1 else [("groups", len(groups))]
    yield "KV per token", _product((*many, *shape, (f"bytes ({kept})", kept_width)), "B")
    for window in dict.fromkeys(config.kv_windows):
        if window is not None:
            some = f"{config.kv_windows.count(window)} of {len(groups)} KV groups"
            yield "window", f"{some} keep a turn and {window:,} tokens before it"
    block_bytes = layers * 2 * config.kv_heads * config.head_dim * kept_width * settings.block_tokens
    yield from _room(settings, block_bytes, config, forms.bytes, tenants or Tenants())
    yield "sampling", _sampling(read_defaults(folder))
    kernels, hint = named_backend(settings, dtype, config.head_dim)
    yield "kernels", f"{kernels} ({hint})" if hint else kernels
    yield from language_facts(folder)
    for note in config.notes:
        yield "note", note


def read_per_second() -> float:
    """The bytes of memory that torch's threads read in a second."""
    import torch

    numbers, best = torch.ones(1 << 25, dtype=torch.int64), inf  # 256 MiB, more than caches hold
    for _ in range(3):
        began = perf_counter()
        numbers.sum()
        best = min(best, perf_counter() - began)
    return numbers.nbytes / best


def _room(
    settings: EngineSettings,
    block_bytes: int,
    config: ModelConfig,
    weights: int,
    tenants: Tenants,
) -> Iterator[Fact]:
    """Facts about how much KV fits on the device and below. ``block_bytes``: of a block. ``weights``: bytes
    of the model. Raises ``LimitsTooLarge`` if the tenants' leases do not fit."""
    from ...runtime.build import estimated_memory

    device, parts = estimated_memory(settings, weights)
    windows = config.windows(settings.block_tokens)
    groups, allowed = len(windows), host_kv_bytes() if parts is None else max(0, parts.kv)
    blocks = blocks_of(settings, block_bytes, allowed, groups)
    context = context_of(settings, blocks // groups, config.max_context)
    tokens = blocks // groups * settings.block_tokens
    step = settings.step_size(None if parts is None else parts.total)
    check_bound(tenants, runnable(step.rows))
    yield "largest step", f"{step.tokens:,} tokens in {step.rows} rows"
    yield "size of KV", rule_of(settings, parts is None)
    most = "" if parts is None else "at most "  # what a step takes is not known here
    yield f"KV on {device}", f"{most}{shown(blocks * block_bytes)} = {blocks:,} blocks × {block_bytes:,} B"
    bound = leasable(settings, blocks * block_bytes)
    yield "leases may cover", f"{settings.lease_share:g} of that = {shown(bound.there)}"
    check_bound(tenants, bound)
    if parts is None:
        memory = memory_line(weights, blocks, block_bytes, tokens)
        yield "memory", f"{memory} of {shown(machine_bytes())}"
    else:
        yield "memory", parts.line(blocks * block_bytes)
    each = (("blocks", blocks // groups), ("tokens", settings.block_tokens))
    yield "tokens that fit", _product(each, "tokens" if groups == 1 else "tokens, and more behind windows")
    below = host_bytes(settings)
    yield "KV in the host tier", f"{shown(below)} = {below // block_bytes:,} blocks" if below else "none"
    many = blocks / max(1, windows.blocks(context))
    fit = f"{round(many, 1):,g} sessions of the longest context ({context:,})"
    yield "sessions that fit", fit if tokens >= context else f"none of {context:,} tokens: too few blocks"


def _sampling(defaults: SamplingDefaults) -> str:
    """A session's default sampling parameters as text: ``greedy`` or ``drawn``, and the values that differ from
    the usual ones."""
    given = asdict(defaults)
    usual = asdict(SamplingDefaults())
    written = ", ".join(f"{name} {value:g}" for name, value in given.items() if value != usual[name])
    kind = "drawn" if defaults.temperature > 0 else "greedy"
    return f"{kind} ({written})" if written else kind


def language_facts(folder: Path) -> Iterator[Fact]:
    """Facts about a model's chat template, and how it writes calls and reasoning. Raises
    ``TokenizerUnreadable``, ``TemplateFailed``."""
    from ...sessions.text.language import Language

    language = Language.load(folder)
    if not language.tokenizer.templates:
        yield "chat template", "none: it completes prompts, conversations are refused"
        return
    report, forms = language.report, language.forms
    rules, facts = report.rules, [report.kind.value]
    facts.append(
        "shows tools" if report.tools else "shows no tools: they are refused, unless --tool-fallback is given"
    )
    if not rules.system:
        facts.append("instructions go into the first user message")
    if report.tools and not rules.outputs:
        facts.append("tools' outputs are user messages")
    if not rules.users:
        facts.append("users and assistants alternate: neighbours are joined")
    yield "chat template", ", ".join(facts)
    yield "calls, reasoning", str(forms)


def _product(factors: tuple[tuple[str, int], ...], unit: str) -> str:
    written = " × ".join(f"{value:,} {name}" for name, value in factors)
    result = prod(value for _, value in factors)
    exact = f"{result:,} {unit}"
    return f"{written} = {exact}" + (f" ({shown(result)})" if unit == "B" and result >= 1 << 20 else "")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _table(title: str, facts: Iterator[Fact] | list[Fact]) -> Table:
    table = Table(title=Text(title, overflow="fold"), show_header=False, title_justify="left")
    for name, value in facts:
        table.add_row(name, Text(value, overflow="fold"))
    return table
