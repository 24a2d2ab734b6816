"""Run by `.venv-clients-llama-index`: LlamaIndex's model for servers like OpenAI's, alone and in its agent.

    python llama_index_run.py http://127.0.0.1:8040 pocket

Prints what was said, and which cities its tool was asked for.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

RAN: list[str] = []


class Trip(BaseModel):
    """A city of the two."""

    city: Literal["Oslo", "Rome"]


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    RAN.append(city)
    return json.dumps({"temperature": 7, "sky": "cloudy"})


async def agent_of(model: OpenAILike) -> dict[str, Any]:
    """Three turns of an agent, which streams each; the package's memory keeps them."""
    agent = FunctionAgent(llm=model, tools=[get_weather])
    memory = ChatMemoryBuffer.from_defaults(token_limit=1200)
    said, pieces = [], 0
    for question in ("My name is Marisol.", "What is the weather in Rome?", "What is my name?"):
        running = agent.run(question, memory=memory)
        async for event in running.stream_events():
            pieces += isinstance(event, AgentStream) and bool(event.delta)
        said.append(str(await running))
    return {"said": said, "pieces": pieces, "ran": list(RAN)}


async def model_alone(model: OpenAILike) -> dict[str, Any]:
    """The model's own calls: chat and completion, streamed and not, and a typed answer."""
    asked = [ChatMessage(role="user", content="My name is Ana.")]
    said = [str(model.chat(asked).message.content), str((await model.achat(asked)).message.content)]
    said.append("".join(str(piece.delta) for piece in model.stream_chat(asked)))
    said.append(str(model.complete("My name is Ana.")))
    said.append("".join(str(piece.delta) for piece in model.stream_complete("My name is Ana.")))
    typed = model.as_structured_llm(Trip).chat([ChatMessage(role="user", content="I live in Oslo.")])
    return {"said": said, "typed": type(typed.raw).__name__}


async def main(url: str, model: str) -> dict[str, Any]:
    made = OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=1536,
        temperature=0,
        max_retries=0,
    )
    return {"agent": await agent_of(made), "alone": await model_alone(made)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
