"""Run by `.venv-clients-langchain`: LangChain's chat model for OpenAI, alone and in an agent of LangGraph.

    python langchain_run.py http://127.0.0.1:8040 pocket chat|responses

Prints what was said, which cities its tool was asked for, and the usage of the last reply.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel

RAN: list[str] = []


class Trip(BaseModel):
    """A city of the two."""

    city: Literal["Oslo", "Rome"]


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    RAN.append(city)
    return json.dumps({"temperature": 7, "sky": "cloudy"})


def asked(text: str) -> Any:
    return {"messages": [HumanMessage(text)]}


async def agent_of(model: ChatOpenAI) -> dict[str, Any]:
    """An agent with a checkpoint: each turn brings its own message alone, and one is streamed."""
    agent: Any = create_agent(model, [get_weather], checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "1"}}
    said = [agent.invoke(asked("My name is Marisol."), thread)["messages"][-1].text]
    pieces = []
    async for piece, _ in agent.astream(
        asked("What is the weather in Rome?"), thread, stream_mode="messages"
    ):
        if isinstance(piece, AIMessageChunk) and piece.text:
            pieces.append(piece.text)
    last = (await agent.ainvoke(asked("What is my name?"), thread))["messages"][-1]
    return {
        "said": [*said, "".join(pieces), last.text],
        "pieces": len(pieces),
        "ran": list(RAN),
        "usage": last.usage_metadata,
    }


async def model_alone(model: ChatOpenAI) -> dict[str, Any]:
    """The chat model's own calls."""
    messages = [SystemMessage("The user's dog is called Tamu."), HumanMessage("What is my dog called?")]
    said = [model.invoke(messages).text, (await model.ainvoke(messages)).text]
    said.append("".join([piece.text async for piece in model.astream(messages)]))
    many = [reply.text for reply in model.batch(["My name is Ana.", "Hello!"])]
    bound = model.bind_tools([get_weather], tool_choice="get_weather").invoke("Hello!")
    assert isinstance(bound, AIMessage)
    typed = {
        method: type(model.with_structured_output(Trip, method=method).invoke("I live in Oslo.")).__name__
        for method in ("json_schema", "function_calling")
    }
    return {"said": said, "many": many, "bound": bound.tool_calls[0]["name"], "typed": typed}


async def main(url: str, model: str, face: str) -> dict[str, Any]:
    chat = ChatOpenAI(
        model=model,
        base_url=f"{url}/v1",
        api_key="none",  # type: ignore[arg-type]
        temperature=0,
        max_retries=0,
        stream_usage=True,
        use_responses_api=face == "responses",
    )
    return {"agent": await agent_of(chat), "alone": await model_alone(chat)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
