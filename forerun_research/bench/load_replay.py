"""Replays a trace against a target, in real time. Knows no figures."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence

from forerun_research.bench.load_targets import LoadTarget, Messages, ReplayedAnswer
from forerun_research.bench.load_trace import TraceRequest, TraceTexts


async def replay(
    target: LoadTarget, trace: Sequence[TraceRequest], texts: TraceTexts, first: int = 0
) -> list[ReplayedAnswer]:
    """All answers, in the trace's order. Turns of a session follow each other, with the answers that came. `first`: the
    number of the first question."""
    start = time.perf_counter()
    answers = [ReplayedAnswer(number) for number in range(len(trace))]
    sessions: dict[str, list[int]] = defaultdict(list)
    for number, request in enumerate(trace):
        sessions[request.session or f"\0{number}"].append(number)

    async def run(numbers: list[int]) -> None:
        messages: Messages = []
        for number in numbers:
            request, answer = trace[number], answers[number]
            await asyncio.sleep(max(0.0, start + request.arrival_s - time.perf_counter()))
            messages.append(texts.user_message(first + number, request))
            await target.ask(answer, list(messages), request.max_tokens, request.key)
            messages.append({"role": "assistant", "content": answer.text})

    await asyncio.gather(*(run(numbers) for numbers in sessions.values()))
    return answers
