"""``make gpu``: measurements on a GPU, with one command and without a network; ``run`` is the command.

``benchmarks/README.md``, "On a GPU", says how to call it and what it writes. ``wheels`` packs its dependencies.
``measure`` has timing and the form of figures; ``machine`` measures the machine's limits; ``attention``,
``memory``, ``companies`` and ``peers`` the kernels; ``steps`` and ``serving`` the whole engine, made by
``engine`` on shapes of ``models``; ``agent`` and ``loops`` tool loops. The kernels' parts need only torch,
triton and numpy.
"""
