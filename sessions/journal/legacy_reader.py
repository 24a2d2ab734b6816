"""Reads a journal of formats 1 and 2 for `legacy`, in its own process, as LMDB ends its process on damage.

``python -I legacy_reader.py FOLDER TABLE KEY all|first`` writes the table's records from the key KEY on
(hexadecimal; "": from the first), or only the next one, to stdout: length of key and of value, 4 bytes each,
key, value. It ends with 0 if all could be read, and dies if the disk does not answer for `SILENT_SECONDS`.
"""

from __future__ import annotations

import os
import signal
import struct
import sys

import lmdb

SILENT_SECONDS = 30
TABLES = 8


def main(folder: str, table: str, first: str, how: str) -> int:
    """Write the records to stdout. Returns the exit status."""
    before = b""
    try:
        signal.alarm(SILENT_SECONDS)
        environment = lmdb.open(folder, readonly=True, lock=False, max_dbs=TABLES)
        named = environment.open_db(table.encode(), create=False)
        with environment.begin(db=named) as transaction:
            cursor = transaction.cursor()
            found = cursor.set_range(bytes.fromhex(first)) if first else cursor.first()
            while found:
                key, value = cursor.item()
                signal.alarm(0)  # the reader of stdout may take its time
                if before and key <= before:  # a damaged tree that leads back to itself
                    return 1
                before = key
                send(struct.pack("<II", len(key), len(value)) + key + value)
                signal.alarm(SILENT_SECONDS)
                found = how != "first" and cursor.next()
    except lmdb.NotFoundError:
        return 0
    except lmdb.Error:
        return 1
    return 0


def send(record: bytes) -> None:
    """Write the bytes to stdout at once, without a buffer, as LMDB may end this process at the next page."""
    data = memoryview(record)
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
