"""What a replica's steps cost, measured from outside: a few requests of known lengths, timed as their readers see them.

Short answers alone and sixteen at once give the cost of a step and of each answer in it, the same after a long document
that is cached the cost of attention, and first tokens of documents of two lengths that of prompts. All that lies
between a client and the engine is part of it. Knows neither the trace that is simulated later nor the simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

from forerun.errors import ForerunError
from forerun_research.bench.load_replay import replay
from forerun_research.bench.load_simulation import MAX_PIECE_TOKENS, ReplicaCosts
from forerun_research.bench.load_targets import LoadTarget, ReplayedAnswer
from forerun_research.bench.load_trace import TraceRequest, TraceTexts

ROWS = 16  # answers that are timed together
ANSWER_TOKENS = 48
SHORT, LONG = "probe short", "probe long"  # documents
DOCUMENT_TOKENS = {SHORT: 512, LONG: 2048}
TRIES = 3


async def measured_costs(target: LoadTarget, texts: TraceTexts) -> ReplicaCosts:
    """Of a target that answers nothing else meanwhile."""
    asked = 10**6  # numbers of questions, which no trace has

    async def ask(count: int, tokens: int, document: str | None = None) -> list[ReplayedAnswer]:
        nonlocal asked
        asked += count
        size = 24 + DOCUMENT_TOKENS.get(document or "", 0)
        requests = [TraceRequest(0.0, size, tokens, document) for _ in range(count)]
        answers = await replay(target, requests, texts, asked)
        for answer in answers:
            if answer.error:
                raise ForerunError(f"a probe failed: {answer.error}", "see the server's log")
        return answers

    await ask(1, ANSWER_TOKENS)  # whatever a first request costs
    alone = [(await ask(1, ANSWER_TOKENS))[0] for _ in range(TRIES)]
    short, long = [(await ask(1, 2, name))[0] for name in (SHORT, LONG)]
    warm = [(await ask(1, ANSWER_TOKENS, LONG))[0] for _ in range(TRIES)]
    many, attending = [await ask(ROWS, ANSWER_TOKENS, name) for name in (None, LONG)]
    return _solved(alone, short, long, warm, many, attending)


def _solved(
    alone: Sequence[ReplayedAnswer],
    short: ReplayedAnswer,
    long: ReplayedAnswer,
    warm: Sequence[ReplayedAnswer],
    many: Sequence[ReplayedAnswer],
    attending: Sequence[ReplayedAnswer],
) -> ReplicaCosts:
    one, rows, deep = (_gap(answers) for answers in (alone, many, attending))
    row = max(0.0, (rows - one) / (ROWS - 1))
    step = max(0.0, one - row)
    answer_attention = max(0.0, (deep - rows) / (ROWS * (mean(a.prompt_tokens for a in attending))))
    first = median(answer.first_s for answer in alone)
    sizes = [answer.prompt_tokens - answer.cached_tokens for answer in (alone[-1], short, long)]
    seconds = [first, short.first_s, long.first_s]
    seconds = [s - step * -(-size // MAX_PIECE_TOKENS) for s, size in zip(seconds, sizes, strict=True)]
    # seconds = request + size * token + size ** 2 / 2 * attention, three times
    slopes = [(seconds[i + 1] - seconds[i]) / (sizes[i + 1] - sizes[i]) for i in range(2)]
    attention = max(0.0, 2 * (slopes[1] - slopes[0]) / (sizes[2] - sizes[0]))
    token = max(1e-9, slopes[1] - attention * (sizes[2] + sizes[1]) / 2)
    request = max(0.0, seconds[0] - sizes[0] * token - sizes[0] ** 2 / 2 * attention)
    left = warm[-1].prompt_tokens - warm[-1].cached_tokens
    read = (
        median(answer.first_s for answer in warm) - request - step - left * (token + attention * warm[-1].cached_tokens)
    )
    encode = min(token / 2, max(0.0, read / warm[-1].prompt_tokens))
    return ReplicaCosts(step, row, token - encode, attention, answer_attention, encode, request)


def _gap(answers: Sequence[ReplayedAnswer]) -> float:
    """Seconds of a step while all of them decode: from the last first token to the first last one."""
    begin, end = max(a.token_times[0] for a in answers), min(a.token_times[-1] for a in answers)
    if len({id(answer) for answer in answers}) > 1 and begin < end:
        counts = [sum(begin < moment <= end for moment in a.token_times) for a in answers]
        return (end - begin) / max(1.0, mean(counts))
    return median(mean(answer.gaps_s) for answer in answers)
