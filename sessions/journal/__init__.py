"""The journal: what lets a session outlive its process. Append-only logs, written by one thread in groups.

It keeps the operations on each session's history and a few records about it; a history is made again by
replaying its operations. KV is not in it: that is recomputed, or comes from the tiers. Damage to a log
costs the sessions that have records in the damaged place. Knows nothing of sockets or frames.

| file | cares about |
|---|---|
| `journal.py` | the thread that commits groups; each session's log on it |
| `records.py` | what is written: operations, records, changes |
| `replay.py` | operations to a history, and to one snapshot |
| `store.py` | changes to records, room, reading |
| `state.py` | the index in memory: which record counts, and where it lies; what is forgotten |
| `logs.py`, `segment.py` | the log files; their bytes |
| `compaction.py` | rewrites logs without dead records |
| `model_store.py`, `folder.py` | finds a model's store at start; its lock, its identity, calls on files |
| `legacy.py`, `legacy_reader.py` | moves journals of formats 1 and 2 (LMDB) into logs |
| `admin.py` | stat, verify, repair, backup, gc, erase |
"""
