"""How a model's K and V are stored: in the model's own type, or in 8 bits with static scales.

A scale is a power of two and is folded into the weights at load time (``weights.fold_kv_scales``). So K and
V are computed already divided by it, without rounding, and no kernel multiplies by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp

from ...kvstore.groups import DTYPE_BYTES as GROUP_BYTES
from ..errors import SettingsInvalid

DTYPES = ("float32", "bfloat16", "float16")
"""The types in which a model can compute."""

KV_DTYPES = ("auto", "float8_e4m3fn")
"""The types in which K and V can be stored; ``auto``: the model's own."""

KV_BYTES = GROUP_BYTES
"""Bytes per stored number, by the name of its type."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How K and V are stored. ``dtype``: one of `KV_DTYPES`. K is the stored number times ``key_scale``, V
    the stored number times ``value_scale``.

    Raises:
        SettingsInvalid: another type, or a scale that is not a power of two from 2^-16 to 2^16.
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
                    f"kv_scales: the scale of {name}s is {scale}, not a power of two from 2^-16 to 2^16"
                )

    def stored_as(self, dtype: str) -> str:
        """The name of the type in which K and V are stored, for a model that computes in ``dtype``: that type
        if the format's is ``auto``."""
        return dtype if self.dtype == "auto" else self.dtype


AS_COMPUTED = KVFormat()
"""K and V in the model's own type, unscaled."""
