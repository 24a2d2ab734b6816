"""Rotary position embedding: the angles of a position.

Source: Su et al., "RoFormer" (2021); linear stretching by kaiokendev; dynamic NTK by bloc97 and emozilla; YaRN
by Peng et al. (2023); LongRoPE by Ding et al. (2024); Llama 3.1's own. Formulas as in transformers'
``modeling_rope_utils``. Computed per step from the frequencies: no table that a context could outgrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .rope_settings import RopeConfig


@dataclass(frozen=True, slots=True)
class Rope:
    """``frequencies``: radians per position, fp32 ``[dim / 2]``; ``config.gain``: the factor on cos and sin.

    ``exponents``: fp32 ``[dim / 2]``, of the period of each pair. Both lie on the device that computes: angles
    are made in every step, and a copy from the host would make it wait for the device.
    """

    config: RopeConfig
    frequencies: Tensor
    exponents: Tensor

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cos and sin of int64 ``positions`` ``[tokens]``, each ``[tokens, dim]``, both halves alike."""
        stretched = self.config.kind == "dynamic"
        frequencies = self._by_length(positions) if stretched else self.frequencies
        angles = positions[:, None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.config.gain).to(dtype), (angles.sin() * self.config.gain).to(dtype)

    def _by_length(self, positions: Tensor) -> Tensor:
        """Dynamic NTK: the frequencies of a sequence that ends with each token, ``[tokens, dim / 2]``.

        That is what transformers' cached generation turns a token by when it comes alone. By its position only,
        so that kept keys stay true; a prompt longer than the trained context transformers turns by its whole
        length.
        """
        config = self.config
        length = (positions + 1).clamp(min=config.original).float()
        growth = config.factor * length / config.original - (config.factor - 1)
        base = config.theta * growth ** (config.dim / (config.dim - 2))
        return 1.0 / base[:, None] ** self.exponents


def make_rope(config: RopeConfig, device: torch.device) -> Rope:
    """The frequencies of ``config``."""
    exponents = _exponents(config)
    frequencies = _FREQUENCIES[config.kind](config, config.theta**exponents)
    return Rope(config, frequencies.to(device), exponents.to(device))


def _exponents(config: RopeConfig) -> Tensor:
    return torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim


def _plain(config: RopeConfig, periods: Tensor) -> Tensor:
    return 1.0 / periods


def _linear(config: RopeConfig, periods: Tensor) -> Tensor:
    return 1.0 / periods / config.factor


def _longrope(config: RopeConfig, periods: Tensor) -> Tensor:
    return 1.0 / (torch.tensor(config.divisors, dtype=torch.float32) * periods)


def _yarn(config: RopeConfig, periods: Tensor) -> Tensor:
    keep = 1 - _ramp(config)
    return 1.0 / (config.factor * periods) * (1 - keep) + 1.0 / periods * keep


def _llama3(config: RopeConfig, periods: Tensor) -> Tensor:
    """Frequencies that turn often in the trained context stay, seldom ones stretch, between them smoothly."""
    frequencies = 1.0 / periods
    lengths = 2 * math.pi / frequencies
    low, high = config.low_freq_factor, config.high_freq_factor
    smooth = (config.original / lengths - low) / (high - low)
    between = (1 - smooth) * frequencies / config.factor + smooth * frequencies
    seldom, often = lengths > config.original / low, lengths < config.original / high
    return torch.where(seldom, frequencies / config.factor, torch.where(often, frequencies, between))


_FREQUENCIES: Mapping[str, Callable[[RopeConfig, Tensor], Tensor]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _plain,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _ramp(config: RopeConfig) -> Tensor:
    """How far each frequency is stretched: 0 for those that turn often in the trained context, 1 for slow."""

    def pair_that_turns(rotations: float) -> float:
        turns = config.original / (rotations * 2 * math.pi)
        return config.dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001  # the ramp would divide by zero
    return ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
