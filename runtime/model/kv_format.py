"""How a model's K and V are stored: as its numbers are, or in 8 bits with static scales.

A scale is a power of two, and is put into the weights when they are loaded: what is stored is K and V divided
by it, exactly, and neither a kernel nor a step multiplies anything more. Knows tensors' names; no arena, no
kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import frexp

from torch import Tensor

from ...kvstore.groups import DTYPE_BYTES as GROUP_BYTES
from ..errors import SettingsInvalid
from .config import ModelConfig

KV_DTYPES = ("auto", "float8_e4m3fn")
"""``auto``: the model's own."""

KV_BYTES = GROUP_BYTES
"""Bytes of a stored number, by its type's name."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """``dtype``: of `KV_DTYPES`. ``key_scale``, ``value_scale``: stored numbers times these are K and V.

    Raises:
        SettingsInvalid: another type, or a scale that is no power of two.
    """

    dtype: str = "auto"
    key_scale: float = 1.0
    value_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.dtype not in KV_DTYPES:
            raise SettingsInvalid(f"kv_dtype is {self.dtype!r}, not one of {', '.join(KV_DTYPES)}")
        for name, scale in (("key", self.key_scale), ("value", self.value_scale)):
            if not 2**-16 <= scale <= 2**16 or frexp(scale)[0] != 0.5:
                raise SettingsInvalid(
                    f"the scale of {name}s is {scale}, not a power of two from 2^-16 to 2^16"
                )

    def stored_as(self, dtype: str) -> str:
        """The type's name for a model of ``dtype``."""
        return dtype if self.dtype == "auto" else self.dtype

    def fold(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
        """Divide, in place, what makes K and V by their scales, and multiply what reads V.

        The scale of K is given back by the attention's own factor: see `Decoder`. A norm of K undoes any
        factor before it, so there it goes into the norm's weight.
        """
        if (self.key_scale, self.value_scale) == (1.0, 1.0):
            return
        queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
        for layer in range(config.layers):
            for name in (f"{layer}.qkv", f"{layer}.qkv_bias"):
                if name in tensors:
                    tensors[name][queries + keys :] /= self.value_scale
                    if config.family.qk_norm == "none":
                        tensors[name][queries : queries + keys] /= self.key_scale
            if config.family.qk_norm != "none":
                tensors[f"{layer}.k_norm"] /= self.key_scale
            tensors[f"{layer}.output"] *= self.value_scale


AS_COMPUTED = KVFormat()
"""K and V in the model's own type."""
