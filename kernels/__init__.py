"""Kernels: the tensor operations of a decoder layer and of sampling.

``interface`` lists them. ``reference`` is the torch version, which runs on any device and defines what the
faster backends in ``cpu`` and ``gpu`` must compute. ``batch`` has a step's layout, ``device`` the streams and
events. This room imports no other room.
"""
