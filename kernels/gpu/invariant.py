"""The batch-invariant GPU backend: a token's numbers depend on its own sequence only.

They do not depend on the rest of the batch, on how a prompt was cut into chunks, or on whether a token was
computed again. So greedy outputs are equal on every path, in any type. It is slower than `backend` and shares
its row-wise operations: norms, rotation, activation, sampling.
"""

from __future__ import annotations

from ..batch import lay_out
from ..reference.backend import copy_pieces, fuse_layers, packed_linear, packed_rows
from .backend import (
    add_low_rank,
    add_norm,
    allow,
    by_slot,
    count,
    gated,
    log_probabilities,
    look_up,
    penalize,
    rms_norm,
    rotate_and_store,
    sample,
)
from .invariant_kernels import extend_attention as paged_attention
from .invariant_kernels import linear
from .quantised import invariant_linear as quantised_linear
from .store import copy_blocks

__all__ = [
    "add_low_rank",
    "add_norm",
    "allow",
    "by_slot",
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

numerics = "triton-invariant/1"
