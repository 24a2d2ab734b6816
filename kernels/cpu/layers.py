"""All layers of a decoder as one program: one call of compiled code for a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..batch import PagedBatch
from ..interface import HeadNorm
from ..layer import Layer, LayerSizes
from ..linear import Linear, Matrix
from ..low_rank import LowRank
from ..packed import Packed
from . import elementwise
from .batch import CpuBatch
from .compiling import parts_for
from .program import (
    ADAPT,
    ATTEND,
    GATE,
    MATRICES,
    MULTIPLY,
    NORM,
    OPERANDS,
    ROTATE,
    at_once,
    attention_bytes,
    piece,
    run,
    scratch_bytes,
)

GATES = {"silu": elementwise.SILU, "gelu_tanh": elementwise.GELU_TANH}

LEAST = 1 << 17
"""The least multiplications of a thread: with fewer in a step, one thread computes it."""

_STEP = (
    "tokens",
    "x",
    "residual",
    "qkv",
    "query",
    "attended",
    "y",
    "gate_up",
    "gated",
    "scratch",
    "singles",
    "longest",
    "singles_at",
    "found",
    "chunks",
    "most",
    "chunks_at",
    "starts",
    "contexts",
    "adapters",
    "arena",
    "layers",
    "block_tokens",
)
"""The values of a program that differ from step to step, in order; those of kinds of layers and KV groups
follow."""
_KIND = ("cos", "sin", "turning")
_GROUP = ("slots", "tables", "widest")


def fits(layers: Sequence[Layer]) -> bool:
    """Whether `Layers` can compute these: all matrices are packed."""
    return all(isinstance(matrix, Packed) for matrix in _matrices(layers))


def norm_kind(norm: HeadNorm | None) -> int:
    """The number of a norm of queries and keys, for `elementwise.rotate_tokens`."""
    if norm is None:
        return elementwise.NO_NORM
    return elementwise.WHOLE if norm.whole else elementwise.PER_HEAD


def matrices_of(matrices: Sequence[Matrix], bias: Tensor | None, dtype: torch.dtype) -> list[int]:
    """The last operands of a `MULTIPLY` with packed ``matrices``, for activations of ``dtype``."""
    operands, at = [], 0 if bias is None else bias.data_ptr()
    for matrix in matrices:
        assert isinstance(matrix, Packed)
        operands += [piece(matrix.kind.name, dtype), matrix.data.data_ptr(), at, matrix.rows]
        at += matrix.rows * dtype.itemsize if at else 0
    return [*operands, *[0] * (4 * (MATRICES - len(matrices))), dtype.itemsize]


def batch_operands(batch: CpuBatch, scratch: Tensor) -> tuple[int, ...]:
    """The first operands of an `ATTEND` of a batch."""
    singles, chunks = (each.__array_interface__["data"][0] for each in (batch.singles, batch.chunks))
    rows = (batch.singles.size, batch.longest, singles, scratch.data_ptr())
    return *rows, batch.chunks.size, batch.most, chunks


def tables_of(batch: CpuBatch) -> tuple[int, ...]:
    """The last operands of an `ATTEND` of a batch."""
    tensors = (batch.row_starts, batch.context_lengths, batch.tables)
    return *(each.data_ptr() for each in tensors), batch.tables.shape[1]


def adapt_operands(
    rows: int | str, x: int | str, out: int | str, pairs: LowRank, slots: int | str
) -> list[int | str]:
    """The operands of an `ADAPT`: numbers and addresses, or the names of such."""
    _, parts, depth, room = pairs.a.shape
    arrays: list[int | str] = [one.data_ptr() for one in (pairs.a, pairs.b, pairs.ranks, pairs.starts)]
    return [
        rows,
        x,
        out,
        *arrays,
        slots,
        pairs.width,
        sum(pairs.widths),
        depth,
        parts,
        room,
        pairs.b.shape[1],
    ]


class Layers:
    """`kernels.layer.FusedLayers` on the CPU."""

    def __init__(self, layers: Sequence[Layer], sizes: LayerSizes) -> None:
        """``layers``: all their matrices are packed."""
        self._layers = layers  # their weights are in the program by address
        self._sizes = sizes
        kinds, groups = (
            1 + max(each) for each in zip(*((one.kind, one.group) for one in layers), strict=True)
        )
        names = [*_STEP, *(f"{name} {kind}" for kind in range(kinds) for name in _KIND)]
        names += [f"{name} {group}" for group in range(groups) for name in _GROUP]
        self._indexes = {name: index for index, name in enumerate(names)}
        self._values = [0] * len(names)
        self._known: dict[int, int] = {}
        self._factors: list[float] = [0.0]
        self._inner: int = layers[0].weights.down.matrices[0].shape[1]
        self._products = {(each.matrices[0].shape[1], len(each.matrices)) for each in _linears(layers)}
        self._work = sum(matrix.shape[0] * matrix.shape[1] for matrix in _matrices(layers))
        self._program = np.array([row for layer in layers for row in self._rows(layer, adapted=False)])
        self._adapted = self._program  # where there is no room for adapters
        if layers[0].weights.qkv.pairs is not None:
            self._adapted = np.array([row for layer in layers for row in self._rows(layer, adapted=True)])
        self._numbers = np.array(self._values)
        self._factor_array = np.array(self._factors)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        angles: Sequence[tuple[Tensor, Tensor]],
        batches: Sequence[PagedBatch],
        arena: Tensor,
    ) -> Tensor:
        """As `FusedLayers`; ``batches`` are made by this backend's `lay_out`."""
        batch = batches[0]
        assert isinstance(batch, CpuBatch), "a batch is laid out by the backend that attends to it"
        of, tokens = self._sizes, len(x)
        parts = at_once(parts_for(tokens * self._work, LEAST))
        wide, queries = of.q_heads + 2 * of.kv_heads, of.q_heads * of.head_dim
        sizes = [tokens * wide * of.head_dim, tokens * queries, tokens * queries, tokens * of.hidden]
        sizes += [2 * tokens * self._inner, tokens * self._inner]
        room = torch.empty(sum(sizes), dtype=of.dtype)
        rooms = [room.data_ptr() + sum(sizes[:at]) * of.dtype.itemsize for at in range(len(sizes))]
        most = max(scratch_bytes(tokens, width, count, parts) for width, count in self._products)
        scratch = torch.empty(most, dtype=torch.uint8)
        found = torch.empty(attention_bytes(batch, of.q_heads, of.head_dim), dtype=torch.uint8)
        values = [tokens, x.data_ptr(), residual.data_ptr(), *rooms, scratch.data_ptr()]
        values += [
            *batch_operands(batch, found),
            batch.row_starts.data_ptr(),
            batch.context_lengths.data_ptr(),
        ]
        values.append(0 if batch.adapters is None else batch.adapters.data_ptr())
        values += [arena.data_ptr(), arena.shape[1], arena.shape[4]]
        for cos, sin in angles:
            values += [cos.data_ptr(), sin.data_ptr(), cos.shape[-1]]
        for one in batches:
            values += [one.slots.data_ptr(), one.tables.data_ptr(), one.tables.shape[1]]
        numbers = self._numbers.copy()  # several threads may call at once
        numbers[: len(values)] = values
        program = self._program if batch.adapters is None else self._adapted
        run(parts, program, numbers, self._factor_array, of.dtype)
        return x

    def _of(self, value: int) -> int:
        """The index of a value that is the same in every step."""
        if value not in self._known:
            self._known[value] = len(self._values)
            self._values.append(value)
        return self._known[value]

    def _row(self, operation: int, *operands: int | str, factors: tuple[float, ...] = ()) -> list[int]:
        """A row of the program. Operands: values, or the names of values that differ from step to step."""
        indexes = [self._indexes[one] if isinstance(one, str) else self._of(one) for one in operands]
        row = [operation, *(self._factor(one) for one in factors)]
        return [*row, *[0] * (3 - len(row)), *indexes, *[self._of(0)] * (OPERANDS - len(indexes))]

    def _factor(self, factor: float) -> int:
        self._factors.append(float(factor))
        return len(self._factors) - 1

    def _rows(self, layer: Layer, *, adapted: bool) -> list[list[int]]:
        """The operations of a layer. ``adapted``: some tokens have adapters."""
        sizes, kind, group, head_norm = self._sizes, layer.kind, layer.group, layer.head_norm
        heads = (sizes.q_heads, sizes.kv_heads, sizes.head_dim)
        wide, queries = (sizes.q_heads + 2 * sizes.kv_heads) * sizes.head_dim, sizes.q_heads * sizes.head_dim
        norm, eps = (0, 0.0) if head_norm is None else (head_norm.weight.data_ptr(), head_norm.eps)
        weights, how, inner = layer.weights, layer.attention, self._inner
        turn = (f"slots {group}", "qkv", norm, norm_kind(head_norm), f"cos {kind}", f"sin {kind}", "arena")
        blocks = ("block_tokens", "layers", layer.number)
        rows = ("singles", "longest", "singles_at", "found", "chunks", "most", "chunks_at")
        context = ("arena", "starts", "contexts", f"tables {group}", f"widest {group}")
        attend = (how.window or 0, "query", "attended", *context)
        return [
            *self._product(weights.qkv, sizes.hidden, "x", "qkv", wide, adapted=adapted),
            self._row(ROTATE, "tokens", *heads, f"turning {kind}", *blocks, *turn, "query", factors=(eps,)),
            self._row(ATTEND, *rows, *heads, *blocks, *attend, factors=(how.scale, how.soft_cap or 0.0)),
            *self._product(weights.output, queries, "attended", "y", sizes.hidden, adapted=adapted),
            *self._join(weights.after_attention, weights.before_mlp),
            *self._product(weights.gate_up, sizes.hidden, "x", "gate_up", 2 * inner, adapted=adapted),
            self._row(GATE, "tokens", inner, "gate_up", "gated", GATES[sizes.activation]),
            *self._product(weights.down, inner, "gated", "y", sizes.hidden, adapted=adapted),
            *self._join(weights.after_mlp, layer.next_norm),
        ]

    def _product(
        self, linear: Linear, width: int, x: str, out: str, columns: int, *, adapted: bool
    ) -> list[list[int]]:
        matrices = matrices_of(linear.matrices, linear.bias, self._sizes.dtype)
        rows = [self._row(MULTIPLY, "tokens", width, x, "scratch", out, columns, *matrices)]
        if adapted and linear.pairs is not None:
            rows.append(self._row(ADAPT, *adapt_operands("tokens", x, out, linear.pairs, "adapters")))
        return rows

    def _join(self, after: Tensor | None, before: Tensor | None) -> list[list[int]]:
        """Add a sublayer's output to the residual, and make the next one's input."""
        hidden, eps, rows = self._sizes.hidden, self._sizes.eps, []
        if after is not None:
            norm = ("tokens", hidden, "y", 0, after.data_ptr(), 0, "y")
            rows.append(self._row(NORM, *norm, factors=(eps,)))
        weight = 0 if before is None else before.data_ptr()
        join = ("tokens", hidden, "y", "residual", weight, "residual", "x")
        return [*rows, self._row(NORM, *join, factors=(eps,))]


def _linears(layers: Sequence[Layer]) -> list[Linear]:
    weights = [layer.weights for layer in layers]
    return [one for each in weights for one in (each.qkv, each.output, each.gate_up, each.down)]


def _matrices(layers: Sequence[Layer]) -> list[Matrix]:
    return [matrix for linear in _linears(layers) for matrix in linear.matrices]
