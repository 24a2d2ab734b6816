"""Weights in a GGUF file, presented as a safetensors checkpoint of the same model has them.

Tensors have the checkpoint's names, and their rows its order. The offset that ggml adds to norms is taken away.
Quantised tensors stay packed, or are dequantised to float32, one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.packed import Packed, packed
from ...kernels.packed_types import GGML
from ..errors import TensorInvalid
from .checkpoint import StoredWeights
from .config import ModelConfig
from .fields import StoredTensor
from .gguf_config import ROPE_FACTORS, architecture_of
from .gguf_file import SERVED, GGUFFile
from .weights import Piece

_AS_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LAYER = re.compile(r"^model\.layers\.([0-9]+)\.")
ROWS = 1024
"""How many rows are dequantised at a time. The library needs memory of twice their float32 size."""


class GGUFWeights(StoredWeights):
    """The tensors of an open GGUF file. ``config``: as `read_config` reads it from the same file.

    Raises:
        ModelUnreadable: the header is broken, or the architecture is not served.
    """

    asks = "the metadata ask"
    types = SERVED

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._file = GGUFFile(path)
        name, architecture = architecture_of(self._file)
        kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
        self._names = get_tensor_name_map(kinds[name], 1)  # of one layer: all are alike
        heads = {"q_proj": config.query_heads, "k_proj": config.kv_heads}
        self._sorted_heads = heads if architecture.interleaved else {}
        self._norm_offset = config.family.norm_offset
        super().__init__((path,), {})

    def check(self, pieces: Sequence[Piece], ignorable: Callable[[str], bool]) -> None:
        """As `StoredWeights.check`; the file may have `ROPE_FACTORS`."""
        names = {self._stored_name(piece.name): piece.name for piece in pieces}
        self.tensors = {
            names.get(name, name): stored
            for name, stored in self._file.tensors.items()
            if name != ROPE_FACTORS
        }
        super().check(pieces, ignorable)

    def read(self, name: str) -> Tensor:
        """Read one tensor to the CPU by its name in a checkpoint: in its stored type, or float32 if it is
        quantised or ggml has added an offset to it."""
        value = self._unpacked(self._file.tensors[self._stored_name(name)])
        if self._heads(name):
            value = value[torch.from_numpy(self._order(name, len(value)))]
        lifted = self._norm_offset and name.endswith("norm.weight")
        return value.float() - self._norm_offset if lifted else value

    def packed_type(self, name: str) -> str | None:
        stored = self.tensors[name]
        return stored.dtype if stored.dtype in GGML and len(stored.shape) == 2 else None

    def packed(self, names: Sequence[str], told: Callable[[int], None] = lambda count: None) -> Packed:
        some = [self._file.tensors[self._stored_name(name)] for name in names]
        orders = [self._order(name, stored.shape[0]) for name, stored in zip(names, some, strict=True)]
        raws = [self._file.array(stored) for stored in some]

        def part(count: int) -> None:
            self._file.forget()  # so that a large matrix is not in memory twice
            told(count)

        try:
            return packed(GGML[some[0].dtype], raws, some[0].shape[1], orders, part)
        except ValueError as error:
            names_of = ", ".join(stored.name for stored in some)
            raise TensorInvalid(f"{self._file.path}: {names_of}: {error}") from None

    def _stored_name(self, name: str) -> str:
        """The name in the GGUF file of the checkpoint's tensor ``name``; ``name`` itself if the architecture
        has no such tensor."""
        layer = _LAYER.match(name)
        alike = _LAYER.sub("model.layers.0.", name)
        found: str | None = self._names.get_name(alike, try_suffixes=(".weight", ".bias"))
        if found is None:
            return name
        return found if layer is None else found.replace("blk.0.", f"blk.{layer[1]}.", 1)

    def _order(self, name: str, rows: int) -> NDArray[np.int64]:
        """Which row of the file each row of the tensor is: 0, 2, ..., 1, 3, ... in a head whose rows are
        sorted."""
        order, heads = np.arange(rows), self._heads(name)
        return order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1) if heads else order

    def _heads(self, name: str) -> int:
        """The number of heads of a q or k tensor that has the rows which rotate together side by side
        (``GGUFArchitecture.interleaved``), so that they are to be sorted; 0 for any other tensor."""
        return self._sorted_heads.get(name.rpartition("self_attn.")[2].partition(".")[0], 0)

    def _unpacked(self, stored: StoredTensor) -> Tensor:
        packed = self._file.array(stored)
        if stored.dtype in _AS_STORED:
            return torch.frombuffer(bytearray(packed), dtype=_AS_STORED[stored.dtype]).view(stored.shape)
        kind, numbers = GGMLQuantizationType[stored.dtype], torch.empty(stored.shape)
        rows = numbers.view(-1, stored.shape[-1])
        blocks = packed.reshape(len(rows), -1)
        for begin in range(0, len(rows), ROWS):
            rows[begin : begin + ROWS] = torch.from_numpy(dequantize(blocks[begin : begin + ROWS], kind))
        return numbers
