"""The types of weights in panels (`packed`). No torch.

Sources: ggml's ``ggml-common.h`` and ``ggml-quants.c``; for MXFP4 the Open Compute Project's "Microscaling
Formats (MX)" 1.0."""

from __future__ import annotations

from dataclasses import dataclass

PANEL = 16
"""Rows of a panel."""
RUN = 32
"""Numbers of a row that share one scale of the activations."""

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the value


@dataclass(frozen=True, slots=True)
class PackedType:
    """A type of numbers in panels.

    ``number``: distinguishes it in compiled code; 0: the numbers are not quantised, and have a plane of their
    bits, no scale and no code. ``bytes``: of one row's block in a file. ``block``: numbers
    of a block. ``group``: numbers with one scale. ``planes``: the bits of a code in each plane, lowest first:
    4 (nibbles), 2 (pairs), 1 (bits), 8 (bytes). ``zero``: the code of the number 0, subtracted from each
    code. ``offset``: whether there are offsets. ``table``: what codes stand for, plus ``zero``; None: they
    stand for themselves. ``joined``: whether ``scales`` has a scale in the low half of each byte and an
    offset in the high half. ``signed``: whether ``scales`` are int8. ``exponent``: whether ``scale`` is an
    exponent of 8 bits instead of a float16. ``wide``: whether a block's ``scale`` and ``offset`` are float32,
    and its only ones. ``token``: whether all activations of a token have one scale, instead of each run.
    """

    name: str
    number: int
    bytes: int
    block: int
    group: int
    planes: tuple[int, ...]
    zero: int = 0
    offset: bool = False
    table: tuple[int, ...] | None = None
    joined: bool = False
    signed: bool = False
    exponent: bool = False
    wide: bool = False
    token: bool = False

    @property
    def groups(self) -> int:
        """How many factors of its scale a block of one row has; 0: none."""
        return self.block // self.group if self.block > RUN and not self.wide else 0

    @property
    def span(self) -> int:
        """How many neighbouring numbers have one scale, its factor included."""
        return self.group if self.groups else self.block

    @property
    def scale_bytes(self) -> int:
        """The bytes of a block's ``scale``."""
        return 1 if self.exponent else 4 if self.wide else 2

    @property
    def head(self) -> int:
        """The bytes of a panel's block before its codes."""
        if not self.number:
            return 0
        scales = PANEL * self.scale_bytes * (2 if self.offset else 1)
        return scales + PANEL * self.groups * (2 if self.offset and not self.joined else 1)

    @property
    def run(self) -> int:
        """The bytes of a panel's codes of 32 numbers."""
        return PANEL * RUN * sum(self.planes) // 8

    def bytes_of(self, rows: int, width: int) -> int:
        """The bytes of a packed matrix ``[rows, width]``."""
        return -(-rows // PANEL) * -(-width // self.block) * self.unit

    @property
    def unit(self) -> int:
        """The bytes of a panel's block."""
        return self.head + self.block // RUN * self.run


GGML = {
    one.name: one
    for one in (
        PackedType("Q4_0", 1, 18, 32, 32, (4,), zero=8),
        PackedType("Q4_1", 2, 20, 32, 32, (4,), offset=True),
        PackedType("Q5_0", 3, 22, 32, 32, (4, 1), zero=16),
        PackedType("Q5_1", 4, 24, 32, 32, (4, 1), offset=True),
        PackedType("Q8_0", 5, 34, 32, 32, (8,), zero=128),
        PackedType("Q2_K", 6, 84, 256, 16, (2,), offset=True, joined=True),
        PackedType("Q3_K", 7, 110, 256, 16, (2, 1), zero=4, signed=True),
        PackedType("Q4_K", 8, 144, 256, 32, (4,), offset=True),
        PackedType("Q5_K", 9, 176, 256, 32, (4, 1), offset=True),
        PackedType("Q6_K", 10, 210, 256, 16, (4, 2), zero=32, signed=True),
        PackedType("IQ4_NL", 11, 18, 32, 32, (4,), zero=128, table=_IQ4),
        PackedType("IQ4_XS", 12, 136, 256, 32, (4,), zero=128, table=_IQ4, signed=True),
        PackedType("MXFP4", 13, 17, 32, 32, (4,), zero=12, table=_FP4, exponent=True),
    )
}
"""The types of GGUF files, by their names in ggml."""


def _coded(
    name: str, number: int, bits: int, *, offset: bool = False, token: bool = False
) -> list[PackedType]:
    """The types ``name`` of other checkpoints, ``number`` and the next one: of codes of ``bits`` bits with a
    scale for each 32 or 128 numbers."""
    zero = 0 if offset else 1 << bits - 1
    return [
        PackedType(
            f"{name}_{block}", number + at, 0, block, RUN, (bits,), zero, offset, wide=True, token=token
        )
        for at, block in enumerate((RUN, 4 * RUN))
    ]


CODED = {
    one.name: one
    for some in (
        _coded("INT4", 14, 4),
        _coded("INT4Z", 16, 4, offset=True),
        _coded("INT8", 18, 8),
        _coded("INT8Z", 20, 8, offset=True),
        _coded("W8A8", 22, 8, token=True),
    )
    for one in some
}
"""The types of other checkpoints (`quantised`). Z: each group has a code that stands for 0."""

TYPES = GGML | CODED
"""The types of quantised numbers, by their names."""

PLAIN = {
    name: PackedType(name, 0, RUN * bits // 8, RUN, RUN, (bits,))
    for name, bits in (("float32", 32), ("float16", 16), ("bfloat16", 16))
}
"""The types of numbers that are not quantised, by their names in torch. A panel has the 16 rows side by side,
number by number; in bfloat16 two neighbouring numbers of a row, then the next row's two."""
