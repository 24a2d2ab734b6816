"""Sessions: what a conversation is, and how its words become tokens and come back as words.

Holds the tree of turns with its moving head, items, the model's tokenizer and chat template, difference
rendering, detokenizing, stop strings, tool calls, the session that runs turns over the runtime's link, and what
the engine is told of its pauses (``foresight``; what was said of them, ``waits``).
Does not know sockets, frames, HTTP, tensors, blocks or steps: tokens go down the link, rows come up.
May import ``runtime`` (its link and errors) and ``kvstore`` (its settings and errors); never torch.
"""
