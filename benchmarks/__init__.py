"""Room benchmarks: what is claimed of speed and of not losing anything, measured against a peer or a limit.

Holds a module per benchmark with a ``main`` (`holdfast bench NAME`: ``NAME.py`` or ``NAME/bench.py``), what
they share (``harness``), the worker in which ``peers`` run, the rows of `make gpu` (``gpu``), the faults that
are done to a real server (``faults``), the toy models (``toys``), and the pocket model's dialogues, training
and measure (``pocket``). What they found is in ``results/``; ``README.md`` says how to repeat it.
Does not decide whether a goal is good: a figure, its goal and whether it is met stand next to each other.
May import every room; none imports it, but for the command line, when `holdfast bench` is called.
"""
