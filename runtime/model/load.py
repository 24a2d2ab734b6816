"""Loads a model: finds its folder, reads its shape and the weights, builds the decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...kvstore.groups import KVGroup
from ...kvstore.keys import namespace_digest
from ..errors import SettingsInvalid
from .checkpoint import Checkpoint
from .config import DTYPES, ModelConfig, read_config
from .decoder import Decoder
from .folder import find_model
from .kv_format import AS_COMPUTED, KVFormat
from .weights import allocate, assemble, fold_kv_scales, may_be_ignored, pieces_of


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded decoder. ``weights_digest``: of the content of the weights' files, 32 bytes."""

    name: str
    folder: Path
    config: ModelConfig
    decoder: Decoder
    weights_digest: bytes
    parameters: int
    kv: KVFormat = AS_COMPUTED

    def kv_groups(self, block_tokens: int) -> tuple[KVGroup, ...]:
        """One KV group per kind of layer, in the order of `ModelConfig.kinds`."""
        kind_of = self.config.kind_of
        return tuple(
            KVGroup(
                id=number,
                layers=tuple(layer for layer, its in enumerate(kind_of) if its == number),
                kv_heads=self.config.kv_heads,
                head_dim=self.config.head_dim,
                dtype=self.kv.stored_as(str(self.decoder.dtype).removeprefix("torch.")),
                block_tokens=block_tokens,
                window=kind.window,
                key_scale=self.kv.key_scale,
                value_scale=self.kv.value_scale,
            )
            for number, kind in enumerate(self.config.kinds)
        )

    def namespace(self, groups: Sequence[KVGroup]) -> bytes:
        """The namespace of this model's block keys. A key names one block in each group's arena."""
        return namespace_digest(weights=self.weights_digest, config=self.config.shaping_kv(), groups=groups)


def load_model(
    name: str | Path,
    device: str = "auto",
    dtype: str = "auto",
    progress: Callable[[float, str], None] = lambda done, what: None,
    max_context: int | None = None,
    kv: KVFormat = AS_COMPUTED,
) -> LoadedModel:
    """Load model ``name`` (``pocket``, a folder or a hub id).

    ``device``: as torch names it; ``auto``: CUDA if there is one. ``dtype``: ``float32``, ``bfloat16``,
    ``float16``; ``auto``: as stored. ``max_context``: the longest sequence to serve; rotary settings may
    depend on it. ``kv``: how K and V are stored. ``progress``: called with the fraction that is done, 0 to
    1, and what is being done.

    Raises:
        ModelUnreadable: a subclass, naming file and cause; nothing has been allocated then.
        SettingsInvalid: no such device or dtype.
    """
    progress(0.0, "reading the configuration")
    folder = find_model(str(name))
    config = read_config(folder, max_context)
    target, kind = device_named(device), dtype_named(dtype, config)
    pieces = pieces_of(config)
    with Checkpoint(folder) as checkpoint:
        checkpoint.check(pieces, lambda tensor: may_be_ignored(tensor, config))
        checkpoint.start_digest()
        tensors = allocate(pieces, target, kind)
        for number, piece in enumerate(pieces):
            stored = checkpoint.read(piece.name)
            # 1 + w in fp32: a small w would be lost in bf16.
            value = stored.float() + piece.offset if piece.offset else stored
            tensors[piece.into][piece.row : piece.row + piece.shape[0]].copy_(value)
            progress((number + 1) / len(pieces), f"loading {piece.name}")
        digest = checkpoint.digest()
    fold_kv_scales(kv, config, tensors)
    return LoadedModel(
        name=str(name),
        folder=folder,
        config=config,
        decoder=Decoder(config, assemble(config, tensors), key_scale=kv.key_scale),
        weights_digest=digest,
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        kv=kv,
    )


def device_named(name: str) -> torch.device:
    """The torch device of ``name``; ``auto``: CUDA if there is one. Raises ``SettingsInvalid``."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise SettingsInvalid(f"device {name}: not one of auto, cpu, cuda, cuda:N")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SettingsInvalid(f"device {name}: {' '.join(str(error).split())[:160]}") from error
    return device


def dtype_named(name: str, config: ModelConfig) -> torch.dtype:
    """The type of the weights of ``name``; ``auto``: as stored. Raises ``SettingsInvalid``."""
    resolved = (config.dtype or DTYPES[0]) if name == "auto" else name
    if resolved not in DTYPES:
        raise SettingsInvalid(f"dtype {name}: not one of auto, {', '.join(DTYPES)}")
    kind: torch.dtype = getattr(torch, resolved)
    return kind
