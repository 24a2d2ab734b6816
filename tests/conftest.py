"""Shared by all tests: the hypothesis profile, time limits, fixtures.

Hypothesis draws the same examples on every machine, so a result depends on the code alone.
``HOLDFAST_EXAMPLES=3`` runs three times as many, with three times the time limit; with ten or more they are
others each time.
``HOLDFAST_NO_SHRINK=1`` stops at the first failure without shrinking its example; for planted bugs. So does
``CI``: there a failure must be shown before the time limit ends the test.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, Phase, settings

from holdfast.benchmarks.faults.file_faults import mounted

PHASES = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]
MORE = (
    "tests/benchmarks/test_speed_benches.py",
    "tests/benchmarks/test_faults.py",
    "tests/mutations/test_planted_bugs.py",
    "tests/kernels/gpu/test_interpreted.py",
    "tests/kernels/gpu/test_ahead.py",
    "tests/end_to_end/test_processes.py",
    "tests/end_to_end/test_playground.py",
    "tests/end_to_end/test_hangup.py",
    "tests/end_to_end/test_resume.py",
    "tests/end_to_end/test_host_tier.py",
    "tests/end_to_end/test_streaming_tools_live.py",
    "tests/end_to_end/test_streamed_input.py",
    "tests/end_to_end/test_engine_death.py",
    "tests/benchmarks/test_pocket_skills.py",
    "tests/end_to_end/test_held_connections.py",
    "tests/end_to_end/test_engine_process.py",
    "tests/end_to_end/test_full_disk.py",
    "tests/end_to_end/test_disk_tier.py",
    "tests/end_to_end/test_examples.py",
    "tests/end_to_end/test_readme.py",
    "tests/end_to_end/test_smollm2.py",
    "tests/end_to_end/test_real_models.py",
    "tests/end_to_end/test_sampling_parity.py",
    "tests/end_to_end/test_full_context.py",
    "tests/runtime/execution/test_compile_closure.py",
    "tests/clients/test_openai_agents.py",
    "tests/clients/test_openai_chat.py",
    "tests/clients/test_openai_realtime.py",
    "tests/clients/test_openai_responses.py",
    "tests/clients/test_openai_types.py",
    "tests/clients/test_anthropic_messages.py",
    "tests/benchmarks/test_gpu_rehearsal.py",
    "tests/sdk/test_types.py",
    "tests/test_wheel.py",
)
"""`make more` runs the tests of these files, and `make test` does not: what they start takes long (servers,
browsers, compilers, programs of others, a process for every planted bug). CI runs both."""
LONGEST = (
    *MORE,
    "tests/runtime/scheduler/test_scheduler_machine.py",
    "tests/end_to_end/test_parity.py",
    "tests/kernels/cpu/test_backend.py",
    "tests/runtime/link/test_process.py",
    "tests/test_house.py",
    "tests/runtime/model/test_variants.py",
    "tests/kvstore/disk/test_client.py",
)
"""The longest files run first, so that no worker is left with one of them at the end."""
FACTOR = max(1, int(os.environ.get("HOLDFAST_EXAMPLES", "1")))

settings.register_profile(
    "holdfast",
    deadline=None,
    derandomize=FACTOR < 10,
    database=None if FACTOR < 10 else settings.default.database,
    max_examples=(34 if FACTOR < 10 else 100) * FACTOR,
    stateful_step_count=100,
    phases=PHASES if {"HOLDFAST_NO_SHRINK", "CI"} & os.environ.keys() else list(Phase),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("holdfast")


@pytest.fixture
def bound_beside() -> Iterator[set[int]]:
    """Bind the test's thread to one processor, as an engine's may be; yields the other processors."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two processors")
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield allowed - {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)
        end.set()
        other.join()


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of a size, such as ``4m``, in the test's own folder, and returns where it is."""
    with ExitStack() as stack:

        def mount(size: str) -> Path:
            where = tmp_path / f"tmpfs-{size}"
            where.mkdir()
            if not stack.enter_context(mounted(where, size)):
                pytest.skip("this user may not mount a tmpfs")
            return where

        yield mount


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers that tests start keep their journals in a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


class TimeLimit(BaseException):
    """A test takes too long. It is not pytest's own failure, because hypothesis would take that for a failing
    example and shrink it without a limit.
    """


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Iterator[object]:
    """The time limit ends the test, also inside hypothesis."""
    done = yield
    failing = signal.getsignal(signal.SIGALRM)

    def strike(number: int, frame: FrameType | None) -> None:
        if in_callback(frame):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return
        try:
            failing(number, frame)
        except pytest.fail.Exception as failed:
            raise TimeLimit(failed.msg) from None

    if callable(failing):
        signal.signal(signal.SIGALRM, strike)
    return done


def in_callback(frame: FrameType | None) -> bool:
    """Whether this is inside hypothesis's callback for garbage collection, which loses exceptions."""
    while frame is not None and frame.f_code.co_name != "gc_callback":
        frame = frame.f_back
    return frame is not None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Freeze the imported objects, a million of them, so that no garbage collection walks them again."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


def pytest_configure(config: pytest.Config) -> None:
    told = "more: takes long to start; runs in `make more` and in `make slow`, not in `make test`"
    config.addinivalue_line("markers", told)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {name: index for index, name in enumerate(LONGEST)}
    files = {item: str(item.path.relative_to(config.rootpath)) for item in items}
    items.sort(key=lambda item: order.get(files[item], len(order)))
    for item in items:
        if files[item] in MORE:
            item.add_marker(pytest.mark.more)
        if files[item].endswith("_machine.py"):
            item.add_marker(pytest.mark.hypothesis)  # as its plugin marks what stands below ``@given``
    if FACTOR > 1:
        for item in items:
            item.add_marker(pytest.mark.timeout(float(config.getini("timeout")) * FACTOR))
