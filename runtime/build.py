"""Builds an engine that is ready to serve from its settings, for an engine in a process of its own or in a
thread. Imports torch."""

from __future__ import annotations

import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeAlias

import torch

from ..kernels.backends import Backend, BackendMissing, Needs, choose, named, tell_compiling
from ..kernels.device import device_of
from ..kvstore.arena import DeviceArena
from ..kvstore.block_mover import BlockMover
from ..kvstore.errors import GroupInvalid
from ..kvstore.groups import KVGroup
from ..kvstore.host.tier import HostTier
from ..kvstore.keys import BlockHasher
from ..kvstore.pool import BlockPool
from .engine import Engine
from .errors import SettingsInvalid
from .execution.runner import TorchRunner
from .execution.warmup import rehearse
from .execution.watchdog import WatchedRunner
from .grammar import llguidance
from .kv_placement import sizing
from .kv_placement.costs import CostBook, measure, this_machine
from .kv_placement.tier_setup import asked_disk, costs_file, disk_tier, host_bytes, host_memory, host_tier
from .link.engine_end import LoadedEngine, LoadProgress
from .link.heartbeat import LOAD_STALL, Liveness
from .link.messages import Hello, Phase
from .model.config import read_defaults
from .model.load import LoadedModel, device_named, load_model
from .scheduler.scheduler import Scheduler
from .settings import SECRET_BYTES, EngineSettings, SchedulerSettings

KVGroups: TypeAlias = tuple[KVGroup, ...]
Arenas: TypeAlias = tuple[DeviceArena, ...]

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
    model = load_model(
        settings.model, settings.device, settings.dtype, progress, settings.max_context, settings.kv_format
    )
    try:
        with device_of(model.decoder.device).active(), ThreadPoolExecutor(1) as beside:
            groups = model.kv_groups(settings.block_tokens)
            numbers = _resolved(settings, model, groups)
            zeroed = beside.submit(_arenas, groups, numbers.blocks, model.decoder.device)
            backend = _backend(settings, model, liveness)
            model = replace(model, decoder=model.decoder.computing_by(backend.kernels))
            progress(1.0, "allocating the KV arena")
            arenas = zeroed.result()
            engine, mover = _engine(settings, numbers, model, arenas, liveness, memory, control)
    except GroupInvalid as error:
        raise SettingsInvalid(str(error)) from error

    hello = _hello(model, numbers, groups, backend)
    log.info(
        "loaded %s: %s, %s, kernels %s, context %d",
        *(hello.model, hello.device, hello.dtype, hello.kernels, hello.max_context),
    )

    def leave() -> None:
        engine.leave()
        if mover is not None:
            mover.close()

    return LoadedEngine(engine, hello, engine.due, leave, engine.answers)


def _resolved(settings: EngineSettings, model: LoadedModel, groups: KVGroups) -> SchedulerSettings:
    """The scheduler's settings, with the number of blocks and the context that fit the device's memory."""
    device, block_bytes = model.decoder.device, _block_bytes(groups)
    cuda = device.type == "cuda"
    allowed = sizing.cuda_kv_bytes(torch.cuda.mem_get_info(device)[0]) if cuda else sizing.host_kv_bytes()
    blocks = sizing.blocks_of(settings, block_bytes, allowed)
    if device.type == "cpu":
        asked = blocks * block_bytes + host_bytes(settings)
        named = "KV on the device and in the host tier (--kv-bytes, --host-bytes)"
        sizing.check_budget(named, asked, sizing.machine_bytes(), "this machine's memory")
    return settings.resolved(
        blocks=blocks,
        block_bytes=block_bytes,
        max_context=sizing.context_of(settings, blocks, model.config.max_context),
        vocab_size=model.config.vocab_size,
        depth=2 if device.type == "cuda" else 1,
    )


def _engine(
    settings: EngineSettings,
    numbers: SchedulerSettings,
    model: LoadedModel,
    arenas: Arenas,
    liveness: Liveness,
    memory: int | None,
    control: socket.socket | None,
) -> tuple[Engine, BlockMover | None]:
    device, groups = model.decoder.device, tuple(arena.group for arena in arenas)
    hasher = BlockHasher(settings.secret or os.urandom(SECRET_BYTES), settings.block_tokens)
    pool = BlockPool(numbers.blocks, debug=settings.debug)
    namespace = model.namespace(groups)
    tier = _tier(settings, memory, hasher, namespace, _block_bytes(groups))
    mover = None if tier is None else BlockMover(arenas, tier.memory, model.decoder.kernels.copy_pieces)
    disk = None
    if tier is not None and mover is not None and control is not None:
        disk = disk_tier(control, tier, settings, hasher, namespace, mover.reach)
    matchers = llguidance.Matchers()
    bare = TorchRunner(model.decoder, *arenas, mover=mover, grammars=matchers)
    runner = WatchedRunner(bare, liveness)
    gpu = device.type != "cpu"
    if gpu:
        tell_compiling(runner.compiling, runner.compiled)
    if mover is not None:  # before kernels run: registering holds up launches

        def pinning(fraction: float) -> None:
            liveness.enter(Phase.COMPILING, LOAD_STALL, "pinning the host tier's memory", fraction)

        mover.registration.begin(pinning)
    if tier is not None and gpu:  # a CPU's cores have the step to compute
        tier.check_adopted()
    rehearse(runner, settings.block_tokens, numbers.max_context, kernels=gpu)
    path = costs_file(settings, hasher, namespace) if disk is not None else None
    cuda = device.type == "cuda"
    processor = torch.cuda.get_device_name(device) if cuda else f"{torch.get_num_threads()} threads"
    costs = CostBook(path, machine=this_machine(processor), beside=cuda)
    if tier is not None and disk is not None and not costs.calibrated:
        liveness.enter(Phase.COMPILING, LOAD_STALL, "measuring what a restore costs", 1.0)
        costs.calibrate(
            measure(
                bare,
                slots=tier.memory.slots,
                blocks=numbers.blocks,
                block_tokens=settings.block_tokens,
                block_bytes=_block_bytes(groups),
            )
        )
    if settings.debug:
        for arena in arenas:
            arena.poison(range(numbers.blocks))
    compiler = _grammar_compiler(model)
    scheduler = Scheduler(numbers, pool, hasher, namespace, tier, disk, costs, compiler, matchers)
    if disk is not None:
        disk.wait_ready(DISK_SECONDS)
    return Engine(scheduler, runner, debug=settings.debug), mover


def _grammar_compiler(model: LoadedModel) -> llguidance.Compiler | None:
    """The compiler of grammars for the model's tokenizer; None if llguidance is not installed."""
    if not llguidance.available():
        return None
    return llguidance.Compiler(model.folder, model.config.vocab_size, model.config.eos_ids)


def _tier(
    settings: EngineSettings, memory: int | None, hasher: BlockHasher, namespace: bytes, block_bytes: int
) -> HostTier | None:
    if memory is not None:
        return host_tier(memory, hasher, namespace, block_bytes, debug=settings.debug)
    own = host_memory(settings)
    if own is None:
        return None
    try:
        return host_tier(own, hasher, namespace, block_bytes, debug=settings.debug)
    finally:
        os.close(own)


def _backend(settings: EngineSettings, model: LoadedModel, liveness: Liveness) -> Backend:
    def compiling(fraction: float, detail: str) -> None:
        liveness.enter(Phase.COMPILING, LOAD_STALL, detail, fraction)

    groups = model.kv_groups(settings.block_tokens)
    caches = [(group.head_dim, group.block_tokens) for group in groups]
    needs = Needs(model.decoder.dtype, caches, getattr(torch, groups[0].dtype))
    try:
        return choose(settings.kernels, model.decoder.device, needs, compiling)
    except BackendMissing as error:
        raise SettingsInvalid(str(error)) from error


def named_backend(settings: EngineSettings, dtype: str, head_dim: int) -> tuple[str, str]:
    """The name of the kernel backend for a model of type ``dtype`` with heads of ``head_dim`` numbers, and
    why a faster one is not used ("" if none is passed over). Loads nothing.

    Raises `SettingsInvalid`: the backend asked for cannot compute this model here.
    """
    stored = getattr(torch, settings.kv_format.stored_as(dtype))
    needs = Needs(getattr(torch, dtype), [(head_dim, settings.block_tokens)], stored)
    try:
        return named(settings.kernels, device_named(settings.device), needs)
    except BackendMissing as error:
        raise SettingsInvalid(str(error)) from error


def _block_bytes(groups: KVGroups) -> int:
    """Bytes of one block in all groups' arenas together."""
    return sum(group.block_bytes for group in groups)


def _arenas(groups: KVGroups, blocks: int, device: torch.device) -> Arenas:
    try:
        return tuple(DeviceArena(group, blocks, device) for group in groups)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:160]
        what = f"{blocks} blocks of {_block_bytes(groups)} bytes"
        limit = sizing.refusal(error, what) if device.type == "cpu" else None
        raise SettingsInvalid(limit or f"{what} do not fit on {device}: {reason}") from error


def _hello(model: LoadedModel, numbers: SchedulerSettings, groups: KVGroups, backend: Backend) -> Hello:
    return Hello(
        model=model.name,
        architecture=model.config.architecture,
        device=str(model.decoder.device),
        dtype=str(model.decoder.dtype).removeprefix("torch."),
        vocab_size=model.config.vocab_size,
        eos_ids=model.config.eos_ids,
        max_context=numbers.max_context,
        block_tokens=groups[0].block_tokens,
        blocks=numbers.blocks,
        block_bytes=_block_bytes(groups),
        parameters=model.parameters,
        defaults=read_defaults(model.folder),
        kernels=backend.name,
        kv_dtype=groups[0].dtype,
        notes=model.config.notes,
    )
