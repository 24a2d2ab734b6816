"""Which backend is chosen, and that a fallback is logged."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from holdfast.kernels import backends as choosing
from holdfast.kernels.backends import BackendMissing, Needs, choose, named
from holdfast.kernels.reference import backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NEEDS = Needs(torch.float32, [(64, 16)])


def test_a_cpu_takes_the_cpu_backend_unless_told_otherwise() -> None:
    pytest.importorskip("numba")
    told: list[tuple[float, str]] = []
    found = choose("auto", CPU, NEEDS, lambda done, what: told.append((done, what)))
    assert (found.name, found.note) == ("cpu", "")
    assert found.kernels.rms_norm(torch.ones(1, 4), torch.ones(4), 0.0).tolist() == [[1.0] * 4]
    assert told and all("compiling" in what and 0 <= done < 1 for done, what in told)
    assert choose("reference", CPU, NEEDS).kernels is backend


def test_a_gpu_takes_the_triton_kernels() -> None:
    pytest.importorskip("triton")
    assert named("auto", CUDA) == ("triton", "")
    assert named("triton-invariant", CUDA) == ("triton-invariant", "")
    with pytest.raises(BackendMissing, match="not on cuda"):
        named("cpu", CUDA)
    with pytest.raises(BackendMissing, match="kernels triton: it computes on a CUDA device, not on cpu"):
        named("triton", CPU)


def test_shapes_that_the_triton_kernels_do_not_have_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    odd = Needs(torch.float32, [(64, 16), (72, 16)])
    with pytest.raises(BackendMissing, match=r"head_dim 72 \(supported: 64, 80"):
        named("triton", CPU, odd)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    name, note = named("auto", CUDA, NEEDS)
    assert name == "reference" and "compute capability 7.5" in note


def test_without_numba_the_reference_computes_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choosing, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        found = choose("auto", CPU, NEEDS)
    assert found.kernels is backend and "numba is not installed" in found.note
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "numba is not installed" in caplog.text
    with pytest.raises(BackendMissing, match="numba is not installed"):
        choose("cpu", CPU, NEEDS)


def test_without_compiled_kernels_the_reference_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no\nsuch instruction")

    monkeypatch.setattr(choosing, "_ready", broken)
    with caplog.at_level(logging.WARNING):
        assert choose("auto", CPU, NEEDS).kernels is backend
    assert "RuntimeError: no such instruction" in caplog.text
    with pytest.raises(BackendMissing, match="no such instruction"):
        choose("cpu", CPU, NEEDS)


def test_a_machine_without_openmp_is_told_what_is_missing() -> None:
    pytest.importorskip("numba")
    program = (
        "import sys; sys.modules['numba.np.ufunc.omppool'] = None\n"
        "import torch; from holdfast.kernels.backends import Needs, choose\n"
        "print(choose('auto', torch.device('cpu'), Needs(torch.float32, [(64, 16)])).note)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Unfit: numba finds no OpenMP library" in done.stdout and "libgomp1" in done.stdout


def test_torch_keeps_its_number_of_threads() -> None:
    """Both compute on one OpenMP pool; numba would set its number of threads to that of all cores."""
    pytest.importorskip("numba")
    program = (
        "import ctypes, torch; torch.set_num_threads(1)\n"
        "from holdfast.kernels.cpu.compiling import join_torch; join_torch()\n"
        "print(torch.get_num_threads(), ctypes.CDLL('libgomp.so.1').omp_get_max_threads())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]
