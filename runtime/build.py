"""From settings to an engine that is ready to serve: the runtime's parts put together.

For both forms of the link. Imports torch; knows every part's constructor and nothing of how they work.
"""

from __future__ import annotations

import os

import torch

from ..kvstore.arena import DeviceArena
from ..kvstore.errors import GroupInvalid
from ..kvstore.groups import KVGroup
from ..kvstore.keys import BlockHasher
from ..kvstore.pool import BlockPool
from .engine import Engine
from .errors import SettingsInvalid
from .link.messages import Hello
from .link.pulse import Pulse
from .link.serve import Loaded, Progress
from .model.defaults import read_defaults
from .model.load import LoadedModel, load_model
from .paced import PacedRunner
from .runner import TorchRunner
from .scheduler import Scheduler
from .settings import EngineSettings, SchedulerSettings
from .sizing import blocks_of, context_of, cuda_kv_bytes, host_kv_bytes

SECRET_BYTES = 32


def load_engine(settings: EngineSettings, progress: Progress, pulse: Pulse) -> Loaded:
    """Load the model and build its engine; ``pulse`` is told before each step how long it may take.

    Raises:
        ModelUnreadable: naming file and cause.
        SettingsInvalid: settings that contradict the model or the device's memory.
    """
    model = load_model(settings.model, settings.device, settings.dtype, progress)
    progress(1.0, "allocating the KV arena")
    try:
        engine, numbers, group = _engine(settings, model, pulse)
    except GroupInvalid as error:
        raise SettingsInvalid(str(error)) from error
    return Loaded(engine, _hello(model, numbers, group))


def _engine(
    settings: EngineSettings, model: LoadedModel, pulse: Pulse
) -> tuple[Engine, SchedulerSettings, KVGroup]:
    device = model.decoder.device
    group = model.kv_group(settings.block_tokens)
    blocks = blocks_of(settings, group.block_bytes, _allowed_bytes(device))
    numbers = settings.resolved(
        blocks=blocks,
        max_context=context_of(settings, blocks, model.config.max_context),
        vocab_size=model.config.vocab_size,
        depth=2 if device.type == "cuda" else 1,
    )
    arena = _arena(group, blocks, device)
    if settings.debug:
        arena.poison(range(blocks))
    hasher = BlockHasher(settings.secret or os.urandom(SECRET_BYTES), settings.block_tokens)
    pool = BlockPool(blocks, settings.block_tokens, debug=settings.debug)
    scheduler = Scheduler(numbers, pool, hasher, model.namespace(group))
    runner = PacedRunner(TorchRunner(model.decoder, arena), pulse)
    return Engine(scheduler, runner, debug=settings.debug), numbers, group


def _allowed_bytes(device: torch.device) -> int:
    return cuda_kv_bytes(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else host_kv_bytes()


def _arena(group: KVGroup, blocks: int, device: torch.device) -> DeviceArena:
    try:
        return DeviceArena(group, blocks, device)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:160]
        raise SettingsInvalid(
            f"{blocks} blocks of {group.block_bytes} bytes do not fit on {device}: {reason}"
        ) from error


def _hello(model: LoadedModel, numbers: SchedulerSettings, group: KVGroup) -> Hello:
    return Hello(
        model=model.name,
        architecture=model.config.architecture,
        device=str(model.decoder.device),
        dtype=group.dtype,
        vocab_size=model.config.vocab_size,
        eos_ids=model.config.eos_ids,
        max_context=numbers.max_context,
        block_tokens=group.block_tokens,
        blocks=numbers.blocks,
        block_bytes=group.block_bytes,
        parameters=model.parameters,
        defaults=read_defaults(model.folder),
    )
