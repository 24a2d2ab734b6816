"""Sessions: conversations kept across turns, and their words to tokens and back. See README.md.

Token ids go down the link to the engine, and sampled ids come up. Does not know sockets, frames, HTTP, tensors,
blocks or steps. May import ``runtime`` (its link and errors) and ``kvstore`` (its settings and errors); never
torch.
"""
