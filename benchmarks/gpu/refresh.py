"""Part ``refresh``: measure candidate configurations of the Triton kernels on this GPU, and write the best into
the committed file.

Runs only by name (``make gpu PART=refresh``). It changes the rows of this GPU's architecture and keeps the
others. Run `correct` afterwards, and read the diff.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from ...kernels.gpu import configurations, invariant_kernels, rowwise
from ...kernels.gpu.decode import decode_attention
from ...kernels.gpu.extend import extend_attention
from ...kernels.interface import Attention
from .attention import calls
from .measure import Bench, Figure, Work, figure, median_us, note, reason
from .paging import Heads, paged

DATA = Path(configurations.__file__).with_name("configurations.json")
DIMS = (64, 128, 256)
Row = dict[str, int]


def _all(**choices: tuple[int, ...]) -> list[Row]:
    return [dict(zip(choices, some, strict=True)) for some in itertools.product(*choices.values())]


WIDE = _all(QUERIES=(64, 128), TILE=(32, 64, 128), num_warps=(4, 8), num_stages=(2, 3))
CANDIDATES = {
    "decode": _all(TILE=(32, 64, 128), num_warps=(4, 8), num_stages=(3, 5, 7)),
    "extend": WIDE,
    "stretch": WIDE,
    "product": _all(ROWS=(64, 128), COLUMNS=(128, 256), DEPTH=(64, 128), num_warps=(4, 8), num_stages=(3, 4)),
    "norm": _all(ROWS=(1, 2, 4), num_warps=(4, 8, 16)),
}


def refresh(bench: Bench) -> list[Figure]:
    """Find and write the best configuration of every kernel and size for 16-bit numbers. Returns for each how
    much faster it is than the one before."""
    arch = f"sm_{configurations.architecture(bench.device)}"
    data = json.loads(DATA.read_text())
    lines = []
    for kernel, size, works in _workloads(bench):
        rows, name = data[kernel][arch], f"16-{size}"
        before = rows[name]
        times = {}
        for row in [before, *(one for one in CANDIDATES[kernel] if one != before)][: bench.size(99, 2)]:
            took = _time(bench, kernel, arch, name, row, works)
            if isinstance(took, str):
                lines.append(note(f"{kernel} {name} {row}", took))
            else:
                times[json.dumps(row)] = took
        if not times:
            continue
        best = min(times, key=times.__getitem__)
        rows[name] = json.loads(best)
        gain = times.get(json.dumps(before), times[best]) / times[best]
        lines.append(figure(f"{kernel} {name} {best}, against the row before", gain, "x"))
    if not bench.rehearsal:
        DATA.write_text(_text(data))
    configurations.table.cache_clear()
    configurations.configuration.cache_clear()
    return lines


def _time(
    bench: Bench, kernel: str, arch: str, name: str, row: Row, works: Callable[[], list[Work]]
) -> float | str:
    """The microseconds of these calls with the configuration ``row``, or as text the reason why they failed."""
    configurations.table()[kernel][arch][name] = row
    configurations.configuration.cache_clear()
    try:
        return median_us(bench, works())
    except Exception as error:  # too much shared memory, a shape the compiler refuses: the next one
        return reason(error)


def _workloads(bench: Bench) -> Iterator[tuple[str, int, Callable[[], list[Work]]]]:
    """For each kernel and size: the kernel's name, the size as it is named in the configurations, and a
    function that makes calls, each of which reads data that the ones before have not."""
    length, dtype = bench.size(8192, 40), torch.float16 if bench.rehearsal else torch.bfloat16
    for dim in DIMS[: bench.size(3, 1)]:
        heads, how = Heads(32, 8, dim, 16, dtype), Attention(dim**-0.5)
        many = paged(heads, [length - 1] * bench.size(32, 2), [1] * bench.size(32, 2), bench.device)
        chunk = paged(heads, [length], [bench.size(512, 9)], bench.device)
        for kernel, call, made in (
            ("decode", decode_attention, many),
            ("extend", extend_attention, chunk),
            ("stretch", invariant_kernels.extend_attention, chunk),
        ):
            yield kernel, dim, partial(calls, call, made, how)
    width = bench.size(4096, 64)
    x = torch.randn(512, width, device=bench.device, dtype=dtype)
    weight = torch.randn(2 * width, width, device=bench.device, dtype=dtype)
    yield "product", 1, lambda: [partial(invariant_kernels.linear, x, weight)]
    yield "norm", 4096, lambda: [partial(rowwise.add_norm, x, x, weight[0], 1e-6)]


def _text(data: configurations.Table) -> str:
    """The content of the configurations' file: JSON with a line for each row."""
    kernels = []
    for kernel, archs in data.items():
        parts = []
        for arch, rows in archs.items():
            lines = ",\n".join(f'   "{name}": {json.dumps(row)}' for name, row in rows.items())
            parts.append(f'  "{arch}": {{\n{lines}\n  }}')
        kernels.append(f' "{kernel}": {{\n' + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(kernels) + "\n}\n"
