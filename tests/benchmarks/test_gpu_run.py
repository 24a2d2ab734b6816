"""What the parts of ``make gpu`` stand on: child processes' path, a limit, the wheels that are not there."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.benchmarks.gpu import attention, engine, run, wheels
from holdfast.benchmarks.gpu.limits import limited
from holdfast.benchmarks.harness import servers
from holdfast.benchmarks.harness.servers import run_seconds


def test_child_processes_import_this_checkout_and_carried_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "carried.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(run, "find_spec", lambda name: None)  # as on a machine where it is not installed
    program = "import carried, holdfast; print(holdfast.__file__)"
    with run.importable():
        said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert Path(said.stdout.strip()).parent.resolve() == run.ROOT
        assert Path(said.stdout.strip()).parent != run.ROOT, "by the link"
    assert os.environ["PYTHONPATH"] == str(tmp_path)


def test_what_is_installed_keeps_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    before = list(sys.path)
    with run.importable():
        assert sys.path == before and "PYTHONPATH" not in os.environ


def test_a_limit_ends_what_waits_in_a_loop_by_its_own_ends() -> None:
    ended = []

    async def waiting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("task")

    with pytest.raises(TimeoutError, match=r"not done within 0\.05 s"), limited(0.05):
        asyncio.run(waiting())
    assert ended == ["task"]


def test_no_task_keeps_a_limit_to_itself() -> None:
    silent, _ = os.pipe()

    async def stubborn() -> None:
        with suppress(Exception):
            os.read(silent, 1)

    with pytest.raises(TimeoutError), limited(0.05):
        asyncio.run(stubborn())


def test_a_limit_ends_what_waits_for_a_process() -> None:
    silent = ["cat"]
    with (
        subprocess.Popen(silent, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        pytest.raises(TimeoutError),
        limited(0.05),
    ):
        servers._address(process)


def test_what_is_done_in_time_is_left_alone() -> None:
    with limited(3600.0):
        pass


@pytest.mark.parametrize(("part", "failure"), [("correct", "wrong: this, that"), ("decode", "")])
def test_a_part_that_computes_wrong_has_failed_and_one_that_is_slow_has_not(
    part: str, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"name": name, "met": met} for name, met in (("this", False), ("some", True), ("that", False))]
    monkeypatch.setitem(run.PARTS, part, "attention.made_up")
    monkeypatch.setattr(attention, "made_up", lambda bench: lines, raising=False)
    assert run.measured(part, None, 60.0) == (lines, failure)


def test_a_part_ends_when_the_time_of_all_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.PARTS, "decode", "attention.made_up")
    monkeypatch.setattr(attention, "made_up", lambda bench: time.sleep(60), raising=False)
    assert run.measured("decode", None, 0.05) == ([], "TimeoutError: not done within 0.05 s")
    assert run.measured("decode", None, 0.0) == ([], "out of time: make gpu PART=decode")


def test_missing_wheels_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wheels.missing("engine") == []
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["anyio>=4.9", "not_there>=1"]\n'
        "[project.optional-dependencies]\nengine = [\"neither-is-this>=2; platform_system == 'Linux'\"]\n"
        'dev = ["nor_this"]\n'
    )
    monkeypatch.setattr(wheels, "PROJECT", tmp_path / "pyproject.toml")
    assert wheels.missing("engine") == ["neither-is-this", "not_there"]


def test_files_of_the_gpu_mark_are_found_by_room() -> None:
    found = {room: [Path(file).name for file in files] for room, files in engine._marked().items()}
    assert set(found) == {"end_to_end", "kernels", "kvstore", "runtime"}
    assert found["kernels"] == ["test_gpu_kernels.py"]


def test_time_of_a_process_counts_threads_that_ended() -> None:
    def busy() -> None:
        while time.thread_time() < 0.02:
            pass

    thread = threading.Thread(target=busy)
    thread.start()
    thread.join()
    before, told, after = time.process_time(), run_seconds(os.getpid()), time.process_time()
    assert before <= told <= after
