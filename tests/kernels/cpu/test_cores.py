"""Computing threads on cores of their own: which cores, and which threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

from holdfast.kernels.cpu.cores import OPERATORS, POOL, cores_for

BOUND = """
import json, os, threading, torch
from concurrent.futures import ThreadPoolExecutor
from holdfast.kernels.cpu.compiling import join_torch
from holdfast.kernels.cpu.cores import bind, computing
from holdfast.kvstore.system_limits import roam
torch.set_num_threads({threads})
join_torch()
end = threading.Event()
other = threading.Thread(target=end.wait)
other.start()
setting, refused = os.sched_setaffinity, []
def forbidding(thread, place):
    if thread != os.getpid() and not refused:
        refused.append(thread)
        raise PermissionError(1, "no")
    setting(thread, place)
if "FORBIDDEN" in os.environ:
    os.sched_setaffinity = forbidding
print(bind())
print(json.dumps([sorted(os.sched_getaffinity(thread)) for thread in computing({threads})]))
later = ThreadPoolExecutor(1, initializer=roam).submit(os.sched_getaffinity, 0).result()
print(json.dumps([sorted(os.sched_getaffinity(other.native_id)), sorted(later)]))
end.set()
"""


def alone(processor: int) -> set[int]:
    return {processor}


def pairs(processor: int) -> set[int]:
    """Two logical processors to a core, numbered as Linux does: 0 and 4, 1 and 5, ..."""
    return {processor % 4, processor % 4 + 4}


def test_as_many_threads_as_cores_have_one_each() -> None:
    assert cores_for(2, [0, 1], alone) == [{0}, {1}]
    assert cores_for(4, range(8), pairs) == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]


def test_as_many_threads_as_logical_processors_have_one_each() -> None:
    assert cores_for(8, range(8), pairs) == [{number} for number in range(8)]


def test_only_allowed_processors_count() -> None:
    assert cores_for(2, [1, 5, 2], pairs) == [{1, 5}, {2}]
    assert cores_for(1, [5], pairs) == [{5}]


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 7, 9])
def test_any_other_number_of_threads_is_left_alone(threads: int) -> None:
    assert cores_for(threads, range(8), pairs) == []


def run(threads: int, **variables: str) -> list[str]:
    own = {name: value for name, value in os.environ.items() if name not in (*OPERATORS, "OMP_NUM_THREADS")}
    program = BOUND.format(threads=threads)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**own, **variables}
    )
    return done.stdout.splitlines()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) != POOL, reason="needs two processors")
class TestBound:
    """On this machine's own processors."""

    def test_each_thread_that_computes_stays_on_its_place_and_others_go_where_they_like(self) -> None:
        allowed = sorted(os.sched_getaffinity(0))
        bound, cores, others = run(POOL)
        assert bound == str(POOL)
        assert sorted(json.loads(cores)) == [[processor] for processor in allowed]
        before, after = json.loads(others)
        assert before == allowed
        assert [after] == json.loads(cores)[1:], "not where its maker is"

    def test_an_operators_setting_of_openmp_is_kept(self) -> None:
        assert run(POOL, OMP_PROC_BIND="false")[0] == "0"

    def test_another_number_of_threads_is_left_alone(self) -> None:
        assert run(POOL + 1)[0] == "0"

    def test_a_system_that_forbids_binding_leaves_threads_unbound(self) -> None:
        allowed = sorted(os.sched_getaffinity(0))
        bound, cores, _ = run(POOL, FORBIDDEN="second")
        assert bound == "0" and json.loads(cores) == [allowed, allowed]
