"""Benchmarks: measure speed, and check that nothing is lost, against other engines or fixed goals.

`holdfast bench NAME` runs ``NAME.py`` or ``NAME/bench.py``. ``harness`` has the parts that several benchmarks
use, ``peers`` runs other engines, ``gpu`` holds the parts of `make gpu`, ``faults`` breaks a real server,
``toys`` makes models with random weights, ``pocket`` trains and scores the pocket model. Results are in
``results/``. May import every room; only the command line imports it.
"""
