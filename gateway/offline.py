"""A model in Python without a server: ``LLM`` completes prompts and conversations in batches, with the calls of
vLLM's class; ``AsyncLLM`` is its twin for code with ``async``.

    from holdfast import LLM, SamplingParams

    with LLM("pocket") as llm:
        for output in llm.generate(["The fox", "A ship"], SamplingParams(temperature=0, max_tokens=32)):
            print(output.prompt, output.outputs[0].text)
        print(llm.chat([{"role": "user", "content": "Hello!"}])[0].outputs[0].text)
        with llm.session(instructions="Be brief.") as chat:
            print(chat.say("My name is Marisol.").finish().text)

The engine is a thread of this process: it needs no port and no ``if __name__ == "__main__"``, and ends with
the process. It shares the interpreter with your code, so Python that computes for long in another thread slows
it down; ``process=True`` gives it a process of its own, which is restarted if it dies. Either way the engine
batches prompts as it batches the turns of sessions, and prompts with a common beginning share its KV. Importing
this module loads no torch.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, Unpack

import anyio.to_thread
import msgspec
from anyio.from_thread import start_blocking_portal

from ..kvstore.log_lines import LogSettings
from ..kvstore.options import settings_of
from ..runtime.link.child import ENVIRONMENT
from ..runtime.link.process import ChildEngine
from ..runtime.model.folder import find_model, model_name
from ..runtime.settings import EngineSettings
from ..runtime.thread import ThreadEngine
from ..sdk.chat import MAX_TOOL_ROUNDS, Chat
from ..sdk.client import Client
from ..sdk.params import SessionOptions
from ..sdk.sync import SyncChat, SyncClient
from ..sdk.tools.tool import ToolLike, tools_of
from ..sessions.conversation.items import Tool
from ..sessions.errors import SamplingInvalid
from ..sessions.turn.request import MAX_SEED, RequestBounds, TurnRequest
from ..sessions.turn.turn_grammar import TurnGrammar
from .batches.completer import Completer, CompletionBatch, Completions, Deliver, PromptTask
from .batches.outputs import RequestOutput
from .batches.progress_bars import LoadingBar, PromptBar, UseTqdm
from .batches.prompts import ChatMessage, Prompt, PromptEncoder, PromptType
from .batches.sampling_params import SamplingParams
from .embedded import in_memory
from .live.requests import tools_of as tools_from
from .service import Service, opened
from .settings import GatewaySettings

SamplingChoice: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
"""Sampling parameters for all prompts of a call, or a list with those of each prompt; None: the model's own
defaults."""
Conversation: TypeAlias = Sequence[ChatMessage]


class LLMOptions(TypedDict, total=False):
    """The keyword arguments of `LLM` and `AsyncLLM`. Sizes in bytes, lengths in tokens.

    dtype: of the weights and of computing: ``auto``, ``float32`` or ``float``, ``bfloat16``, ``float16`` or
    ``half``. quantization: ``int8``, ``int4`` or ``fp8``, to which linears are quantised as the model is
    loaded. kv_cache_dtype: ``auto``, ``fp8``, ``fp8_e4m3`` or ``float8_e4m3fn``. device: as torch names it, or
    ``auto``. max_model_len: the longest prompt and completion together. max_num_seqs: completions that run at
    once. max_num_batched_tokens: tokens that one step computes. gpu_memory_utilization: the fraction of a GPU's
    memory to take. enforce_eager: no CUDA graphs. block_size: tokens of one KV block. num_gpu_blocks,
    kv_cache_memory_bytes: KV on the device, as a number of blocks or of bytes; at most one of them. seed: for
    the seeds of completions that set none, so that a program gives the same results each time. tool_fallback:
    for a chat template that does not show tools: write them into the instructions. process: run the engine in a
    process of its own. engine: all other settings of the engine. gateway: the settings of sessions, among them
    the folder that keeps them.
    """

    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    device: str
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    gpu_memory_utilization: float | None
    enforce_eager: bool | None
    block_size: int | None
    num_gpu_blocks: int | None
    kv_cache_memory_bytes: int | None
    seed: int | None
    tool_fallback: bool
    process: bool
    engine: EngineSettings | None
    gateway: GatewaySettings | None


_SETTINGS = {setting.option.also or setting.name: setting for setting in settings_of(EngineSettings)}
"""The engine's settings, by vLLM's names where they have some."""
SPINNING = "GOMP_SPINCOUNT"


class AsyncLLM:
    """A model for code with ``async``: ``async with AsyncLLM("pocket") as llm``.

    ``model``: ``pocket``, ``smollm2``, a folder, a GGUF file or a hub id. ``options``: `LLMOptions`. Entering
    the block loads the model. It raises ``ModelUnreadable``, ``SettingsInvalid``, ``TokenizerUnreadable``,
    ``TemplateFailed`` or ``EngineDied``. Several calls may run at once; they share the engine's steps.
    """

    def __init__(self, model: str, **options: Unpack[LLMOptions]) -> None:
        self._settings, self._gateway, seed, self._process = _settings(model, **options)
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        self._stack: AsyncExitStack | None = None
        self._completer: Completer | None = None
        self._client: Client | None = None
        self._tokenizer: Any = None
        self._requests = 0

    def __repr__(self) -> str:
        state = "open" if self._stack is not None else "closed"
        return f"<{type(self).__name__} {self._settings.model}, {state}>"

    async def __aenter__(self) -> AsyncLLM:
        settings, bar = self._settings, LoadingBar()
        async with AsyncExitStack() as stack:
            stack.callback(bar.close)
            engine: ChildEngine | ThreadEngine
            if self._process:
                engine = ChildEngine(settings, on_heartbeat=bar.heard)
            else:
                if "torch" not in sys.modules:  # its threads read this once, when it is imported
                    os.environ.setdefault(SPINNING, ENVIRONMENT[SPINNING])
                engine = ThreadEngine(settings, on_heartbeat=bar.heard)
            service = Service(self._gateway, model_name(settings.model), engine.link)
            registry = await stack.enter_async_context(opened(service, settings.model, engine))
            bar.close()
            most = 2 * engine.link.hello.max_sequences  # so that one is waiting where another ends
            recovery = self._gateway.recovery_seconds
            self._completer = Completer(
                engine.link, registry.language, asyncio.Semaphore(most), most, recovery
            )
            self._client = in_memory(service)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the completions that run, the sessions and the engine. Does nothing the second time."""
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.aclose()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingChoice = None,
        use_tqdm: UseTqdm = False,
    ) -> Completions:
        """Complete prompts without a chat template, as `LLM.generate` does with the same arguments. ``await``
        the result for the list of outputs, or iterate over it for pieces of text. Wrong arguments raise when it
        is awaited or iterated, not here."""

        async def run(deliver: Deliver) -> list[RequestOutput]:
            encoder = self._encoder()
            made = await anyio.to_thread.run_sync(encoder.raw, prompts)
            params = _each(sampling_params or self.get_default_sampling_params(), len(made))
            return await self._complete(self._tasks(made, params), None, deliver, use_tqdm)

        return Completions(run)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingChoice = None,
        use_tqdm: UseTqdm = False,
        *,
        tools: Iterable[ToolLike] | None = None,
        tool_choice: str = "auto",
    ) -> Completions:
        """Reply to a conversation, or to each of a list of them, as `LLM.chat` does with the same arguments.
        ``await`` the result for the list of outputs, or iterate over it for pieces of text. Wrong arguments
        raise when it is awaited or iterated, not here."""

        async def run(deliver: Deliver) -> list[RequestOutput]:
            offered, encoder = _tools(tools), self._encoder()
            made = await anyio.to_thread.run_sync(encoder.conversations, _conversations(messages), offered)
            usual, most = self._running().link.hello.defaults, self._gateway.default_max_tokens
            params = _each(sampling_params or SamplingParams.of_model(usual, most), len(made))
            tasks = self._tasks(made, params, offered, tool_choice)
            return await self._complete(tasks, offered, deliver, use_tqdm)

        return Completions(run)

    def session(
        self,
        *,
        instructions: str | None = None,
        tools: Iterable[ToolLike] = (),
        max_tool_rounds: int = MAX_TOOL_ROUNDS,
        **options: Unpack[SessionOptions],
    ) -> AbstractAsyncContextManager[Chat]:
        """A new session on this engine, closed at the end of the block: the SDK's `Chat`, with turns, fork,
        rewind, interrupt and tools (`sdk/README.md`). Parameters and errors are those of `Client.session`."""
        return self.client.session(
            instructions=instructions, tools=tools, max_tool_rounds=max_tool_rounds, **options
        )

    @property
    def client(self) -> Client:
        """The SDK's client of this engine: opens sessions, and resumes them by their handles."""
        self._running()
        assert self._client is not None, "it is set with the completer"
        return self._client

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling parameters, with 16 for ``max_tokens``; greedy if it has none."""
        return SamplingParams.of_model(self._running().link.hello.defaults)

    async def statistics(self) -> dict[str, float]:
        """The engine's counters, by name."""
        return await self._running().link.statistics()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as a tokenizer object of transformers, with ``encode``, ``decode`` and
        ``apply_chat_template``. Imports transformers."""
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._running(), find_model(self._settings.model))
        return self._tokenizer

    def _running(self) -> Completer:
        if self._stack is None or self._completer is None:
            raise RuntimeError(f"{self!r}: its model is loaded inside its `with` block alone")
        return self._completer

    def _encoder(self) -> PromptEncoder:
        completer = self._running()
        hello = completer.link.hello
        return PromptEncoder(completer.language, hello.max_context, hello.vocab_size)

    def _tasks(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        tools: Sequence[Tool] | None = None,
        tool_choice: str = "none",
    ) -> list[PromptTask]:
        """Make a task of each prompt and its parameters: check the parameters, prepare the grammar, and draw a
        seed where none is set. ``tools``: those of the conversations; None: the prompts are no conversations.
        ``tool_choice``: ``auto``, ``none``, ``required`` or a tool's name."""
        completer, tasks = self._running(), []
        cycles = self._gateway.cycle_tokens if tools is not None else 0
        bounds = RequestBounds(completer.link.hello.vocab_size, completer.language.shows_tools, cycles)
        grammar = TurnGrammar(completer.language)
        named = tool_choice not in ("auto", "none", "required")
        requests: dict[int, TurnRequest] = {}
        for prompt, one in zip(prompts, params, strict=True):
            if id(one) not in requests:
                request = one.request(
                    bounds,
                    tools=tools or (),
                    tool_choice="required" if named else tool_choice,
                    tool=tool_choice if named else None,
                )
                requests[id(one)] = grammar.prepare(request, tools or ())
            request = requests[id(one)]
            if one.seed is None:
                sampling = msgspec.structs.replace(request.sampling, seed=self._seeds.randint(0, MAX_SEED))
                request = msgspec.structs.replace(request, sampling=sampling)
            tasks.append(PromptTask(prompt, one, request, str(self._requests)))
            self._requests += 1
        return tasks

    async def _complete(
        self, tasks: list[PromptTask], tools: Sequence[Tool] | None, deliver: Deliver, use_tqdm: UseTqdm
    ) -> list[RequestOutput]:
        batch = CompletionBatch(self._running(), tasks, tools)
        with PromptBar(use_tqdm, len(tasks)) as bar:
            return await batch.run(deliver, bar.ended)


class LLM(AbstractContextManager["LLM"]):
    """A model for code without ``async``. It is loaded when it is made, and freed by `close`, at the end of a
    ``with`` block, or at the end of the program.

    ``model``: ``pocket``, ``smollm2``, a folder, a GGUF file or a hub id. ``options``: `LLMOptions`. Raises
    ``ModelUnreadable``, ``SettingsInvalid``, ``TokenizerUnreadable``, ``TemplateFailed`` or ``EngineDied``.
    Calls run on an event loop in a thread of its own, so it works in a notebook, too.
    """

    def __init__(self, model: str, **options: Unpack[LLMOptions]) -> None:
        self._llm = AsyncLLM(model, **options)
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(self._portal.wrap_async_context_manager(self._llm))
            loop = self._portal.call(threading.current_thread)
            self._closing = weakref.finalize(self, _close, stack.pop_all(), loop)

    def __repr__(self) -> str:
        return repr(self._llm).replace("AsyncLLM", "LLM")

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End its sessions and the engine, and free the memory. Does nothing the second time."""
        self._closing()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingChoice = None,
        use_tqdm: UseTqdm = True,
    ) -> list[RequestOutput]:
        """Complete prompts without a chat template; returns one output for each, in order.

        ``prompts``: a text, token ids, a dict with ``prompt`` or ``prompt_token_ids``, or a list of these.
        ``sampling_params``: those of all prompts, or a list with those of each; None: the model's own defaults
        and 16 tokens. ``use_tqdm``: show a progress bar; or what makes one.

        Before anything runs it raises a ``ValueError`` for a wrong prompt or parameter: ``InputInvalid``,
        ``PromptTooLong``, ``SamplingInvalid``, ``GrammarInvalid``; ``param`` names it. Later, a completion that
        fails ends alone: its ``finish_reason`` is ``error``, its ``error`` says why. Raises
        ``EngineUnavailable`` if the engine is gone for good.
        """
        return self._read(lambda: self._llm.generate(prompts, sampling_params, use_tqdm=use_tqdm))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingChoice = None,
        use_tqdm: UseTqdm = True,
        *,
        tools: Iterable[ToolLike] | None = None,
        tool_choice: str = "auto",
    ) -> list[RequestOutput]:
        """Reply to a conversation, or to each of a list of them; returns one output for each, in order.

        ``messages``: as in Chat Completions, text only. ``sampling_params``: as in `generate`; None: the
        defaults of a session, so the reply is the one that a session gives. ``tools``: callables or dicts; the
        model sees them, and nothing runs them: `CompletionOutput.tool_calls` has the calls. ``tool_choice``:
        ``auto``, ``none``, ``required`` or the name of a tool.

        Raises what `generate` does; also ``ItemInvalid``, ``CallUnknown`` or ``CallAnswered`` for a wrong
        message, ``ToolInvalid`` for a tool, ``TemplateFailed`` if the chat template refuses the conversation.
        """
        return self._read(
            lambda: self._llm.chat(
                messages, sampling_params, use_tqdm=use_tqdm, tools=tools, tool_choice=tool_choice
            )
        )

    def session(
        self,
        *,
        instructions: str | None = None,
        tools: Iterable[ToolLike] = (),
        max_tool_rounds: int = MAX_TOOL_ROUNDS,
        **options: Unpack[SessionOptions],
    ) -> AbstractContextManager[SyncChat]:
        """A new session on this engine, closed at the end of the block: the SDK's `SyncChat`, with turns, fork,
        rewind, interrupt and tools (`sdk/README.md`). Parameters and errors are those of `Client.session`."""
        client = SyncClient(self._portal, self._llm.client)
        return client.session(
            instructions=instructions, tools=tools, max_tool_rounds=max_tool_rounds, **options
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling parameters, with 16 for ``max_tokens``; greedy if it has none."""
        return self._llm.get_default_sampling_params()

    def statistics(self) -> dict[str, float]:
        """The engine's counters, by name."""
        return self._portal.call(self._llm.statistics)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as a tokenizer object of transformers, with ``encode``, ``decode`` and
        ``apply_chat_template``. Imports transformers."""
        return self._llm.get_tokenizer()

    def _read(self, begin: Callable[[], Completions]) -> list[RequestOutput]:
        """Run the completions that ``begin`` makes, in the thread of the event loop, and return their outputs.
        A Ctrl-C ends the completions."""

        async def read() -> list[RequestOutput]:
            return await begin()

        if not self._closing.alive:
            raise RuntimeError(f"{self!r} cannot be used any more")
        reading = self._portal.start_task_soon(read)
        try:
            return reading.result()
        except BaseException:
            reading.cancel()
            raise


def _close(stack: ExitStack, loop: threading.Thread) -> None:
    """Close the contexts of an `LLM`, which hold its event loop and its engine. ``loop``: the thread of the
    event loop; called in it, this closes them in another thread, because a thread cannot wait for its own
    end."""
    if threading.current_thread() is loop:
        threading.Thread(target=stack.close, name="holdfast-close").start()
    else:
        stack.close()


def _settings(
    model: str,
    *,
    seed: int | None = None,
    tool_fallback: bool = False,
    process: bool = False,
    engine: EngineSettings | None = None,
    gateway: GatewaySettings | None = None,
    **options: Any,
) -> tuple[EngineSettings, GatewaySettings, int | None, bool]:
    if unknown := options.keys() - LLMOptions.__annotations__.keys():
        raise TypeError(f"LLM has no option {min(unknown)!r}")
    changes = {} if (blocks := options.pop("num_gpu_blocks", None)) is None else {"blocks": blocks}
    for name, value in options.items():
        if value is not None:
            setting = _SETTINGS[name]
            changes[setting.field] = setting.option.words.get(value, value)
    base = engine or EngineSettings(model=model, logs=LogSettings(level="warning"))
    gateway = gateway or GatewaySettings()
    settings = msgspec.structs.replace(base, model=model, **changes)
    return settings, replace(gateway, tool_fallback=tool_fallback or gateway.tool_fallback), seed, process


def _each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise SamplingInvalid(
            "sampling_params is a SamplingParams or a list of them", param="sampling_params"
        )
    if len(params) != count:
        raise SamplingInvalid(f"{count} prompts, but {len(params)} sampling_params", param="sampling_params")
    return list(params)


def _conversations(messages: Any) -> list[Conversation]:
    """The argument of `chat` as a list of conversations: a single conversation becomes a list of one."""
    several = isinstance(messages, list | tuple) and messages and isinstance(messages[0], Sequence)
    return list(messages) if several else [messages]


def _tools(tools: Iterable[ToolLike] | None) -> tuple[Tool, ...]:
    """The tools of a call as tools of `sessions`. Each may be a callable, or a dict in the form of Chat
    Completions or of Realtime."""
    flat = [
        {"type": "function", **one["function"]} if isinstance(one, dict) and "function" in one else one
        for one in tools or ()
    ]
    definitions = [tool.definition for tool in tools_of(flat).values()]
    return tools_from(definitions)


def _tokenizer(completer: Completer, folder: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if folder.is_dir():
        return AutoTokenizer.from_pretrained(folder)
    own = completer.language.tokenizer
    made: Any = PreTrainedTokenizerFast
    template: Any = own.template
    if own.tool_template is not None:
        template = {"default": own.template, "tool_use": own.tool_template}
    return made(tokenizer_object=own.backend, chat_template=template, **own.named)
