"""Grammars of replies: their limits, their compilation, and the mask of what may come next."""
