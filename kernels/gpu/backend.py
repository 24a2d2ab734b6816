"""The GPU backend: `interface.Kernels` over the Triton kernels. Matrix products are torch's."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..batch import lay_out
from ..reference import backend
from ..reference import seeded_sampling as reference_sampling
from ..reference.backend import copy_pieces, fuse_layers, packed_linear, packed_rows
from ..reference.seeded_sampling import Typical
from . import rowwise, seeded_sampling
from .attention import paged_attention
from .low_rank import add_low_rank
from .penalties import allow, count, penalize
from .quantised import quantised_linear
from .rows import look_up
from .rowwise import add_norm, gated
from .seeded_sampling import log_probabilities
from .store import copy_blocks, rotate_and_store
from .support import check_supported

__all__ = [
    "add_low_rank",
    "add_norm",
    "allow",
    "by_slot",
    "check_supported",
    "copy_blocks",
    "copy_pieces",
    "count",
    "fuse_layers",
    "gated",
    "lay_out",
    "linear",
    "log_probabilities",
    "look_up",
    "numerics",
    "packed_linear",
    "packed_rows",
    "paged_attention",
    "penalize",
    "quantised_linear",
    "rms_norm",
    "rotate_and_store",
    "sample",
]

numerics = "triton/1"
by_slot = True


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, ``[tokens, in]`` to ``[tokens, out]``, by torch (the vendor's library)."""
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, ``x / sqrt(mean(x ** 2) + eps) * weight``, over the last axis."""
    if weight.shape != x.shape[-1:]:
        return backend.rms_norm(x, weight, eps)
    return rowwise.rms_norm(x, weight, eps)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    min_p: Tensor,
    typical: Typical | None = None,
) -> Tensor:
    """Sample one token id per row of ``logits`` ``[rows, vocab]``, int64 ``[rows]``: the same tokens as the
    reference, by launches that depend on the shape alone unless a row has ``typical`` sampling, which is the
    reference's.

    ``temperature`` (0: greedy), ``top_k`` (0: all), ``top_p`` (1: all), ``min_p`` (0: all), ``seeds``,
    ``positions`` (of the sampled token): ``[rows]``. ``typical``: the rows with typical sampling; None: no row.
    """
    limits = (logits, temperature, top_k, top_p, seeds, positions)
    if typical is not None:
        return reference_sampling.sample(*limits, min_p=min_p, typical=typical)
    return seeded_sampling.sample(*limits, min_p=min_p)
