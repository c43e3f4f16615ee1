"""What a replica's steps cost, measured from outside: a few requests of known lengths, timed as their readers see them.

Short answers alone, two and sixteen at once give the cost of a step and of each answer in it, one and sixteen after
documents that are cached the cost of attention, and first tokens after documents of several lengths that of prompts.
A question after a rest costs more by reading K/V that no cache holds any more. What a question takes beside an answer
of the same replica, more than the simulation says, is the cost of taking it in beside steps. By how much the gaps of
one answer differ, steps do. All that lies between a client and the engine is part of it. Replicas that share a machine
take cores, memory's bandwidth and the front's time from each other: their costs are measured with all of them asked at
once, each about a document of its own, which keeps its questions there; then with half of them answering while the
others compute a prompt, since these are not slowed alike. Knows no trace that is simulated later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from statistics import mean, median

import numpy as np

from forerun.errors import ForerunError
from forerun_research.bench.load_replay import replay
from forerun_research.bench.load_replica import MAX_PIECE_TOKENS, NEAR_TOKENS, RESTED_S, ReplicaCosts, StepParts
from forerun_research.bench.load_simulation import SharedCosts, SimulatedSetup, simulate
from forerun_research.bench.load_targets import LoadTarget, ReplayedAnswer
from forerun_research.bench.load_trace import TraceRequest, TraceTexts

ROWS = 16  # answers of a replica that are timed together
# Of an answer alone, and of those timed together: long enough that all of them decode at once after their prompts
ANSWER_TOKENS, ROW_TOKENS = 48, 160
# Tokens of a document that a question begins with; the first decide its replica
BRIEF, MIDDLE, WHOLE = 320, NEAR_TOKENS, 2368
TRIES = 3
SPREAD = 20  # values that stand for all of what steps took
QUESTIONS = 4  # beside an answer
INTAKE_FACTORS = tuple(1.0 + i / 5 for i in range(16))
GROWN = WHOLE + 600  # a document that grows while other replicas answer: two pieces of a prompt
STREAMING_S = 0.5  # after which an answer has begun
SHARES = tuple(i / 20 for i in range(41))
LATER_S = 1000.0  # than a document is known
APART_S = 0.005  # between requests that are sent together: the front counts one before it sends the next

Round = list[ReplayedAnswer]  # of requests that were sent together, as many to each replica
Line = tuple[tuple[float, ...], float]  # parts of a step or of a first token; seconds
_Beside = tuple[int, int, ReplayedAnswer]  # replicas that did the same, replicas that did the other, what was timed


@dataclass(frozen=True)
class Probes:
    """Answers to requests of known lengths, by replicas of which so many were asked at once."""

    busy: int
    brief: list[Round]  # one at a replica, which knows the beginning
    longer: list[Round]  # one at a replica, whose document gets longer: middle, whole
    middle: list[Round]  # one at a replica, whose document is known as far as that
    warm: list[Round]  # the same, whole documents
    two: list[Round]  # brief ones, two at a replica
    many: list[Round]  # brief ones, ROWS at a replica
    attending: list[Round]  # about whole documents, ROWS at a replica
    rested: list[Round]  # as in `middle`, each after a rest
    beside: list[Round]  # at each replica an answer, and QUESTIONS about its document meanwhile: those of all come last
    mixed: list[Round]  # some replicas answer, the others compute what a document grew by: those come last

    def with_later(self, later: Probes) -> Probes:
        """These and those of another time: machines change in minutes."""
        lists = {f.name: getattr(self, f.name) + getattr(later, f.name) for f in fields(self) if f.name != "busy"}
        return Probes(self.busy, **lists)


async def measured_costs(target: LoadTarget, texts: TraceTexts, busy: int = 1) -> ReplicaCosts:
    """Of a target that answers nothing else meanwhile; `busy`: replicas behind it, all of which are asked at once."""
    return solved(await probed(target, texts, busy))


async def probed(target: LoadTarget, texts: TraceTexts, busy: int = 1, time: int = 0) -> Probes:
    """`time`: how often that was done before, so that documents are new."""
    asked = 10**6 * (busy + 100 * time)  # numbers of questions, which no trace has

    def requests(documents: Sequence[int], tokens: int, length: int, after_s: float = 0.0) -> list[TraceRequest]:
        named = enumerate(f"probe {busy} {time} {document}" for document in documents)
        return [TraceRequest(after_s + APART_S * i, length, tokens, name) for i, name in named]

    async def ask(documents: Sequence[int], tokens: int, length: int) -> Round:
        return await answered(requests(documents, tokens, length))

    async def answered(requests: list[TraceRequest]) -> Round:
        nonlocal asked
        asked += len(requests)
        answers = await replay(target, requests, texts, asked)
        for answer in answers:
            if answer.error:
                raise ForerunError(f"a probe failed: {answer.error}", "see the server's log")
        return answers

    each = range(busy)
    await ask(each, ANSWER_TOKENS, BRIEF)  # at the same time, so that each goes to another replica and is kept there
    brief = [await ask(each, ANSWER_TOKENS, BRIEF) for _ in range(TRIES)]
    longer = [await ask(each, 2, MIDDLE)]
    middle = [await ask(each, ANSWER_TOKENS, MIDDLE) for _ in range(TRIES)]
    rested = [await answered(requests(each, 2, MIDDLE, RESTED_S)) for _ in range(2 * TRIES)]
    apart = 4 * max(answer.first_s for own in middle for answer in own)  # one has ended when the next one comes
    questions = [own for i in range(QUESTIONS) for own in requests(each, 2, MIDDLE, (i + 0.5) * apart)]
    beside = [await answered(requests(each, 2 * ROW_TOKENS, MIDDLE) + questions) for _ in range(TRIES)]
    longer.append(await ask(each, 2, WHOLE))
    warm = [await ask(each, ANSWER_TOKENS, WHOLE) for _ in range(TRIES)]
    two = [await ask([*each] * 2, ANSWER_TOKENS, BRIEF) for _ in range(TRIES)]
    many, attending = [await ask([*each] * ROWS, ROW_TOKENS, length) for length in (BRIEF, WHOLE)]
    brief += [await ask(each, ANSWER_TOKENS, BRIEF) for _ in range(TRIES)]  # again: machines change in a minute
    halves = [(each[: busy // 2], each[busy // 2 :])] if busy > 1 else []
    mixed = []
    for answering, growing in [*halves, *(own[::-1] for own in halves)]:
        grown = requests(growing, 2, GROWN, STREAMING_S)
        mixed.append(await answered(requests(answering, 2 * ROW_TOKENS, WHOLE) + grown))
    return Probes(busy, brief, longer, middle, warm, two, [many], [attending], rested, beside, mixed)


def solved_together(probes: Mapping[int, Probes]) -> dict[int, ReplicaCosts]:
    """What a step and its parts cost, by the number of replicas on one machine that compute at the same time."""
    found: dict[int, ReplicaCosts] = {}
    for count, own in sorted(probes.items()):
        found[count] = solved(own)
        if own.mixed:
            found[count] = _with_shares(SharedCosts(found), own)
    return found


def _with_shares(costs: SharedCosts, probes: Probes) -> ReplicaCosts:
    """With how many replicas that decode one counts for that computes a prompt, and the other way round: so many that
    the answers, and the prompts beside them, would have taken what they did."""
    answers, prompts, gaps = list[_Beside](), list[_Beside](), 0.0
    for own in probes.mixed:
        grown = [answer for answer in own if len(answer.token_times) == 2]
        streams = [answer for answer in own if answer not in grown]
        begin, end = max(answer.sent for answer in grown), min(answer.token_times[0] for answer in grown)
        for answer in streams:
            beside = [gap for at, gap in zip(answer.token_times, answer.gaps_s, strict=False) if begin < at < end - gap]
            if beside:
                answers.append((len(streams), len(grown), answer))
                gaps += mean(beside)
        prompts += [(len(grown), len(streams), answer) for answer in grown]

    def share(seconds: float, beside: list[_Beside], of: Callable[[ReplayedAnswer, ReplicaCosts], float]) -> float:
        def expected_s(share: float) -> float:
            return sum(of(answer, costs.of(alike + share * others)) for alike, others, answer in beside)

        return next((share for share in SHARES if expected_s(share) >= seconds), SHARES[-1])

    firsts = sum(answer.first_s for *_, answer in prompts)
    return replace(
        costs.of(probes.busy),
        prompts_beside_answers=share(gaps, answers, _step_s),
        answers_beside_prompts=share(firsts, prompts, _first_s),
    )


def _step_s(answer: ReplayedAnswer, costs: ReplicaCosts) -> float:
    """Of a step of this answer alone, halfway."""
    context = answer.prompt_tokens + len(answer.token_times) // 2
    far = max(0, context - NEAR_TOKENS)
    return StepParts(rows=1, contexts=context, near=context - far, far=far).seconds(costs)


def _first_s(answer: ReplayedAnswer, costs: ReplicaCosts) -> float:
    parts, pieces_s = _prompt_parts(answer.prompt_tokens, answer.cached_tokens, costs)
    each = (costs.request_s, costs.encode_s, costs.prompt_token_s, costs.attention_s)
    return pieces_s + sum(part * cost for part, cost in zip(parts, each, strict=True))


def solved(probes: Probes) -> ReplicaCosts:
    """The same of one number of replicas, as if all did the same."""
    alone = (probes.brief, probes.middle, probes.warm)
    together = ((2, probes.two), (ROWS, probes.many), (ROWS, probes.attending))
    steps = [_answers_step(1, own) for own in alone]
    steps += [_answers_step(n, own) for n, rounds in together if (own := [r for r in rounds if _at_once(r)])]
    step, row, several, near, far, each = _least_squares(steps)
    costs = ReplicaCosts(step, row, 0.0, 0.0, each, 0.0, 0.0, several, near, far)
    lines = [_first_token(own, costs) for own in alone] + [_first_token([own], costs) for own in probes.longer]
    request, encode, token, attention = _least_squares(lines)
    costs = replace(costs, request_s=request, encode_s=encode, prompt_token_s=token, attention_s=attention)
    spread = _spread([answers for own in alone for answers in own])
    costs = replace(costs, cold_attention_s=_cold_attention_s(probes))
    return replace(_with_intake(costs, probes), spread=spread)


def _cold_attention_s(probes: Probes) -> float:
    rested, middle = (median(a.first_s for own in rounds for a in own) for rounds in (probes.rested, probes.middle))
    return max(0.0, rested - middle) / mean(a.cached_tokens for own in probes.rested for a in own)


def _with_intake(costs: ReplicaCosts, probes: Probes) -> ReplicaCosts:
    """With the factor by which steps and intake slow each other, so that questions hold up an answer as long as they
    did. Their own first tokens tell less: a slower answer has the engine run longer pieces of prompts beside it."""
    rounds = [(own[: probes.busy], own[probes.busy :]) for own in probes.beside]
    traces = [_beside(streams[0], questions[:: probes.busy]) for streams, questions in rounds]
    held_up = [_held_up_s(own, asked[i :: probes.busy]) for streams, asked in rounds for i, own in enumerate(streams)]

    def expected_s(factor: float) -> float:
        tried = {1: replace(costs, intake_factor=factor)}
        found = [simulate(trace, SimulatedSetup(1, 1.0), tried) for trace in traces]
        return mean(_held_up_s(stream, asked) for _, stream, *asked in found)

    found = (factor for factor in INTAKE_FACTORS if expected_s(factor) >= mean(held_up))
    return replace(costs, intake_factor=next(found, INTAKE_FACTORS[-1]))


def _held_up_s(stream: ReplayedAnswer, questions: Sequence[ReplayedAnswer]) -> float:
    """By how much longer than others the steps of an answer took while questions had no first token."""
    steps = list(zip(stream.token_times, stream.gaps_s, strict=False))
    beside = [any(a < q.token_times[0] and a + gap > q.sent for q in questions) for a, gap in steps]
    alone = [gap for (_, gap), other in zip(steps, beside, strict=True) if not other]
    return sum(gap - median(alone) for (_, gap), other in zip(steps, beside, strict=True) if other)


def _beside(stream: ReplayedAnswer, questions: Sequence[ReplayedAnswer]) -> list[TraceRequest]:
    """What one replica was asked, after a request by which it knows the document."""

    def again(answer: ReplayedAnswer, tokens: int) -> TraceRequest:
        arrival, new = LATER_S + answer.sent - stream.sent, answer.prompt_tokens - answer.cached_tokens
        return TraceRequest(arrival, answer.prompt_tokens, tokens, "known", question_tokens=new)

    known = TraceRequest(0.0, stream.prompt_tokens, 1, "known")
    return [known, again(stream, len(stream.token_times)), *(again(question, 1) for question in questions)]


def _answers_step(count: int, rounds: list[Round]) -> Line:
    """A step of so many answers about one document at a replica, which read that once and each its own question."""
    answers = [a for own in rounds for a in own]
    context = mean(a.prompt_tokens + len(a.token_times) / 2 for a in answers)
    document = min(context, mean(a.cached_tokens for a in answers))
    near = min(document, NEAR_TOKENS) + count * max(0.0, min(context, NEAR_TOKENS) - document)
    distinct = document + count * (context - document)
    return (1, count, count > 1, near, distinct - near, count * context), median(map(_gap, rounds))


def _spread(rounds: Sequence[Round]) -> tuple[float, ...]:
    """By how many seconds steps differed from their mean, of the same steps in each answer, in order."""
    seconds = np.sort([gap - mean(a.gaps_s) for own in rounds for a in own if len(a.gaps_s) > 1 for gap in a.gaps_s])
    return tuple(float(part.mean()) for part in np.array_split(seconds, SPREAD) if len(part)) or (0.0,)


def _first_token(rounds: list[Round], costs: ReplicaCosts) -> Line:
    """Of prompts alone at their replicas, without the steps that their pieces are and the K/V that those read."""
    answers = [a for own in rounds for a in own]
    prompt, cached = (mean(getattr(a, name) for a in answers) for name in ("prompt_tokens", "cached_tokens"))
    parts, pieces_s = _prompt_parts(prompt, cached, costs)
    return parts, median(a.first_s for a in answers) - pieces_s


def _prompt_parts(prompt: float, cached: float, costs: ReplicaCosts) -> Line:
    """What a prompt is for a replica that computes nothing else, and seconds of the steps that its pieces are."""
    new = prompt - cached
    before = [cached + i * MAX_PIECE_TOKENS for i in range(math.ceil(new / MAX_PIECE_TOKENS))]
    pieces_s = sum(costs.step_s + costs.several_s + costs.reading_s(tokens) for tokens in before)
    return (1.0, prompt, new, new * (cached + new / 2)), pieces_s


def _least_squares(found: Sequence[Line]) -> list[float]:
    """Costs of which none is below zero, by trying which of them are zero; errors count by their share."""
    seconds = np.array([max(own, 1e-9) for _, own in found])
    lines = np.array([parts for parts, _ in found]) / seconds[:, None]
    count, best = lines.shape[1], (float("inf"), [0.0] * lines.shape[1])
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            part = lines[:, chosen]
            costs = np.linalg.lstsq(part, np.ones_like(seconds), rcond=None)[0]
            error = float(((part @ costs - 1.0) ** 2).sum())
            if (costs >= 0).all() and error < best[0] - 1e-12:
                values = dict(zip(chosen, costs.tolist(), strict=True))
                best = error, [values.get(i, 0.0) for i in range(count)]
    return best[1]


def _span(answers: Round) -> tuple[float, float]:
    """When all of them decode: from the last first token to the first last one."""
    return max(a.token_times[0] for a in answers), min(a.token_times[-1] for a in answers)


def _at_once(answers: Round) -> bool:
    """Not if some had ended before others began: nothing tells then what a step of all of them takes."""
    begin, end = _span(answers)
    return begin < end


def _gap(answers: Round) -> float:
    """Seconds of a step while all of them decode."""
    begin, end = _span(answers)
    if len(answers) == 1 or begin >= end:  # at different replicas
        return median(mean(answer.gaps_s) for answer in answers)
    counts = [sum(begin < moment <= end for moment in a.token_times) for a in answers]
    return (end - begin) / max(1.0, mean(counts))
