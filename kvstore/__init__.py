"""Room kvstore: the bytes of KV blocks on three tiers (device, host, disk), and their names.

``runtime.kv_placement`` decides which sequence's KV lies where. Knows no sequences, turns, sessions, models.
Only ``arena`` and ``block_mover`` import torch. May import ``kernels``.
"""
