"""The journal: what lets a session outlive its process. Append-only logs, written by one thread in groups.

It keeps the operations on each session's history and a few records about it; a history is made again by
replaying its operations. KV is not in it: that is recomputed, or comes from the tiers. Damage to a log
costs the sessions that have records in the damaged place. Knows nothing of sockets or frames.

| file | cares about |
|---|---|
| `journal.py`, `session_log.py` | the thread that commits groups; each session's log on it |
| `records.py` | what is written: operations, records, changes |
| `replay.py` | operations to a history, and to one snapshot |
| `store.py` | changes to records, room, reading |
| `state.py`, `session_states.py` | the index in memory: which record counts, and where; its packed form |
| `retention.py`, `clock.py` | which sessions are forgotten next; the time that servers ran, by which they age |
| `logs.py`, `segment.py` | the log files; their bytes |
| `merge.py` | rewrites logs without dead records |
| `model_store.py`, `folder.py`, `lock.py` | a model's store at start; its identity, calls on files; its lock |
| `backup.py` | a copy of the logs that the next run brings up to date, in one step |
| `admin.py` | stat, verify, repair, backup, gc, erase |

Format 4, in which two servers on one store can neither mix nor lose what was acknowledged:

- A store has one server. That is said by a lock of the folder and of a file in it (`kvstore.folder_lock`). It
  is compared with what the store's path leads to after each sync, before that is acknowledged, and once a
  second. If the folder was moved, replaced or mounted over, if the lock is another process's, or if a log is
  not at its path, nothing is acknowledged (`StoreLost`) until all is as it was.
- Nothing below relies on that. Each opening to write is a *run* with 64 random bits. It writes only logs that
  it has made as new files, and so do merges. The key of a log, random too, begins the checksum of each of
  its records. So no byte of one run is ever a record in another run's log.
- A session's number has 128 bits: a count, and the run that began the session. Two runs give no number twice.
- A run knows all logs with lower numbers than its own. The header of each of its logs says where those that
  were unfinished ended when it read them: what another server writes behind that place was never acknowledged
  after it, as its lock was signed by then, and counts for nothing.
- The time of a record is that of the store's clock: how long servers were seen to run. The time of day is
  nowhere.

Logs of format 3 are read by the same code (all keys are 0, numbers have 64 bits, times count as 0), and each is
rewritten by the next merges. Formats 1 and 2, in LMDB, are refused.

What a client deletes leaves the logs: the mark says that it was deleted (`ERASED`), the logs that have records
of the session are stained, and ``erase_seconds`` later the log that is being written is sealed and all of them
are rewritten. An item that is removed from a session that goes on is treated alike: a snapshot of the session,
which has nothing of it, replaces the operations before. The one that removed it stays in the logs as
long as another stained log has records of the session, so that the next server finds that log. Operations that
forks need stay: so forks get such snapshots first where text has to go that they do not have, and need nothing
of the other session then. A full disk is left the same way. Then logs are rewritten in which less is dead, and
a file in the store, the reserve, is shortened for what makes room.
"""
