"""Weights of a model in the forms in which they are kept: products with them, and their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .interface import Kernels
from .low_rank import LowRank
from .packed import Packed
from .quantised import Quantised


@dataclass(frozen=True, slots=True)
class Permuted:
    """A quantised matrix ``[out, in]`` whose columns are in another order, so that those of a group are
    neighbours. ``order``: which number of an input each column is for, int64 ``[in]``."""

    matrix: Packed | Quantised
    order: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``, as a tensor has it."""
        return self.matrix.shape


Matrix: TypeAlias = Tensor | Packed | Quantised | Permuted
"""The numbers of a matrix ``[out, in]``: as a tensor, packed in panels, or quantised."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear map, ``x @ weight.T + bias``. ``matrices``: the weight's rows, one matrix behind the other,
    which may be of different forms. ``bias``: ``[out]``; None: no bias. ``pairs``: what adapters add; None: it
    has no room for any."""

    matrices: tuple[Matrix, ...]
    bias: Tensor | None = None
    pairs: LowRank | None = None

    def __call__(self, x: Tensor, kernels: Kernels, slots: Tensor | None = None) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out]``, computed by ``kernels``. ``slots``: of each token's adapter,
        int64 ``[tokens]``, -1 for none; None: no token has one."""
        out = self._without_adapters(x, kernels)
        if slots is not None and self.pairs is not None:
            kernels.add_low_rank(out, x, self.pairs, slots)
        return out

    def _without_adapters(self, x: Tensor, kernels: Kernels) -> Tensor:
        if len(self.matrices) == 1:
            return _product(x, self.matrices[0], self.bias, kernels)
        sizes = [matrix.shape[0] for matrix in self.matrices]
        biases = [None] * len(sizes) if self.bias is None else torch.split(self.bias, sizes)
        pairs = zip(self.matrices, biases, strict=True)
        return torch.cat([_product(x, matrix, bias, kernels) for matrix, bias in pairs], dim=1)


def _product(x: Tensor, matrix: Matrix, bias: Tensor | None, kernels: Kernels) -> Tensor:
    if isinstance(matrix, Permuted):
        return _product(x[:, matrix.order], matrix.matrix, bias, kernels)
    if isinstance(matrix, Packed):
        return kernels.packed_linear(x, matrix, bias)
    if isinstance(matrix, Quantised):
        return kernels.quantised_linear(x, matrix, bias)
    return kernels.linear(x, matrix, bias)


def rows_of(table: Tensor | Packed, ids: Tensor, dtype: torch.dtype, kernels: Kernels) -> Tensor:
    """The rows ``ids`` (int64 ``[n]``) of ``table``: ``[n, in]`` in ``dtype``."""
    if isinstance(table, Packed):
        return kernels.packed_rows(table, ids, dtype)
    return F.embedding(ids, table)
