"""Triton kernels over the arena, each beside the function that launches it; ``backend`` is them as `Kernels`.

The references of the same meaning are in ``kernels/reference``. Importing a module of this package imports
triton, so nothing else in the room imports it. Without a GPU the kernels run under
``TRITON_INTERPRET=1`` (slowly, for tests), and `ahead` compiles them for GPUs that are not there.
"""
