"""An asyncio handler, as a web framework would call it: requests that overlap share batches, and a client that leaves
cancels its request.

    python examples/async_handler.py
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from forerun import LLM, ForerunError, SamplingParams


async def handle(llm: LLM, question: str) -> AsyncIterator[str]:
    """Text of one answer as it is generated. Closing the iterator cancels the request and frees its pages."""
    messages = [{"role": "user", "content": question}]
    async for event in llm.astream(messages, SamplingParams(max_tokens=40)):
        yield event.text  # an error of the request is raised by the loop


async def client(llm: LLM, name: str, question: str) -> None:
    try:
        text = "".join([part async for part in handle(llm, question)])
    except ForerunError as error:  # a prompt that is too long: one client's error is no other's
        print(f"{name}: {error}")
    else:
        print(f"{name}: {text.strip()}")


async def impatient(llm: LLM) -> None:
    """Leaves after the first piece of text."""
    parts = handle(llm, "Count from one to one hundred.")
    async for part in parts:
        print(f"impatient client leaves after {part!r}")
        break
    await parts.aclose()  # type: ignore[attr-defined]


async def main() -> None:
    with LLM() as llm:
        await asyncio.gather(
            client(llm, "first", "Name a colour."),
            client(llm, "second", "Name an animal."),
            client(llm, "third", "word " * 20_000),
            impatient(llm),
        )


if __name__ == "__main__":
    asyncio.run(main())
