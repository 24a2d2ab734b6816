"""Ahead-of-time compilation for GPUs that are not present: what each launch compiles, and which resources it
needs.

A stand-in for triton's driver names an architecture and runs nothing; the launches are the real ones, on
tensors without memory (``device="meta"``). So a configuration that does not compile, or does not fit into
shared memory, is found on any machine. Registers and stack are read from the machine code.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from . import configurations
from .launches import all_launches

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one program can have, by compute capability (80 is 8.0). Source: CUDA C++
programming guide, table of limits."""

ATTENTION = ("decode_stretch", "extend_tile", "extend_stretch")
"""Kernels that must not spill registers."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as compiled: its name and architecture (90 is 9.0), ``registers`` per thread, bytes of
    ``stack`` (more than 0: it spills) and of ``shared`` memory, ``warps`` of a program, and the instruction
    of the ``tensor_cores`` that it uses, "" if none."""

    kernel: str
    arch: int
    registers: int
    stack: int
    shared: int
    warps: int
    tensor_cores: str


@dataclass
class AbsentGpu:
    """A stand-in for triton's driver, so that launches compile for a GPU that is not present; they run
    nothing. ``arch``: the compute capability, 90 for 9.0. ``compiled``: what was compiled so far."""

    arch: int
    compiled: list[Compiled] = field(default_factory=list)

    def get_current_target(self) -> GPUTarget:
        """The architecture that triton compiles for."""
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """The number under which triton caches what it compiled: the architecture."""
        return self.arch

    def get_current_stream(self, device: int) -> int:
        """The number of the default stream, 0."""
        return 0

    @property
    def utils(self) -> AbsentGpu:
        """The object that triton loads binaries with: this one."""
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        """The limits that triton checks before a launch: bytes of shared memory."""
        return {"max_shared_mem": SHARED_LIMIT[self.arch]}

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        """Load nothing. Returns what triton expects: handles of module and function, registers, spills,
        threads per block."""
        return 1, 1, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        """Does nothing: nothing was loaded."""

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        """What triton launches a compiled kernel with: a function that does nothing."""
        return lambda *args: None

    def loaded(self, module: Any, function: Any, name: str, files: dict[str, str], key: str) -> None:
        """Triton's hook after it has compiled and loaded a kernel: append to ``compiled`` which resources the
        kernel needs. ``files``: the paths of the compiled kernel's files, by name."""
        by_kind = {Path(path).suffix: Path(path) for path in files.values()}
        meta, ptx = json.loads(by_kind[".json"].read_text()), by_kind[".ptx"].read_text()
        units = [word for word in ("tcgen05.mma", "wgmma.mma", "mma.sync") if word in ptx]
        registers, stack = resources_of(by_kind[".cubin"])
        self.compiled.append(
            Compiled(name, self.arch, registers, stack, meta["shared"], meta["num_warps"], "".join(units[:1]))
        )


def resources_of(cubin: Path) -> tuple[int, int]:
    """Registers per thread and bytes of stack of a compiled kernel, read from its machine code by triton's
    cuobjdump. Raises ValueError if cuobjdump does not tell them."""
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run(
        [tool, "--dump-resource-usage", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise ValueError(f"no resource usage in {usage!r}")
    return int(found.group(1)), int(found.group(2))


@contextmanager
def compiling_for(arch: int) -> Iterator[AbsentGpu]:
    """A context in which launches compile for ``arch`` (90 is compute capability 9.0) and do not run; it
    gives the stand-in driver, which collects what was compiled. Triton's driver stays the stand-in
    afterwards."""
    gpu = AbsentGpu(arch)
    configurations.architecture.cache_clear()
    driver.set_active(gpu)
    triton.knobs.runtime.kernel_load_end_hook.add(gpu.loaded)
    try:
        yield gpu
    finally:
        triton.knobs.runtime.kernel_load_end_hook.remove(gpu.loaded)
        configurations.architecture.cache_clear()


def compile_all(arch: int, wanted: Sequence[str] = ("",)) -> Iterator[tuple[str, list[Compiled]]]:
    """Compile for ``arch`` every launch of `launches` with one of ``wanted`` in its name; yields the launch's
    name and the kernels that it compiled."""
    with compiling_for(arch) as gpu:
        for name, launch in all_launches(torch.device("meta")):
            if any(part in name for part in wanted):
                known = len(gpu.compiled)
                launch()
                yield name, gpu.compiled[known:]


def main() -> int:
    """Compile for each architecture and print a table of the kernels' resources; returns 1 if an attention
    kernel has a stack (spills registers) or nothing was compiled, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, action="append", choices=configurations.ARCHITECTURES)
    parser.add_argument("--only", action="append", help="launches with this in their name")
    parser.add_argument("--json", type=Path, help="write the table there, too")
    asked = parser.parse_args()
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    table = []
    print(
        f"{'launch':28} {'kernel':16} {'arch':>6} {'regs':>5} {'stack':>6} {'shared':>8} {'warps':>5} units"
    )
    for arch in asked.arch or configurations.ARCHITECTURES:
        for name, kernels in compile_all(arch, asked.only or ("",)):
            for one in kernels:
                table.append({"launch": name} | asdict(one))
                print(
                    f"{name:28} {one.kernel:16} sm_{arch:<3} {one.registers:5} {one.stack:6} {one.shared:8} "
                    f"{one.warps:5} {one.tensor_cores}",
                    flush=True,
                )
    if asked.json is not None:
        asked.json.write_text(json.dumps(table, indent=1) + "\n")
    spilling = [one for one in table if one["stack"] and one["kernel"] in ATTENTION]
    print(f"{len(table)} kernels compiled, {len(spilling)} attention kernels with a stack")
    return 1 if spilling or not table else 0


if __name__ == "__main__":
    raise SystemExit(main())
