"""The CPU backend: numba kernels with the signatures of `interface.Kernels`. It needs numba.

They read and write blocks in place, accumulate in fp32, and touch no slot without a token. ``backend`` is
what the decoder gets; the other files hold the loops.
"""
