"""Builds an engine that is ready to serve from its settings, for an engine in a process of its own or in a
thread. Imports torch."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import torch

from ..kernels.backends import Backend, BackendMissing, Needs, choose, named, tell_compiling
from ..kernels.device import Device, Memory, device_of
from ..kvstore.arena import DeviceArena
from ..kvstore.block_mover import BlockMover
from ..kvstore.groups import KVGroup
from ..kvstore.keys import BlockHasher
from ..kvstore.pool import BlockPool
from ..kvstore.tiers import Tiers
from .adapters import AdapterTable
from .engine import Engine
from .errors import AdapterInvalid, PoolTooSmall, SettingsInvalid
from .execution.adapter_store import AdapterStore
from .execution.batch import Capacity
from .execution.runner import TorchRunner
from .execution.warmup import rehearse
from .execution.watchdog import WatchedRunner
from .grammar import llguidance
from .kv_placement import sizing
from .kv_placement.costs import CostBook, measure, this_machine
from .kv_placement.tier_setup import asked_disk, costs_file, host_bytes, host_slots, open_tiers
from .link.engine_end import LoadedEngine, LoadProgress
from .link.heartbeat import Liveness
from .link.messages import Hello
from .model.adapter import AdapterMaps, slot_bytes
from .model.config import ModelConfig, read_defaults
from .model.load import Keeping, LoadedModel, device_named, load_model
from .scheduler.scheduler import Scheduler
from .settings import SECRET_BYTES, EngineSettings, SchedulerSettings, StepSize
from .verbs import LoadedAdapter

TRIAL_BLOCKS = 2
"""Blocks of the arena in which the largest steps are rehearsed: all rows have the same ones."""

TRIAL_GRAPHS = 4
"""So many of the largest graphs are captured to learn what all will take."""

DISK_SECONDS = 1.0
"""An engine that is loaded waits so long for the keys on its disk, so that the first turns find their KV there.
Then it serves without them, until they come."""

log = logging.getLogger(__name__)


def load_engine(
    settings: EngineSettings,
    progress: LoadProgress,
    liveness: Liveness,
    memory: int | None = None,
    disk_socket: int | None = None,
) -> LoadedEngine:
    """Load the model and build its engine.

    ``progress``: called with the fraction of loading that is done, and what is being loaded. ``liveness``:
    the engine tells it before each step how long the step may take. ``memory``: the descriptor of a host
    tier's memory that outlives the engine; None: the engine makes its own. ``disk_socket``: the control
    socket of the disk process, which shares that memory; None: there is no disk tier.

    Raises `ModelUnreadable`: naming file and cause; `SettingsInvalid`: settings that contradict the model or
    the device's memory.
    """
    control = None if disk_socket is None else asked_disk(disk_socket)
    began = time.monotonic()
    backends: list[Backend] = []

    def prepare(config: ModelConfig, dtype: torch.dtype, types: tuple[str, ...]) -> None:
        # Before there are weights: compiling takes 100 MB that it gives back.
        device, needs = device_named(settings.device), _needs(settings, dtype, config.head_dim, types)
        with device_of(device).active():
            backends.append(choose(settings.kernels, device, needs, liveness.prepare))

    try:
        model = load_model(
            settings.model,
            settings.device,
            settings.dtype,
            progress,
            settings.max_context,
            settings.kv_format,
            keeping(settings),
            settings.quantization,
            prepare,
        )
        (backend,) = backends
        model = replace(model, decoder=model.decoder.computing_by(backend.kernels))
        device = device_of(model.decoder.device)
        with device.active():
            own, parts = device.memory(anew=True), None
            model, adapters = _adapting(settings, model)
            building = _Building(settings, liveness, model, device, model.kv_groups(settings.block_tokens))
            if own is not None:
                progress(1.0, "rehearsing the largest steps")
                parts = building.measured(own)
            numbers = building.resolved(parts)
            progress(1.0, "allocating the KV arena")
            arena = building.arena(numbers.blocks)
            sizes = (settings.max_loras, settings.loaded_adapters) if settings.enable_lora else ()
            table = AdapterTable(*sizes)
            loaded = _load_adapters(settings, adapters, table, progress)
            engine, mover = building.engine(numbers, arena, memory, control, table, adapters)
    except BackendMissing as error:
        raise SettingsInvalid(str(error)) from error
    except torch.OutOfMemoryError as error:
        reason = " ".join(str(error).split())[:200]
        raise SettingsInvalid(
            f"{settings.model} does not fit the device's memory: {reason}. Take a smaller model or type, or"
            f" {sizing.MORE_FOR_STEPS}"
        ) from error

    hello = building.hello(numbers, backend, parts, loaded)
    log.info(
        "loaded %s in %.1f s: %s, %s, weights %s, kernels %s, context %d, steps of %d tokens in %d rows",
        *(hello.model, time.monotonic() - began, hello.device, hello.dtype),
        *(hello.quantisation or hello.dtype, hello.kernels, hello.max_context, *numbers.step_size),
    )

    def leave() -> None:
        engine.leave()
        if mover is not None:
            mover.close()
        if adapters is not None:
            adapters.close()

    return LoadedEngine(engine, hello, engine.due, leave, engine.answers)


def _adapting(settings: EngineSettings, model: LoadedModel) -> tuple[LoadedModel, AdapterStore | None]:
    """The model with slots for adapters, and what holds and fills them; without ``enable_lora`` the model as it
    is, and None."""
    if not settings.enable_lora:
        return model, None
    maps = AdapterMaps(model.config, model.decoder.dtype, model.kv)
    decoder = maps.with_slots(model.decoder, settings.max_loras, settings.max_lora_rank)
    taken = model.weight_bytes + slot_bytes(decoder.weights)
    model = replace(model, decoder=decoder, weight_bytes=taken)
    return model, AdapterStore(decoder, maps, settings.max_lora_rank, model.namespace)


def _load_adapters(
    settings: EngineSettings, store: AdapterStore | None, table: AdapterTable, progress: LoadProgress
) -> tuple[LoadedAdapter, ...]:
    """Load the adapters that the settings name. One that an earlier engine had, and that is gone or another one
    by now, is left out with a warning. Raises ``AdapterInvalid`` for any other."""
    if store is None:
        return ()
    loaded: list[LoadedAdapter] = []
    for one in settings.adapters:
        progress(1.0, f"loading adapter {one.name}")
        try:
            read = store.read(one.path)
            if one.digest not in (b"", read.digest):
                raise AdapterInvalid(f"{one.path}: its weights are not those of before")
        except AdapterInvalid as error:
            if not one.digest:
                raise
            log.warning("adapter %s is not loaded again: %s", one.name, error.message)
            continue
        loaded.append(store.add(table, one.name, one.path, read))
    return tuple(loaded)


@dataclass(frozen=True, slots=True)
class _Building:
    """An engine that is being built. ``groups``: the KV groups of its ``model``, which computes on ``device``;
    ``liveness``: is told what takes long."""

    settings: EngineSettings
    liveness: Liveness
    model: LoadedModel
    device: Device
    groups: tuple[KVGroup, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, of whichever group."""
        (size,) = {group.block_bytes for group in self.groups}
        return size

    def arena(self, blocks: int) -> DeviceArena:
        """Memory for so many blocks. Raises `SettingsInvalid`: there is not as much."""
        device = self.model.decoder.device
        try:
            return DeviceArena(self.groups[0], blocks, device)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:160]
            what = f"{blocks} blocks of {self.block_bytes} bytes"
            limit = sizing.refusal(error, what) if device.type == "cpu" else None
            lower = "" if device.type == "cpu" else "; lower --kv-bytes or --gpu-memory-utilization"
            raise SettingsInvalid(limit or f"{what} do not fit on {device}: {reason}{lower}") from error

    def measured(self, before: Memory) -> sizing.DeviceMemory:
        """What the device's own memory is for: rehearses the largest steps in a few blocks, captures graphs,
        and reads what both took. ``before``: the memory when only the weights were there. Raises
        `SettingsInvalid`: it does not hold that."""
        settings, config = self.settings, self.model.config
        step = settings.step_size(before.total)
        context = settings.max_context or config.max_context
        capacity = Capacity(2 * step.rows, -(-context // settings.block_tokens), *step)
        arena = self.arena(TRIAL_BLOCKS)
        bare = TorchRunner(self.model.decoder, arena, device=self.device, capacity=capacity)
        began = time.monotonic()
        _, errors = self._rehearsed(bare, context, largest=step)
        after = self._memory()
        parts = sizing.DeviceMemory(
            total=after.total,
            utilization=settings.memory_utilization,
            weights=before.held,
            activations=max(0, after.peak - before.held - TRIAL_BLOCKS * self.block_bytes),
            graphs=0,
            others=max(0, after.total - after.free - after.held),
        )
        if any(isinstance(error, torch.OutOfMemoryError) for error in errors):
            raise parts.refusal(f"a step of {step.tokens:,} tokens in {step.rows} rows does not fit")
        rehearsed = time.monotonic()
        graphs = self._graphs_bytes(bare, settings.captures(step))
        tell_compiling(lambda kernel: None, lambda: None)  # so that nothing holds the runner
        log.info(
            "rehearsed steps of up to %d tokens in %d rows in %.1f s, and the largest graphs in %.1f s",
            *(step.tokens, step.rows, rehearsed - began, time.monotonic() - rehearsed),
        )
        return replace(parts, graphs=graphs)

    def _memory(self) -> Memory:
        now = self.device.memory()
        assert now is not None, "it has memory of its own"
        return now

    def _graphs_bytes(self, bare: TorchRunner, sizes: list[StepSize]) -> int:
        """What the captured steps of an engine will take of the device's memory: the largest are captured here,
        and each of the others takes as much as the last of these."""
        if not sizes:
            return 0
        free: list[int] = []
        bare.capture(sizes[:TRIAL_GRAPHS], lambda _: free.append(self._memory().free))
        free.append(self._memory().free)
        each = (free[-2] - free[-1]) * (len(sizes) - (len(free) - 1))
        return max(0, free[0] - free[-1] + max(0, each))

    def _capture(self, bare: TorchRunner, sizes: list[StepSize]) -> None:
        """Capture the steps of an engine that is about to serve, or have them captured when they are needed."""
        began, done, lazily = time.monotonic(), count(), self.settings.capture_lazily

        def tell(one: StepSize) -> None:
            what = f"capturing a step of {one.tokens} tokens in {one.rows} rows"
            self.liveness.prepare(next(done) / len(sizes), what)

        bare.capture(sizes, tell, now=not lazily)
        if sizes and not lazily:
            seconds = time.monotonic() - began
            log.info("captured %d graphs in %.1f s: %s", bare.captured, seconds, _listed(sizes))

    def _rehearsed(
        self, bare: TorchRunner, context: int, *, kernels: bool = True, largest: StepSize | None = None
    ) -> tuple[WatchedRunner, list[Exception]]:
        """A watched runner around ``bare``, which has computed the steps of `rehearse`, and the errors of
        these."""
        runner = WatchedRunner(bare, self.liveness)
        if kernels:
            tell_compiling(runner.compiling, runner.compiled)
        tokens = self.settings.block_tokens
        return runner, rehearse(runner, tokens, context, kernels=kernels, largest=largest)

    def resolved(self, parts: sizing.DeviceMemory | None) -> SchedulerSettings:
        """The scheduler's settings, with the number of blocks and the context that fit the device's memory.
        ``parts``: what its own memory is for; None: it has none. Raises `SettingsInvalid` or `PoolTooSmall`:
        they cannot work together."""
        settings, block_bytes = self.settings, self.block_bytes
        allowed = sizing.host_kv_bytes() if parts is None else max(0, parts.kv)
        blocks = sizing.blocks_of(settings, block_bytes, allowed, len(self.groups))
        if parts is not None:
            parts.check(settings, blocks, block_bytes)
        else:
            asked = blocks * block_bytes + host_bytes(settings)
            named = "KV on the device and in the host tier (--kv-bytes, --host-bytes)"
            sizing.check_budget(named, asked, sizing.machine_bytes(), "this machine's memory")
        model, step = self.model, settings.step_size(None if parts is None else parts.total)
        try:
            return SchedulerSettings(
                blocks=blocks,
                block_tokens=settings.block_tokens,
                vocab_size=model.config.vocab_size,
                max_context=sizing.context_of(settings, blocks // len(self.groups), model.config.max_context),
                max_step_tokens=step.tokens,
                max_sequences=step.rows,
                max_open=settings.max_open,
                depth=settings.depth or (2 if model.decoder.device.type == "cuda" else 1),
                watermark_blocks=int(blocks * settings.watermark),
                lease_share=settings.lease_share,
                idle_stretch=settings.idle_stretch,
                policy=settings.policy,
                patience=settings.patience,
                windows=tuple(group.window for group in self.groups),
                lease_caps={
                    one.salt: one.leased_bytes // block_bytes
                    for one in settings.tenants
                    if one.leased_bytes is not None
                },
            )
        except PoolTooSmall as error:
            raise error if parts is None else parts.refusal(error.message, blocks * block_bytes) from error

    def engine(
        self,
        numbers: SchedulerSettings,
        arena: DeviceArena,
        memory: int | None,
        control: socket.socket | None,
        table: AdapterTable,
        adapters: AdapterStore | None,
    ) -> tuple[Engine, BlockMover | None]:
        """The engine, ready to serve, and what moves its blocks to and from the host tier."""
        settings, model, liveness = self.settings, self.model, self.liveness
        hasher = BlockHasher(settings.secret or os.urandom(SECRET_BYTES), settings.block_tokens)
        pool = BlockPool(numbers.blocks, debug=settings.debug)
        namespace = model.namespace()
        space = hasher.space(namespace, self.groups)
        slots, mover, tiers = host_slots(settings, memory, space, self.block_bytes), None, Tiers()
        if slots is not None:
            mover = BlockMover(arena, slots, model.decoder.kernels.copy_pieces)
            tiers = open_tiers(settings, slots, control, hasher, namespace, mover.reach)
        matchers = llguidance.Matchers()
        blocks = numbers.blocks_for(numbers.max_context)
        capacity = Capacity(numbers.depth * numbers.max_sequences, blocks, *numbers.step_size)
        bare = TorchRunner(
            model.decoder, arena, mover=mover, grammars=matchers, capacity=capacity, adapters=adapters
        )
        gpu = self.device.memory() is not None
        if mover is not None:  # before kernels run: registering holds up launches
            mover.registration.begin(partial(liveness.prepare, detail="pinning the host tier's memory"))
        if gpu:  # a CPU's cores have the step to compute
            tiers.host.check_adopted()
        runner, _ = self._rehearsed(bare, numbers.max_context, kernels=gpu)
        if gpu:
            self._capture(bare, settings.captures(numbers.step_size))
        path = costs_file(settings, space) if tiers.below else None
        cuda = arena.kv.device.type == "cuda"
        processor = (
            torch.cuda.get_device_name(arena.kv.device) if cuda else f"{torch.get_num_threads()} threads"
        )
        costs = CostBook(path, machine=this_machine(processor), beside=cuda)
        if tiers.below and not costs.calibrated:
            liveness.prepare(1.0, "measuring what a restore costs")
            costs.calibrate(
                measure(
                    bare,
                    slots=tiers.slots,
                    blocks=numbers.blocks,
                    block_tokens=settings.block_tokens,
                    block_bytes=self.block_bytes,
                )
            )
        if settings.debug:
            arena.poison(range(numbers.blocks))
        compiler = None
        if llguidance.available():
            compiler = llguidance.Compiler(model.folder, model.config.vocab_size, model.config.eos_ids)
        scheduler = Scheduler(
            numbers, pool, hasher, namespace, tiers, costs, compiler, matchers, adapters=table
        )
        tiers.wait_ready(DISK_SECONDS)
        return Engine(scheduler, runner, debug=settings.debug, adapters=adapters), mover

    def hello(
        self,
        numbers: SchedulerSettings,
        backend: Backend,
        parts: sizing.DeviceMemory | None,
        adapters: tuple[LoadedAdapter, ...],
    ) -> Hello:
        """What the engine serves. ``adapters``: those that are loaded."""
        model = self.model
        return Hello(
            model=model.name,
            device=str(model.decoder.device),
            dtype=str(model.decoder.dtype).removeprefix("torch."),
            vocab_size=model.config.vocab_size,
            eos_ids=model.config.eos_ids,
            max_context=numbers.max_context,
            block_tokens=self.settings.block_tokens,
            blocks=numbers.blocks,
            block_bytes=self.block_bytes,
            parameters=model.parameters,
            weights=model.weight_bytes,
            defaults=read_defaults(model.folder),
            kernels=backend.name,
            kv_dtype=self.groups[0].dtype,
            quantisation="; ".join(model.quantisation),
            notes=model.config.notes,
            max_sequences=numbers.max_sequences,
            memory="" if parts is None else parts.line(numbers.blocks * self.block_bytes),
            adapters=adapters,
            room=numbers.blocks // len(self.groups) * self.settings.block_tokens,
        )


def _listed(sizes: Sequence[StepSize]) -> str:
    rows = ", ".join(str(one.rows) for one in reversed(sizes) if one.single)
    chunks = ", ".join(f"{one.tokens} in {one.rows}" for one in reversed(sizes) if not one.single)
    return f"{rows} rows; {chunks or 'no'} tokens in rows"


def _needs(settings: EngineSettings, dtype: torch.dtype, head_dim: int, types: tuple[str, ...] = ()) -> Needs:
    stored = getattr(torch, settings.kv_format.stored_as(str(dtype).removeprefix("torch.")))
    return Needs(dtype, [(head_dim, settings.block_tokens)], stored, types)


def keeping(settings: EngineSettings) -> Keeping:
    """How weights are kept: in panels where the CPU backend computes, quantised ones as their codes where
    another does. Loads nothing."""
    narrow = None if settings.kv_dtype == "auto" else getattr(torch, settings.kv_dtype)
    try:
        name, _ = named(settings.kernels, device_named(settings.device), Needs(torch.float32, stored=narrow))
    except BackendMissing:  # raised again where the backend is chosen
        return "dequantised"
    return "packed" if name == "cpu" else "quantised"


def named_backend(settings: EngineSettings, dtype: str, head_dim: int) -> tuple[str, str]:
    """The name of the kernel backend for a model of type ``dtype`` with heads of ``head_dim`` numbers, and
    why a faster one is not used ("" if none is passed over). Loads nothing.

    Raises `SettingsInvalid`: the backend asked for cannot compute this model here.
    """
    needs = _needs(settings, getattr(torch, dtype), head_dim)
    try:
        return named(settings.kernels, device_named(settings.device), needs)
    except BackendMissing as error:
        raise SettingsInvalid(str(error)) from error


def estimated_memory(settings: EngineSettings, weights: int) -> tuple[str, sizing.DeviceMemory | None]:
    """The name of the device, and what its own memory would be for with ``weights`` bytes of weights, as far as
    it is known before an engine measures it; None: it has none. Loads nothing. Raises `SettingsInvalid`."""
    device = device_named(settings.device)
    now = device_of(device).memory()
    if now is None:
        return str(device), None
    utilization, in_use = settings.memory_utilization, now.total - now.free
    return str(device), sizing.DeviceMemory(now.total, utilization, weights, None, None, in_use)
