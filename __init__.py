"""Holdfast: an async streaming LLM inference engine for sessions instead of requests.

The rooms, from the ground up: ``sdk`` (client, frames), ``kernels``, ``kvstore``, ``runtime``, ``sessions``,
``gateway``. A room imports only rooms on lower floors; ``tests/test_house.py`` measures it.
"""

__version__ = "0.1.0"
