"""The journal: what makes a session outlive its process. Append-only logs behind one thread, synced in groups.

Holds records (operations on a session's history), the logs they are appended to, checked and compacted in, the
index in memory that says which of them count, the writer, and how a history is made again from its operations.
Damage to a log costs the sessions whose records it hit. Knows nothing of sockets or frames, and nothing of KV:
that is recomputed, or comes from the tiers.

| file | what is in it |
|---|---|
| `journal.py`, `log.py` | the thread that commits groups; one session's place in it |
| `changes.py`, `records.py` | what is written: plain data, its schema |
| `store.py` | changes to records, retention, room, reading |
| `state.py`, `places.py` | the index in memory: which record counts, where it lies |
| `logs.py`, `segment.py`, `disk.py` | the files: opened, appended to, read; their bytes; the calls |
| `compaction.py` | logs rewritten without what is dead |
| `opening.py`, `identity.py`, `lock.py` | where a model's journal is; whether it is that of the last start |
| `legacy.py`, `legacy_reader.py` | LMDB journals of before, moved into logs by way of a child process |
| `admin.py` | stat, verify, repair, backup, gc, erase |
| `replay.py`, `snapshot.py` | operations to a history, and to one record |
| `shares.py` | what of it is which tenant's |
"""
