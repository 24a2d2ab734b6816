"""Kernels: what is computed per layer and per draw, on tensors alone.

Holds the torch reference that runs on any device and says what faster kernels must compute: storing K and
V, ragged paged attention, norm, rotary, gated activation, block copies, sampling; and a step's layout.
Does not know models, sequences, plans, or who owns a block. Imports torch and numpy, and no other room.
"""
