"""The CPU backend: numba kernels with the signatures of `interface.Kernels`.

They read and write blocks in place, accumulate in fp32, and touch no slot that holds no token. ``backend`` is
what the decoder gets; the other files hold the loops. Knows no models and no sequences; needs numba.
"""
