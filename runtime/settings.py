"""What an operator sets for the engine, and the numbers the scheduler works within once model and memory are
known.

Two frozen objects: `EngineSettings` crosses the link to the child as it was asked for; `SchedulerSettings` is
what became of it, checked at birth and trusted below. Reads no argv, no environment, no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec

from ..kernels.names import AT_LOAD, BACKENDS
from ..kvstore.log_lines import LogSettings
from ..kvstore.options import Option, invalid
from .errors import PoolTooSmall, SettingsInvalid
from .model.kv_format import DTYPES, KV_DTYPES, KVFormat

SECRET_BYTES = 32
"""The length of a secret that the engine makes itself."""

DEPTHS = (1, 2)
"""How many steps may be in flight: 1, in lock step; or 2, one planned while the one before it runs."""


class StepSize(NamedTuple):
    """The size of a step, or the most that one computes: so many ``tokens``, in so many ``rows``."""

    tokens: int = 512
    rows: int = 64

    @property
    def single(self) -> bool:
        """Whether each row has one token."""
        return self.tokens == self.rows


SMALL_GPU, LARGE_GPU = StepSize(2048, 128), StepSize(8192, 256)
CHUNKS = [
    StepSize(*one)
    for one in ((64, 4), (64, 16), (128, 4), (128, 64), (256, 16), (256, 128), (512, 64), (512, 256))
]
"""Sizes of captured steps that compute prompts, too. Larger ones keep a GPU busy while the next is launched."""

LARGE_GPU_BYTES = 40 << 30
"""A GPU with so much memory computes steps of `LARGE_GPU` by default."""


class TenantBudget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much KV of the tenant with the salt ``salt`` may take at most; None: as much as there is.

    ``leased_bytes``: what its leases may cover on the device, and as much again in the host tier.
    ``disk_bytes``: on disk.
    """

    salt: bytes
    leased_bytes: int | None = None
    disk_bytes: int | None = None


class LoraModule(msgspec.Struct, frozen=True, array_like=True):
    """An adapter to load at start, from the folder ``path``, under ``name``. ``digest``: of the weights that it
    had in the engine before; empty: it is loaded for the first time, and must be there."""

    name: str
    path: str
    digest: bytes = b""

    @classmethod
    def written(cls, text: str) -> LoraModule:
        """From ``name=path``. Raises ``SettingsInvalid``."""
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise SettingsInvalid(f"--lora-modules {text!r}: name=path is expected")
        check_adapter_name(name)
        return cls(name, path)


MOST_NAME = 256


def check_adapter_name(name: str) -> None:
    """Raise ``SettingsInvalid`` for a text that cannot name an adapter: empty, too long, or not printable."""
    if not 0 < len(name) <= MOST_NAME or not name.isprintable() or name != name.strip():
        raise SettingsInvalid(
            f"an adapter's name has 1 to {MOST_NAME} printable characters, unlike {name[:80]!r}"
        )


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is asked for an engine; None and "auto" are resolved when the model is loaded."""

    model: str
    """A local folder, a GGUF file, a hub id, ``pocket`` or ``smollm2``."""
    device: Annotated[str, Option()] = "auto"
    """cpu, cuda, cuda:1, or auto."""
    dtype: Annotated[
        str, Option(choices=("auto", *DTYPES), words={"float": "float32", "half": "float16"})
    ] = "auto"
    """Of weights and computing. auto: as stored."""
    quantization: Annotated[str | None, Option(choices=AT_LOAD)] = None
    """What linears of a model that is not quantised are quantised to as it is loaded."""
    kv_bytes: Annotated[int | None, Option(also="kv_cache_memory_bytes", least=1)] = None
    """Memory for KV, such as 512MiB or 8GiB."""
    host_bytes: Annotated[int | None, Option(least=0)] = None
    """Memory for KV below the device; 0 for none, a share by default."""
    block_tokens: Annotated[int, Option(also="block_size", least=1)] = 16
    """Tokens in one block of KV."""
    max_context: Annotated[int | None, Option(also="max_model_len", least=1)] = None
    """Longest sequence in tokens; the model's own by default."""
    kernels: Annotated[str, Option(choices=BACKENDS)] = "auto"
    """auto: the fastest there is; triton-invariant: bits do not depend on what else a step computes."""
    kv_dtype: Annotated[
        str,
        Option(
            also="kv_cache_dtype",
            choices=KV_DTYPES,
            words={"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"},
        ),
    ] = "auto"
    """Of KV. auto: as the model computes."""
    kv_scales: Annotated[tuple[float, float], Option(form="two numbers such as 1,0.125")] = (1.0, 1.0)
    """Of keys and values, powers of two such as 1,0.125: for 8-bit KV, which is stored divided by them."""
    max_step_tokens: Annotated[int | None, Option(also="max_num_batched_tokens", least=1)] = None
    """Tokens computed by one step; by default 512 on a CPU, 8192 on a GPU, 2048 on a small one."""
    max_sequences: Annotated[int | None, Option(also="max_num_seqs", least=1)] = None
    """Sequences that run at once; by default 64 on a CPU, 256 on a GPU, 128 on a small one."""
    memory_utilization: Annotated[float, Option(name="gpu_memory_utilization")] = 0.9
    """Fraction of the GPU's memory for weights, activations, graphs and KV together."""
    enforce_eager: Annotated[bool, Option()] = False
    """Launch each kernel of a step on its own: no CUDA graphs."""
    capture_sizes: Annotated[
        tuple[int, ...] | None,
        Option(name="cudagraph_capture_sizes", form="a list of numbers such as 1,2,4,8, each 1 or more"),
    ] = None
    """Rows of the steps that are captured as CUDA graphs, such as 1,2,4,8; empty for none."""
    capture_lazily: Annotated[bool, Option(name="cudagraph_capture_lazily")] = False
    """Capture a graph when a step first needs it, not at start."""
    policy: Annotated[str, Option()] = "fair_shares"
    """Order of turns: fair_shares, which shares the engine between tenants; first_come_first_served; or
    package.module:Class."""
    enable_lora: Annotated[bool, Option()] = False
    """Make room for adapters (LoRA)."""
    lora_modules: Annotated[tuple[str, ...], Option()] = ()
    """Adapters to load at start: name=path, a folder that peft has written."""
    max_loras: Annotated[int, Option(least=1, most=1024)] = 8
    """Adapters that may be in one step."""
    max_lora_rank: Annotated[int, Option(least=1, most=256)] = 16
    """Highest rank of an adapter."""
    max_cpu_loras: Annotated[int | None, Option(least=1)] = None
    """Adapters that may be loaded, in the host's memory; by default four times --max-loras."""
    disk_bytes: Annotated[int | None, Option(least=1)] = None
    """KV that the store may hold while its disk has room; a share of that."""
    blocks: int | None = None
    """KV on the device as a number of blocks, in place of ``kv_bytes``."""
    store: str | None = None
    """A folder for KV on disk, below ``kv`` in it; none by default."""
    disk_reserve: int = 0
    """Bytes of the store's disk that the journal needs free: KV gives way before there are fewer."""
    max_open: int = 65536
    """Sequences that may be open at once."""
    depth: int | None = None
    """Steps in flight; 1 on a CPU and 2 on a GPU by default."""
    watermark: float = 0.01
    """Share of the blocks a new turn leaves free while others run."""
    lease_share: float = 0.5
    """Share of the blocks, and of the host tier, that leases may cover in all."""
    idle_stretch: float = 1.25
    """A step of turns may take at most so many times as long by prefill of idle sequences (such as input that
    is still streamed) that is put into it; one step in thirteen may take longer. 1 or less: no limit."""
    patience: int = 4096
    """Steps after which a turn goes before all younger ones, under a policy that promises no bound."""
    again: tuple[LoraModule, ...] | None = None
    """In place of ``lora_modules``, for an engine that follows another: what that one had."""
    tenants: tuple[TenantBudget, ...] = ()
    """Budgets of the tenants that may have less than all."""
    secret: bytes = b""
    """Keys the block hashes, 16 to 64 bytes; if empty, a new one is made at each start."""
    logs: LogSettings = LogSettings()
    debug: bool = False
    """Owner tags, and an audit whenever the engine is idle."""

    def __post_init__(self) -> None:
        if wrong := invalid(self):
            raise SettingsInvalid(wrong)
        if self.blocks is not None and self.kv_bytes is not None:
            raise SettingsInvalid("blocks and kv_bytes both say how much KV to hold: give one of them")
        if self.secret and not 16 <= len(self.secret) <= 64:
            raise SettingsInvalid(f"secret has {len(self.secret)} bytes, not 16 to 64")
        KVFormat(self.kv_dtype, *self.kv_scales)
        _check_least(1, self, "blocks")
        _check_least(0, self, "disk_reserve")
        self._check_adapters()
        if min(self.capture_sizes or (1,)) < 1:
            sizes = ",".join(map(str, self.capture_sizes or ()))
            raise SettingsInvalid(f"--cudagraph-capture-sizes {sizes}: a graph has 1 row or more")
        if not 0 < self.memory_utilization <= 1:
            raise SettingsInvalid(
                f"--gpu-memory-utilization {self.memory_utilization:g} is not more than 0 and at most 1"
            )

    def _check_adapters(self) -> None:
        names = [LoraModule.written(text).name for text in self.lora_modules]
        if names and not self.enable_lora:
            raise SettingsInvalid("--lora-modules needs --enable-lora")
        if twice := [name for name in names if names.count(name) > 1]:
            raise SettingsInvalid(f"--lora-modules: {twice[0]!r} is named twice")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise SettingsInvalid(
                f"--max-cpu-loras {self.max_cpu_loras} is less than --max-loras {self.max_loras}"
            )
        if len(names) > self.loaded_adapters:
            raise SettingsInvalid(
                f"--lora-modules names {len(names)} adapters, --max-cpu-loras allows {self.loaded_adapters}"
            )

    @property
    def loaded_adapters(self) -> int:
        """How many adapters may be loaded."""
        return self.max_cpu_loras or 4 * self.max_loras

    @property
    def adapters(self) -> tuple[LoraModule, ...]:
        """The adapters to load at start."""
        return tuple(map(LoraModule.written, self.lora_modules)) if self.again is None else self.again

    @property
    def kv_format(self) -> KVFormat:
        """How K and V are stored: their type and scales."""
        return KVFormat(self.kv_dtype, *self.kv_scales)

    def step_size(self, device_bytes: int | None) -> StepSize:
        """The most that a step may compute: as asked, by default by the device. ``device_bytes``: of the
        device's own memory; None: it has none, as a CPU. If one number is asked for, the other is such that
        each sequence has a token in a step."""
        large = device_bytes is not None and device_bytes >= LARGE_GPU_BYTES
        usual = StepSize() if device_bytes is None else LARGE_GPU if large else SMALL_GPU
        tokens = self.max_step_tokens or max(usual.tokens, self.max_sequences or 0)
        return StepSize(tokens, self.max_sequences or min(usual.rows, tokens))

    def captures(self, most: StepSize) -> list[StepSize]:
        """The sizes of steps that are captured as CUDA graphs, the largest first, where a step has at most
        ``most``: of single tokens as asked, by default such that few rows are padded; and of `CHUNKS`."""
        usual = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, most.rows, 32), most.rows)
        rows = usual if self.capture_sizes is None else self.capture_sizes
        singles = {StepSize(one, one) for one in rows if one <= most.rows}
        if self.enforce_eager or not singles:
            return []
        chunks = {one for one in CHUNKS if one.tokens <= most.tokens and one.rows <= most.rows}
        return sorted(singles | chunks, reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """The numbers that the scheduler works within, checked. Those that `EngineSettings` has too mean the
    same.

    ``blocks``: of the pool. ``vocab_size``: token ids are below it. ``watermark_blocks``: blocks that a new
    turn leaves free while others run. ``lease_caps``: how many blocks a tenant's leases may cover, by its
    salt, and as many slots of the host tier. ``windows``: of the KV groups; each has its own blocks. Raises
    `SettingsInvalid`: a number out of bounds; `PoolTooSmall`: a sequence of ``max_context`` tokens does not fit
    ``blocks`` blocks.
    """

    blocks: int
    vocab_size: int
    max_context: int
    block_tokens: int = 16
    max_step_tokens: int = StepSize().tokens
    max_sequences: int = StepSize().rows
    max_open: int = 65536
    depth: int = 1
    watermark_blocks: int = 0
    lease_share: float = 0.5
    idle_stretch: float = 0.0
    policy: str = "fair_shares"
    patience: int = 4096
    lease_caps: Mapping[bytes, int] = field(default_factory=dict)
    windows: tuple[int | None, ...] = (None,)

    def __post_init__(self) -> None:
        _check_least(1, self, "blocks", "vocab_size", "block_tokens", "max_sequences", "max_open")
        _check_least(2, self, "max_context")
        _check_least(0, self, "watermark_blocks", "patience")
        if not 0 <= self.lease_share <= 1:
            raise SettingsInvalid(f"lease_share is {self.lease_share}, not between 0 and 1")
        if self.depth not in DEPTHS:
            raise SettingsInvalid(f"depth is {self.depth}, not one of {DEPTHS}")
        # Each running turn has one token per step, and the first its chunk: see `least_chunk`.
        if self.max_step_tokens < self.max_sequences:
            raise SettingsInvalid(
                f"--max-step-tokens {self.max_step_tokens} is less than --max-sequences {self.max_sequences}:"
                " each running sequence has a token in every step"
            )
        needed = self.blocks_for(self.max_context) * len(self.windows)  # a reply may be as long
        if needed > self.blocks:
            groups = f" in {len(self.windows)} KV groups" if len(self.windows) > 1 else ""
            raise PoolTooSmall(
                f"a sequence of max_context = {self.max_context} tokens takes {needed} blocks of"
                f" {self.block_tokens} tokens{groups}; the pool has {self.blocks}"
            )

    def blocks_for(self, tokens: int) -> int:
        """How many blocks ``tokens`` tokens take up."""
        return -(-tokens // self.block_tokens)

    @property
    def step_size(self) -> StepSize:
        """The most that a step may compute."""
        return StepSize(self.max_step_tokens, self.max_sequences)

    @property
    def least_chunk(self) -> int:
        """Prompt tokens that the first turn may compute in each step, however many decode beside it."""
        return self.max_step_tokens - self.max_sequences + 1

    def most_steps(self, prompt: int, max_tokens: int, tenants: int = 1) -> int:
        """The most steps within which a turn ends, once it is the first in the order.

        ``prompt``: tokens of the sequence when the turn began; ``max_tokens``: what it may sample;
        ``tenants``: so many share a step's prompt tokens. With ``length`` = all its tokens at the end::

            tenants * ceil(prompt / least_chunk) + length - prompt
            + (depth - 1) * (blocks_for(length) + 2) + depth

        The first turn is not preempted, finds room, since the longest sequence fits the pool, and computes a
        chunk or samples a token in each step. The first term: all its prompt may have to be computed again.
        The second: a token that it sampled before a preemption costs at most one step to compute again and
        none to sample. The third: it stalls only while blocks taken for it lie behind the step fence, at most
        ``depth - 1`` steps for each block it allocates, for the copy of its tail and for its admission. The
        last: steps in flight when it became the first, and an end that is found one step late.

        A turn behind others ends within the sum over all turns up to itself; `Policy.bound` says which those
        are.
        """
        length = min(prompt + max_tokens, self.max_context)
        stalls = (self.depth - 1) * (self.blocks_for(length) + 2)
        return tenants * -(-prompt // self.least_chunk) + length - prompt + stalls + self.depth


def _check_least(least: int, settings: EngineSettings | SchedulerSettings, *names: str) -> None:
    for name in names:
        number = getattr(settings, name)
        if number is not None and number < least:
            raise SettingsInvalid(f"{name} is {number}, less than {least}")
