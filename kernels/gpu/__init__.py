"""Triton kernels over the arena, each beside the function that launches it; ``backend`` offers them as
`Kernels`.

``kernels/reference`` defines what they compute. Importing a module of this package imports triton, so no
other part of the room does it at import time. Without a GPU the kernels run under ``TRITON_INTERPRET=1``
(slow, for tests), and `ahead` compiles them for GPUs that are not present.
"""
