"""Sessions: conversations kept across turns, and their words to tokens and back. See README.md.

Does not know sockets, frames, HTTP, tensors, blocks or steps: tokens go down the link, rows come up. May import
``runtime`` (its link and errors) and ``kvstore`` (its settings and errors); never torch.
"""
