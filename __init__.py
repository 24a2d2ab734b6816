"""Holdfast: an async streaming LLM inference engine for sessions instead of requests.

The rooms, from the ground up: ``sdk`` (client, frames), ``kernels``, ``kvstore``, ``runtime``, ``sessions``,
``gateway``. A room imports only rooms on lower floors; ``tests/test_house.py`` measures it.

``from holdfast import LLM, SamplingParams``: a model in this process, without a server (``gateway.offline``).
These names are imported when they are used, so that ``import holdfast.sdk`` loads no engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .gateway.batches.outputs import CompletionOutput, RequestOutput
    from .gateway.batches.prompts import TextPrompt, TokensPrompt
    from .gateway.batches.sampling_params import SamplingParams, StructuredOutputsParams
    from .gateway.offline import LLM, AsyncLLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

if not TYPE_CHECKING:  # a type checker would take every name for one of this module

    def __getattr__(name: str) -> object:
        homes = {
            "LLM": "offline",
            "AsyncLLM": "offline",
            "CompletionOutput": "batches.outputs",
            "RequestOutput": "batches.outputs",
            "SamplingParams": "batches.sampling_params",
            "StructuredOutputsParams": "batches.sampling_params",
            "TextPrompt": "batches.prompts",
            "TokensPrompt": "batches.prompts",
        }
        if name not in homes:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            found = getattr(import_module(f".gateway.{homes[name]}", __name__), name)
        except ModuleNotFoundError as error:
            needed = "it needs the engine's packages: in Holdfast's checkout, pip install '.[engine]'"
            raise ImportError(
                f"cannot import {name!r} from {__name__!r}: {needed}", name=error.name
            ) from error
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
