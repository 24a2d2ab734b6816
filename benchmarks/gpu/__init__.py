"""``make gpu``: measurements on a GPU, with one command and without a network; ``run`` is the command.

``benchmarks/README.md``, "On a GPU", says how to call it and what it writes. ``wheels`` packs its dependencies.
``measure`` times and counts; ``machine`` measures the ceilings; ``attention``, ``memory``, ``companies`` and
``peers`` the kernels; ``engine`` the whole engine. The kernels' parts need only torch, triton and numpy.
"""
