"""The scales of stored K and V, put into the weights. Knows tensors' names; no arena, no kernel."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .config import ModelConfig
from .kv_format import KVFormat


def fold(kv: KVFormat, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Divide, in place, what makes K and V by their scales, and multiply what reads V.

    The scale of K is given back by the attention's own factor: see `Decoder`. A norm of K undoes any
    factor before it, so there it goes into the norm's weight.
    """
    if (kv.key_scale, kv.value_scale) == (1.0, 1.0):
        return
    queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    for layer in range(config.layers):
        for name in (f"{layer}.qkv", f"{layer}.qkv_bias"):
            if name in tensors:
                tensors[name][queries + keys :] /= kv.value_scale
                if config.family.qk_norm == "none":
                    tensors[name][queries : queries + keys] /= kv.key_scale
        if config.family.qk_norm != "none":
            tensors[f"{layer}.k_norm"] /= kv.key_scale
        tensors[f"{layer}.output"] *= kv.value_scale
