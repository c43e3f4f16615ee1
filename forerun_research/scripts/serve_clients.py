"""Streaming clients for the load run: asyncio on plain sockets.

They are as cheap as they can be, since they share the cores with the server: answers are kept as bytes while the clock
runs and are read afterwards. Knows nothing of the library.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from forerun_research.scripts.serve_requests import LoadRequest


@dataclass
class ClientAnswer:
    """What came back for one request."""

    ask: LoadRequest
    status: int = 0
    raw: bytearray = field(default_factory=bytearray)
    first_s: float = 0.0  # from before the connection to the first event with text
    total_s: float = 0.0
    announced: bool = False  # a 429 that says when to come again
    error: str = ""

    @property
    def left(self) -> bool:
        return self.status == 200 and self.ask.leave_after > 0 and not self.complete

    @property
    def complete(self) -> bool:
        return b"data: [DONE]" in self.raw[-64:]

    @property
    def events(self) -> list[dict]:
        body = dechunked(bytes(self.raw.partition(b"\r\n\r\n")[2]))
        lines = [line[6:] for line in body.split(b"\n\n") if line.startswith(b"data: ") and line[6:] != b"[DONE]"]
        return [json.loads(line) for line in lines]

    @property
    def text(self) -> str:
        return "".join(c["delta"].get("content") or "" for event in self.events for c in event.get("choices", ()))

    @property
    def tokens(self) -> int:
        return next((event["usage"]["completion_tokens"] for event in self.events if event.get("usage")), 0)


def dechunked(body: bytes) -> bytes:
    """The content of a chunked body, up to where it was cut off."""
    found, at = [], 0
    while (end := body.find(b"\r\n", at)) >= 0 and (size := int(body[at:end], 16)):
        found.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(found)


async def ask_once(host: str, port: int, model: str, ask: LoadRequest) -> ClientAnswer:
    answer, start = ClientAnswer(ask), time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        answer.error = f"no connection: {error}"
        return answer
    try:
        writer.write(ask.http(model, host))
        while piece := await reader.read(65536):
            answer.raw += piece
            if not answer.first_s and b'"content":"' in piece.replace(b'"content":""', b""):
                answer.first_s = time.perf_counter() - start
            if not answer.status:
                answer.status = int(answer.raw[9:12])
            if ask.leave_after and answer.raw.count(b"data: ") > ask.leave_after:
                break
            if answer.complete or (answer.status != 200 and whole(answer.raw)):
                break
    except OSError as error:
        answer.error = f"broken off: {error}"
    finally:
        writer.close()
    answer.total_s = time.perf_counter() - start
    answer.announced = answer.status == 429 and b"retry-after:" in bytes(answer.raw).lower()
    if answer.status == 200 and not answer.complete and not ask.leave_after and not answer.error:
        answer.error = "the stream ended too soon"
    return answer


def whole(raw: bytearray) -> bool:
    """Whether a response with a length is complete."""
    head, found, body = bytes(raw).partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return bool(found) and bool(lengths) and len(body) >= int(lengths[0])


async def together(host: str, port: int, model: str, asks: list[LoadRequest]) -> tuple[float, list[ClientAnswer]]:
    """All at once; seconds until the last is complete."""
    start = time.perf_counter()
    answers = await asyncio.gather(*(ask_once(host, port, model, ask) for ask in asks))
    return time.perf_counter() - start, list(answers)


async def keep_asking(
    host: str, port: int, model: str, asks: Iterator[LoadRequest], clients: int, seconds: float
) -> list[ClientAnswer]:
    """`clients` of them, each asking again as soon as it has its answer, until the time is over."""
    answers: list[ClientAnswer] = []
    end = time.perf_counter() + seconds

    async def client() -> None:
        while time.perf_counter() < end:
            answer = await ask_once(host, port, model, next(asks))
            answers.append(answer)
            if answer.status != 200:
                await asyncio.sleep(0.5)  # a refused client does not hammer

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


def outcomes(answers: list[ClientAnswer]) -> Counter[str]:
    """How many ended in which way."""

    def outcome(answer: ClientAnswer) -> str:
        if answer.error:
            return answer.error
        if answer.left:
            return "left by the client"
        if answer.status == 200:
            return "complete"
        return f"{answer.status} announced" if answer.announced else f"status {answer.status}"

    return Counter(outcome(answer) for answer in answers)
