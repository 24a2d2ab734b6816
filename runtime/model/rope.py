"""Rotary position embedding: the angles of a position.

Source: Su et al., "RoFormer" (2021); linear stretching by kaiokendev; YaRN by Peng et al. (2023). Formulas as
in transformers' ``modeling_rope_utils``. Computed per step from the frequencies: no table that a context
could outgrow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import RopeConfig


@dataclass(frozen=True, slots=True)
class Rope:
    """``frequencies``: radians per position, fp32 ``[head_dim / 2]``. ``gain``: the factor on cos and sin."""

    frequencies: Tensor
    gain: float

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cos and sin of int64 ``positions`` ``[tokens]``, each ``[tokens, head_dim]``, both halves alike."""
        angles = positions[:, None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.gain).to(dtype), (angles.sin() * self.gain).to(dtype)


def make_rope(config: RopeConfig, head_dim: int, device: torch.device) -> Rope:
    """The frequencies of a head of ``head_dim``."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / config.theta**exponents
    if config.kind != "yarn":
        return Rope((plain / config.factor).to(device), 1.0)
    keep = 1 - _ramp(config, head_dim)
    stretched = 1.0 / (config.factor * config.theta**exponents)
    gain = config.attention
    if gain is None:
        gain = 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0
    return Rope((stretched * (1 - keep) + plain * keep).to(device), gain)


def _ramp(config: RopeConfig, head_dim: int) -> Tensor:
    """How far each frequency is stretched: 0 for those that turn often in the trained context, 1 for slow."""

    def pair_that_turns(rotations: float) -> float:
        turns = config.original / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp would divide by zero
    return ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
