"""Benchmarks: measures speed, and that nothing is lost, against other engines or fixed goals.

`holdfast bench NAME` runs ``NAME.py`` or ``NAME/bench.py``. ``harness`` has shared parts, ``peers`` runs
other engines, ``gpu`` holds the parts of `make gpu`, ``faults`` breaks a real server, ``toys`` makes
models, ``pocket`` trains and scores the pocket model. Results are in ``results/``. May import every room;
only the command line imports it.
"""
