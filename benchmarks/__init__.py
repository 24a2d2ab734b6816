"""Benchmarks: measures speed, and that nothing is lost, against other engines or fixed goals.

Holds a module per benchmark with a ``main`` (`holdfast bench NAME`: ``NAME.py`` or ``NAME/bench.py``), shared
parts (``harness``), the worker that runs other engines (``peers``), the parts of `make gpu` (``gpu``), fault
tests on a real server (``faults``), toy models (``toys``), and the pocket model's dialogues, training and
evaluation (``pocket``). Results are in ``results/``; ``README.md`` says how to repeat them.
May import every room. Only the command line imports it, when `holdfast bench` is called.
"""
