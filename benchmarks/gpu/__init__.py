"""``make gpu``: what a GPU can show, by one command and without a network; ``run`` is the command.

How it is called, and what it writes: ``benchmarks/README.md``, "On a GPU". ``wheels`` is what it carries along.
``measure`` times and counts; ``machine`` are the ceilings; ``attention``, ``memory``, ``companies`` and
``peers`` the kernels; ``engine`` the whole. The kernels' parts need torch, triton and numpy alone.
"""
