# mypy: disable-error-code="import-not-found, misc"
# the packages need not be installed
"""Clients and frameworks as people use them, against a running server: which calls work.

    pip install openai 'anthropic<1' langchain-openai langchain-anthropic litellm mcp instructor \
        'pydantic-ai-slim[openai,anthropic]' llama-index-llms-openai-like
    forerun serve --model qwen2.5-coder-0.5b-instruct &
    python -m forerun_research.scripts.client_check http://127.0.0.1:8000

Packages that are not installed are listed and count as nothing. What a call is checked for is that it works and returns
what it should be made of: how good a small model's answers are is not its subject.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from typing import Any

import httpx
from pydantic import BaseModel

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
FACT = "Oslo has 700000 people."
Checks = dict[str, Callable[[], Any]]


class City(BaseModel):
    name: str
    people: int


def get_weather(city: str) -> str:
    """The weather in a city"""
    return "7 degrees"


def openai(url: str, model: str) -> Checks:
    from openai import AsyncOpenAI, OpenAI

    given: Any = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    client: Any = OpenAI(**given)
    question: Any = {"model": model, "messages": QUESTION, "max_tokens": 80}
    fact: Any = {"model": model, "messages": [{"role": "user", "content": FACT}], "max_tokens": 160}
    asked: Any = {"model": model, "input": "Hi", "max_output_tokens": 80}
    tool = {"type": "function", "strict": True} | WEATHER["function"]

    def round_trip() -> Any:
        message = client.chat.completions.create(**question, tools=[WEATHER], tool_choice="required").choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls]
        whole = question | {"messages": [*QUESTION, message, *results]}
        return client.chat.completions.create(**whole, tools=[WEATHER]).choices

    def helper() -> Any:
        with client.chat.completions.stream(**fact, response_format=City) as stream:
            kinds = {event.type for event in stream}
            return {"content.delta", "content.done"} <= kinds and stream.get_final_completion().choices[
                0
            ].message.parsed

    def continued() -> Any:
        first = client.responses.create(**asked)
        second = client.responses.create(**(asked | {"input": "And?"}), previous_response_id=first.id)
        return second.previous_response_id == first.id and client.responses.retrieve(first.id).id == first.id

    def called() -> Any:
        first = client.responses.create(**(asked | {"input": "Weather in Oslo?"}), tools=[tool], tool_choice="required")
        calls = [item for item in first.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "7"} for call in calls]
        return client.responses.create(**(asked | {"input": results}), previous_response_id=first.id).output

    def events() -> Any:
        with client.responses.stream(**asked) as stream:
            kinds = [event.type for event in stream]
        return kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")

    async def later() -> Any:
        other: Any = AsyncOpenAI(**given)
        async with other:
            return [chunk async for chunk in await other.chat.completions.create(**question, stream=True)]

    return {
        "models": lambda: client.models.retrieve(client.models.list().data[0].id).id == model,
        "chat": lambda: client.chat.completions.create(**question).choices[0].message.content,
        "chat, streamed": lambda: (
            list(client.chat.completions.create(**question, stream=True, stream_options={"include_usage": True}))[
                -1
            ].usage
        ),
        "chat, async": lambda: asyncio.run(later()),
        "chat, tools": round_trip,
        "chat, parsed": lambda: client.chat.completions.parse(**fact, response_format=City).choices[0].message.parsed,
        "chat, stream helper": helper,
        "completions": lambda: client.completions.create(model=model, prompt="The sky", max_tokens=8).choices[0].text,
        "responses": lambda: client.responses.create(**asked).output_text,
        "responses, not stored": lambda: client.responses.create(**asked, store=False).output_text,
        "responses, continued": continued,
        "responses, tools": called,
        "responses, parsed": lambda: (
            client.responses.parse(
                **(asked | {"input": FACT, "max_output_tokens": 160}), text_format=City
            ).output_parsed
        ),
        "responses, streamed": events,
    }


def anthropic(url: str, model: str) -> Checks:
    from anthropic import Anthropic, AsyncAnthropic

    given: Any = {"base_url": url, "api_key": "none", "max_retries": 0}
    client: Any = Anthropic(**given)
    question: Any = {"model": model, "messages": QUESTION, "max_tokens": 80}
    function = WEATHER["function"]
    tool = {"name": "get_weather", "description": function["description"], "input_schema": function["parameters"]}
    marked: Any = [{"type": "text", "text": "Be brief. " * 50, "cache_control": {"type": "ephemeral"}}]

    def round_trip(stream: bool) -> Any:
        forced: Any = question | {"tools": [tool], "tool_choice": {"type": "any"}}
        if stream:
            with client.messages.stream(**forced) as streamed:
                message = streamed.get_final_message()
        else:
            message = client.messages.create(**forced)
        calls = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "7"} for call in calls]
        turns = [*QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        return client.messages.create(**(question | {"messages": turns, "tools": [tool]})).stop_reason and calls

    def cached() -> Any:
        first, second = (client.messages.create(**question, system=marked).usage for _ in range(2))
        return (first.cache_creation_input_tokens or first.cache_read_input_tokens) and second.cache_read_input_tokens

    def texts() -> Any:
        with client.messages.stream(**question) as stream:
            return "".join(stream.text_stream) == stream.get_final_text()

    def stopped() -> Any:
        made = client.messages.create(**question, stop_sequences=["e", "a"])
        return made.stop_reason == "stop_sequence" and made.stop_sequence in ("e", "a")

    async def later() -> Any:
        other: Any = AsyncAnthropic(**given)
        async with other, other.messages.stream(**question) as stream:
            return await stream.get_final_text()

    return {
        "messages": lambda: client.messages.create(**question).content[0].text,
        "messages, events": lambda: (
            [event.type for event in client.messages.create(**question, stream=True)][-1] == "message_stop"
        ),
        "messages, streamed": texts,
        "messages, async": lambda: asyncio.run(later()),
        "messages, tools": lambda: round_trip(False),
        "messages, tools, streamed": lambda: round_trip(True),
        "messages, cache_control": cached,
        "messages, stop_sequences": stopped,
        "count_tokens": lambda: client.messages.count_tokens(model=model, messages=QUESTION).input_tokens,
    }


def llama_index(url: str, model: str) -> Checks:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    made = OpenAILike(
        model=model, api_base=f"{url}/v1", api_key="none", max_tokens=160, temperature=0,
        is_chat_model=True, is_function_calling_model=True, context_window=4096,
    )  # fmt: skip
    asked, tool = [ChatMessage(role="user", content="Weather in Oslo?")], FunctionTool.from_defaults(get_weather)

    def round_trip() -> Any:
        called = made.chat_with_tools([tool], chat_history=asked, tool_required=True)
        calls = made.get_tool_calls_from_response(called)
        results = [ChatMessage(role="tool", content="7", additional_kwargs={"tool_call_id": c.tool_id}) for c in calls]
        return made.chat([*asked, called.message, *results]).message.content is not None and calls

    return {
        "complete": lambda: made.complete("Hi").text,
        "complete, streamed": lambda: "".join(part.delta or "" for part in made.stream_complete("Hi")),
        "chat": lambda: made.chat(asked).message.content,
        "chat, streamed": lambda: "".join(part.delta or "" for part in made.stream_chat(asked)),
        "chat, async": lambda: asyncio.run(made.achat(asked)).message.content,
        "tools": round_trip,
        "structured": lambda: made.as_structured_llm(City).complete(FACT).raw,
    }


def langchain(url: str, model: str) -> Checks:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_openai import ChatOpenAI, OpenAI

    def chat(**more: Any) -> Any:
        return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, max_tokens=80, temperature=0, **more)

    def claude() -> Any:
        return ChatAnthropic(base_url=url, api_key="none", model=model, max_tokens=80)

    def round_trip(made: Any) -> Any:
        question = HumanMessage("What is the weather in Oslo?")
        called = made.bind_tools([get_weather], tool_choice="get_weather").invoke([question])
        result = ToolMessage("7 degrees", tool_call_id=called.tool_calls[0]["id"])
        return made.bind_tools([get_weather]).invoke([question, called, result])

    def streamed_call() -> Any:
        parts = list(chat().bind_tools([get_weather], tool_choice="any").stream("Weather in Oslo?"))
        return sum(parts[1:], parts[0]).tool_calls

    marked = [{"type": "text", "text": "Be brief. " * 50, "cache_control": {"type": "ephemeral"}}]
    found: Checks = {
        "invoke": lambda: chat().invoke("Hi").content,
        "stream": lambda: "".join(part.content for part in chat(stream_usage=True).stream("Hi")),
        "batch": lambda: len(chat().batch(["a", "b", "c"])) == 3,
        "async": lambda: asyncio.run(chat().ainvoke("Hi")).content,
        "tools, round trip": lambda: round_trip(chat()),
        "tools, streamed": streamed_call,
        "logprobs": lambda: chat().bind(logprobs=True, top_logprobs=2).invoke("Hi").response_metadata["logprobs"],
        "usage": lambda: chat().invoke("Hi").usage_metadata["total_tokens"],
        "completions": lambda: OpenAI(base_url=f"{url}/v1", api_key="none", model=model, max_tokens=8).invoke(
            "The sky"
        ),
        "responses": lambda: chat(use_responses_api=True).invoke("Hi").content,
        "responses, streamed": lambda: list(chat(use_responses_api=True).stream("Hi")),
        "responses, tools": lambda: round_trip(chat(use_responses_api=True)),
        "messages": lambda: claude().invoke("Hi").content,
        "messages, streamed": lambda: list(claude().stream("Hi")),
        "messages, tools": lambda: round_trip(claude()),
        "messages, structured": lambda: claude().with_structured_output(City).invoke(FACT),
        "messages, cache_control": lambda: claude().invoke([SystemMessage(marked), HumanMessage("Hi")]).content,
    }
    for method in ("json_schema", "function_calling"):
        found[f"structured by {method}"] = lambda method=method: (
            chat().with_structured_output(City, method=method).invoke(FACT)
        )
    return found


def litellm(url: str, model: str) -> Checks:
    import litellm as lite

    lite.suppress_debug_info = True
    places = {"openai": f"{url}/v1", "anthropic": url, "hosted_vllm": f"{url}/v1"}

    def ask(kind: str = "openai", **more: Any) -> Any:
        place = {"model": f"{kind}/{model}", "api_base": places[kind], "api_key": "none", "max_tokens": 80}
        return lite.completion(**({"messages": QUESTION} | place | more))

    def round_trip(kind: str, stream: bool) -> Any:
        given = {"tools": [WEATHER], "tool_choice": "required"}
        made = ask(kind, stream=stream, **given)
        message = (lite.stream_chunk_builder(list(made)) if stream else made).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls]
        return ask(kind, messages=[*QUESTION, message.model_dump(), *results], tools=[WEATHER])

    found: Checks = {
        "vLLM's fields": lambda: (
            ask("hosted_vllm", top_k=3, min_p=0.1, guided_regex="[a-z ]+").choices[0].message.content
        ),
        "schema": lambda: City.model_validate_json(ask(response_format=City).choices[0].message.content),
        "responses": lambda: (
            lite.responses(
                model=f"openai/{model}", api_base=f"{url}/v1", api_key="none", input="Hi", max_output_tokens=20
            ).output
        ),
    }
    for kind in ("openai", "anthropic"):
        found[f"{kind}"] = lambda kind=kind: ask(kind).choices[0].message.content
        found[f"{kind}, streamed"] = lambda kind=kind: list(ask(kind, stream=True))
        for stream in (False, True):
            found[f"{kind}, round trip of its answer{', streamed' * stream}"] = lambda kind=kind, stream=stream: (
                round_trip(kind, stream)
            )
    return found


def instructor(url: str, model: str) -> Checks:
    import anthropic
    import instructor as ins
    import openai

    asked: Any = {"model": model, "response_model": City, "messages": [{"role": "user", "content": FACT}]}
    asked |= {"max_tokens": 160, "max_retries": 0}

    def client(mode: Any) -> Any:
        return ins.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode).chat.completions

    def claude() -> Any:
        made = anthropic.Anthropic(base_url=url, api_key="none")
        return ins.from_anthropic(made, mode=ins.Mode.ANTHROPIC_TOOLS).messages.create(**asked)

    modes = {name: getattr(ins.Mode, name) for name in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA")}
    found: Checks = {name: lambda mode=mode: client(mode).create(**asked) for name, mode in modes.items()}
    return found | {"partial": lambda: list(client(ins.Mode.TOOLS).create_partial(**asked)), "messages": claude}


def pydantic_ai(url: str, model: str) -> Checks:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    own, settings = OpenAIProvider(base_url=f"{url}/v1", api_key="none"), {"max_tokens": 160, "temperature": 0.0}
    kinds: dict[str, Callable[[], Any]] = {
        "chat": lambda: OpenAIChatModel(model, provider=own),
        "responses": lambda: OpenAIResponsesModel(model, provider=own),
        "messages": lambda: AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key="none")),
    }

    def run(kind: str, text: str = "Hi", **more: Any) -> Any:
        return Agent(kinds[kind](), model_settings=settings, **more).run_sync(text).output

    def history() -> Any:
        agent = Agent(kinds["chat"](), model_settings=settings, instructions="Be brief.")
        return agent.run_sync("And?", message_history=agent.run_sync("Hi").all_messages()).output

    found: Checks = {kind: lambda kind=kind: run(kind) for kind in kinds}
    found |= {f"{kind}, tool": lambda kind=kind: run(kind, FACT, output_type=ToolOutput(City)) for kind in kinds}
    return found | {"native": lambda: run("chat", FACT, output_type=NativeOutput(City)), "history": history}


def main() -> int:
    parser = argparse.ArgumentParser(description="Clients and frameworks against a running server.")
    parser.add_argument("server")
    url = parser.parse_args().server.rstrip("/")
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    os.environ |= {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "LANGSMITH_TRACING": "false"}
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    failed = worked = 0
    packages = {"openai": openai, "anthropic": anthropic, "langchain_openai": langchain, "litellm": litellm}
    packages |= {"instructor": instructor, "pydantic_ai": pydantic_ai, "llama_index.llms.openai_like": llama_index}
    for package, checks in packages.items():
        try:
            importlib.import_module(package)
            found = checks(url, model)
        except ImportError as error:
            print(f"{package}: not installed ({error})")
            continue
        before = worked
        for name, call in found.items():
            try:
                if not call():
                    raise ValueError("nothing came back")
                worked += 1
            except Exception as error:
                failed += 1
                print(f"FAILED {package}, {name}: {error!r:.500}", flush=True)
        print(f"{package} {version_of(package)}: {worked - before} of {len(found)}", flush=True)
    print(f"{worked} calls work, {failed} do not")
    return 1 if failed or not worked else 0


def version_of(package: str) -> str:
    names = importlib.metadata.packages_distributions().get(package.partition(".")[0], ["?"])
    name = "llama-index-llms-openai-like" if package.startswith("llama_index") else names[0]
    return importlib.metadata.version(name)


if __name__ == "__main__":
    sys.exit(main())
