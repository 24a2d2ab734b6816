"""Errors that come of a limit name it, and the file: in processes that really have that limit."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from holdfast.kvstore.system_limits import explained

STORING = """
import resource, sys
from pathlib import Path
from xxhash import xxh3_64_intdigest
from holdfast.kvstore.errors import KVStoreError
from holdfast.kvstore.disk.messages import Begin
from holdfast.kvstore.disk.store import RecordStore, StoreFailed
from holdfast.kvstore.tier import Record
name, most, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
data = bytes(60_000)
def given(number):
    return Record(number.to_bytes(16, "little"), 1, xxh3_64_intdigest(data)), memoryview(data)
store = RecordStore(Begin(str(folder), bytes(16), 60_000, 1 << 33))
store.put([given(0)])
before = resource.getrlimit(getattr(resource, name))
resource.setrlimit(getattr(resource, name), (most, before[1]))
if name == "RLIMIT_NOFILE":
    store.close()
try:
    if name == "RLIMIT_NOFILE":
        RecordStore(Begin(str(folder), bytes(16), 60_000, 1 << 33))
    for number in range(1, 20_000):
        store.put([given(number)])
except StoreFailed as error:
    print(error)
resource.setrlimit(getattr(resource, name), before)
if name == "RLIMIT_NOFILE":
    store = RecordStore(Begin(str(folder), bytes(16), 60_000, 1 << 33))
store.put([given(30_000)])
store.get((30_000).to_bytes(16, "little"), memoryview(bytearray(60_000)))
print("alive")
"""


@pytest.mark.parametrize(
    ("name", "most", "told"),
    [
        ("RLIMIT_FSIZE", 10 << 20, "cannot grow: RLIMIT_FSIZE is 10485760 bytes (ulimit -f)"),
        ("RLIMIT_NOFILE", 3, "cannot get a file descriptor: RLIMIT_NOFILE is 3 open files (ulimit -n)"),
    ],
)
def test_a_limit_on_the_kv_file_is_named_and_survived(
    tmp_path: Path, name: str, most: int, told: str
) -> None:
    command = [sys.executable, "-c", STORING, name, str(most), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    line, alive = done.stdout.splitlines()
    assert told in line and str(tmp_path) in line and alive == "alive"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "x"), "the file F cannot grow: no space is left on its disk"),
        (OSError(errno.ENFILE, "x"), "(fs.file-max is "),
        (OSError(errno.EIO, "Input/output error"), "the file F: Input/output error"),
        (BlockingIOError(errno.EAGAIN, "x"), "RLIMIT_NPROC is "),
        (MemoryError(), "gets no memory: "),
        (lmdb.DiskError("a/b: No space left on device"), "no space is left on its disk"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "gets no memory: "),
        (ValueError("another"), "the file F: another"),
    ],
)
def test_each_error_is_one_sentence(error: Exception, told: str) -> None:
    said = explained(error, "the file F")
    assert said.startswith("the file F") and told in said
