"""What ``make gpu`` stands on: parts as processes, the file of results, carried wheels, limits."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from holdfast.benchmarks.gpu import attention, engine, measure, run, steps, wheels
from holdfast.benchmarks.gpu.measure import limited
from holdfast.benchmarks.harness import servers
from holdfast.benchmarks.harness.servers import run_seconds
from holdfast.benchmarks.toys import make_toy
from holdfast.runtime.model.load import load_model
from holdfast.tests.test_house import names_in


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


def test_what_is_installed_keeps_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(run, "WHEELS", tmp_path / "none")
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


def test_a_part_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.PARTS, "decode", "attention.made_up")
    monkeypatch.setattr(attention, "made_up", lambda bench: time.sleep(60), raising=False)
    assert run.measured("decode", None, 0.05) == ([], "TimeoutError: not done within 0.05 s")


def test_missing_wheels_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wheels.missing("engine") == []
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["anyio>=4.9", "not_there>=1"]\n'
        "[project.optional-dependencies]\nengine = [\"neither-is-this>=2; platform_system == 'Linux'\"]\n"
        'dev = ["nor_this"]\n'
    )
    monkeypatch.setattr(wheels, "PROJECT", tmp_path / "pyproject.toml")
    assert wheels.missing("engine") == ["neither-is-this", "not_there"]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of the parts that run tests, from the word behind Python on."""
    asked: list[list[str]] = []

    def ask(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command[command.index(sys.executable) + 1 :])
        return SimpleNamespace(returncode=0)

    with monkeypatch.context() as patch:
        patch.setattr(engine.subprocess, "run", ask)
        patch.setattr(engine.shutil, "which", lambda *_, **__: "compute-sanitizer")
        for part in ("tests-kernels", "tests-kvstore", "tests", "sanitizer"):
            lines, failure = run.measured(part, None, 60.0)
            assert lines and not failure
    return asked


def test_the_commands_that_run_tests_on_a_gpu_select_tests(commands: list[list[str]]) -> None:
    """As they stand, but that tests are only collected: each file can be imported and has one of the mark."""
    files = sorted({word for command in commands for word in command if word.endswith(".py")})
    words = {tuple(word for word in command if word not in files) for command in commands}
    assert len(words) == 1 and {Path(file).relative_to(run.ROOT / "tests").parts[0] for file in files} == {
        "end_to_end",
        "kernels",
        "kvstore",
        "runtime",
    }
    command = [sys.executable, *words.pop(), "--collect-only", *files]
    ran = subprocess.run(command, cwd=run.ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for file in files:
        assert f"{Path(file).relative_to(run.ROOT)}::" in ran.stdout


def test_what_only_a_gpu_runs_can_be_imported(commands: list[list[str]]) -> None:
    """Modules of other packages too, and in functions; but packages that are not here. `test_references` looks
    at the rest."""
    paths = [*(run.ROOT / "benchmarks" / "gpu").glob("*.py"), *(run.ROOT / "kernels" / "gpu").glob("*.py")]
    paths += [Path(word) for command in commands for word in command if word.endswith(".py")]
    for path in paths:
        file = path.relative_to(run.ROOT)
        import_module(".".join(["holdfast", *file.with_suffix("").parts]).removesuffix(".__init__"))
        for node in ast.walk(ast.parse(path.read_text())):
            for stem, name in names_in(file, node) if isinstance(node, ast.stmt) else ():
                if find_spec(stem.split(".")[0]) is None or name == "annotations":
                    continue
                module = import_module(stem)
                assert not name or hasattr(module, name) or find_spec(f"{stem}.{name}"), (
                    f"{file}: {stem}.{name}"
                )
    for part in run.PARTS.values():
        module_name, function = part.split(".")
        assert hasattr(import_module(f"holdfast.benchmarks.gpu.{module_name}"), function)


def test_a_model_with_failing_steps_is_not_measured(tmp_path: Path) -> None:
    """An engine ends the sequences with an error and goes on, at a fine pace."""

    class Broken:
        numerics = "broken"

        def fuse_layers(self, *_: object) -> None:
            return None

        def __getattr__(self, name: str) -> Callable[..., object]:
            def fail(*_: object) -> object:
                raise ValueError("no such kernel")

            return fail

    model = load_model(make_toy("tiny", tmp_path), "cpu", "float32")
    model = replace(model, decoder=model.decoder.computing_by(Broken()))  # type: ignore[arg-type]
    with pytest.raises(engine.SequenceFailed, match="no such kernel"):
        engine.generate(model, [[1, 2, 3]], 4)


def test_a_device_waits_between_the_end_of_a_step_and_the_begin_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of nine seconds, two between three steps; what lies before the first counts for nothing."""
    clock = iter([10.0, 12.0, 13.0, 14.0, 15.0, 19.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            self.at = next(clock)

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    monkeypatch.setattr(steps.torch.cuda, "Event", Event)
    monkeypatch.setattr(steps.torch.cuda, "synchronize", lambda: None)
    timed = steps.Timed(SimpleNamespace(launch=lambda plan: plan), torch.device("cuda"))  # type: ignore[arg-type]
    assert [timed.launch(plan) for plan in (1, 2, 3)] == [1, 2, 3]  # type: ignore[arg-type]
    assert timed.waits() == pytest.approx(2 / 9)


def test_time_of_a_process_counts_threads_that_ended() -> None:
    def busy() -> None:
        while time.thread_time() < 0.02:
            pass

    thread = threading.Thread(target=busy)
    thread.start()
    thread.join()
    before, told, after = time.process_time(), run_seconds(os.getpid()), time.process_time()
    assert before <= told <= after


# --- one process for each part, one file of results -----------------------------------------------------------

WRITES = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import run
results = run.Results(Path({path!r}))
results.add({part!r}, {state!r}, failure={failure!r}, figures=[])
"""


class Parts:
    """Programs that stand for parts: ``says`` how each ends; parts that are not named are measured."""

    def __init__(self, path: Path, **says: str) -> None:
        self.results = run.Results(path)
        self.says = says
        self.seconds: dict[str, tuple[float, bool]] = {}

    def command(self, part: str, seconds: float, cut: bool) -> list[str]:
        self.seconds[part] = seconds, cut
        says = self.says.get(part, "measured")
        if says == "hangs":
            return [sys.executable, "-c", "import signal; signal.pause()"]
        if says == "crashes":
            return [sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"]
        if says == "exits":
            return [sys.executable, "-c", "raise SystemExit(3)"]
        state = run.CUT if says == "is cut" else run.ENDED
        folder, path = str(Path(run.__file__).parent), str(self.results.path)
        failure = None if says == "measured" else says
        program = WRITES.format(folder=folder, path=path, part=part, state=state, failure=failure)
        return [sys.executable, "-c", program]

    def run(self, *parts: str, budget: float = 600.0, limits: dict[str, float] | None = None) -> list[str]:
        return run.run_parts(self.results.left(parts), self.results, budget, self.command, limits or {})

    def ended(self) -> dict[str, object]:
        return {line["part"]: line["failure"] for line in self.results.lines() if line["state"] == run.ENDED}


def test_a_part_that_crashes_fails_or_hangs_writes_why_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "KILL_S", 0.2)
    parts = Parts(tmp_path / "r.jsonl", a="crashes", b="exits", c="hangs", d="ValueError: no")
    assert parts.run("a", "b", "c", "d", "e", limits={"c": 0.1}) == ["a", "b", "c", "d"]
    assert parts.ended() == {
        "a": "ended by signal 11",
        "b": "ended with status 3",
        "c": "out of time, and killed",
        "d": "ValueError: no",
        "e": None,
    }


def test_a_second_call_runs_what_is_left_and_first_what_was_never_begun(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "r.jsonl", b="is cut")
    assert parts.run("a", "b") == []
    assert parts.results.left(["a", "b", "c"]) == ["c", "b"]
    parts.says.clear()
    assert parts.run("a", "b", "c") == []
    assert parts.ended() == {"a": None, "b": None, "c": None}
    assert list(parts.seconds) == ["a", "b", "c"] and not parts.results.left(["a", "b", "c"])


def test_what_a_killed_call_had_begun_is_left_and_comes_last(tmp_path: Path) -> None:
    """Its last line may be torn; what was begun may be what hangs the machine."""
    parts = Parts(tmp_path / "r.jsonl")
    parts.results.add("a", run.BEGUN)
    parts.results.path.write_bytes(parts.results.path.read_bytes() + b'{"part": "b", "sta')
    assert parts.results.left(["a", "b"]) == ["b", "a"]
    parts.run("a", "b")
    assert parts.ended() == {"a": None, "b": None}


def test_a_call_begins_nothing_that_it_has_no_time_for_and_cuts_what_it_has_less_for(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "r.jsonl")
    assert parts.run("a", "b", budget=100.0, limits={"a": 50.0, "b": 99.9999}) == []
    assert parts.seconds["a"] == (50.0, False)
    seconds, cut = parts.seconds["b"]
    assert cut and 0 < seconds < 99.9999
    assert parts.run("c", budget=run.LEAST_S - 1) == []
    assert "c" not in parts.seconds and parts.results.left(["c"]) == ["c"]


def test_figures_are_kept_before_their_part_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = {"name": "this", "met": True, "value": 1, "unit": "", "goal": 1}

    def made_up(bench: measure.Bench) -> list[measure.Figure]:
        bench.tell([first])
        raise ValueError("and no further")

    monkeypatch.setitem(run.PARTS, "decode", "attention.made_up")
    monkeypatch.setattr(attention, "made_up", made_up, raising=False)
    monkeypatch.setattr(run.ctypes, "CDLL", lambda name: SimpleNamespace(prctl=lambda *words: 0))
    before = signal.getsignal(signal.SIGTERM)
    results = run.Results(tmp_path / "r.jsonl")
    try:
        assert run.child("decode", results, 60.0, cut=False, rehearsal=True) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    some, ended = results.lines()
    assert (some["state"], some["figures"], some["machine"]) == (run.SOME, [first], "rehearsal")
    assert ended["state"] == run.ENDED and ended["failure"] == "ValueError: and no further"
    assert "NOT MEASURED: ValueError: and no further" in capsys.readouterr().out


# --- carried wheels -------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, tag: str = "py3-none-any") -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\n")


def test_parts_import_what_carried_wheels_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(tmp_path / "w", "carried_one")
    wheel(tmp_path / "w", "carried_other", "cp27-cp27m-win32")
    wheel(tmp_path / "w", "msgspec")  # installed: it stays as it is
    monkeypatch.setattr(run, "WHEELS", tmp_path / "w")
    program = "import carried_one, msgspec, holdfast; print(msgspec.__file__)"
    with run.importable():
        said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "site-packages" in said.stdout
    assert capsys.readouterr().out.startswith("carried_other-1.0-cp27-cp27m-win32.whl is not for this Python")


def test_wheels_are_fetched_of_what_an_image_with_torch_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path / "w", "of_before")
    asked: list[list[str]] = []

    def pip(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(wheels.subprocess, "run", pip)
    assert wheels.download(tmp_path / "w", "3.12", "x86_64") == 0
    (command,) = asked
    assert {"msgspec", "websockets", "starlette", "uvicorn", "lmdb", "llguidance"} <= set(command)
    assert wheels.WITH_TORCH.isdisjoint(command) and "manylinux_2_28_x86_64" in command
    assert not list((tmp_path / "w").iterdir())
