"""`forerun bench load`: replays a trace against the library or an OpenAI endpoint, and what its readers felt.

By kind of request: p50, p95 and p99 of the first token and of the gap between two tokens, the longest gap, and how many
were answered; over all: tokens a second, the share of prompt tokens that caches had, and what an answer costs at a
price per hour. `chats` replays the same short chats twice, without and with long prompts beside them, each in a
process that has just been started (an endpoint is used as it is).
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from statistics import mean
from typing import Any

from rich.table import Table

from forerun.errors import BadRequest, ForerunError
from forerun_research.bench import common
from forerun_research.bench.load_costs import Probes, measured_costs, probed, solved_together
from forerun_research.bench.load_replay import replay
from forerun_research.bench.load_replica import ReplicaCosts
from forerun_research.bench.load_served import served_beside
from forerun_research.bench.load_simulation import SimulatedSetup, simulate
from forerun_research.bench.load_targets import EndpointTarget, LibraryTarget, Messages, ReplayedAnswer
from forerun_research.bench.load_trace import TraceRequest, TraceTexts, turn_tokens
from forerun_research.bench.sides import PARENT_GONE

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
DRAWS = 8  # simulations whose mean counts: the p95 of thirty first tokens is one of them, and a matter of luck


@dataclass(frozen=True)
class LoadSetup:
    """What is measured: a model in this process tree, or an endpoint."""

    model: str
    url: str | None = None
    api_key: str = "none"
    api_keys: tuple[tuple[str, str], ...] = ()  # name in the trace, key
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    kv_cache_tokens: int | None = None
    speculation: str = "auto"
    price_per_hour: float = 0.0
    shape: str | None = None  # random weights of this shape instead of a model


def figures(trace: Sequence[TraceRequest], answers: Sequence[ReplayedAnswer], price_per_hour: float) -> dict[str, Any]:
    """What the readers of these answers felt, and what they cost."""
    ended = [answer for answer in answers if answer.token_times and not answer.error]
    kinds: dict[str, Any] = {}
    for kind in dict.fromkeys(request.kind for request in trace):
        own = [answer for answer in ended if trace[answer.number].kind == kind]
        gaps = [gap for answer in own for gap in answer.gaps_s]
        kinds[kind] = {
            "requests": sum(request.kind == kind for request in trace),
            "answered": len(own),
            "prompt_tokens": sum(answer.prompt_tokens for answer in own),
            "first_s": quantiles([answer.first_s for answer in own]),
            "gap_s": quantiles(gaps),
            "mean_first_s": sum(answer.first_s for answer in own) / max(1, len(own)),
            "mean_gap_s": sum(gaps) / max(1, len(gaps)),
        }
    errors = [answer.error for answer in answers if answer.error]
    span = max((a.token_times[-1] for a in ended), default=0.0) - min((a.sent for a in ended), default=0.0)
    prompt = sum(answer.prompt_tokens for answer in ended)
    sessions = len({trace[answer.number].session or answer.number for answer in ended})
    return {
        "kinds": kinds,
        "seconds": span,
        "tokens_per_s": sum(answer.completion_tokens for answer in ended) / span if span else 0.0,
        "hit_rate": sum(answer.cached_tokens for answer in ended) / prompt if prompt else 0.0,
        "cost_per_answer": price_per_hour / 3600 * span / len(ended) if ended else 0.0,
        "cost_per_session": price_per_hour / 3600 * span / sessions if sessions else 0.0,
        "errors": {message: errors.count(message) for message in dict.fromkeys(errors)},
    }


def simulated_figures(
    trace: Sequence[TraceRequest],
    setup: SimulatedSetup,
    costs: ReplicaCosts | Mapping[int, ReplicaCosts],
    price_per_hour: float = 0.0,
    turns: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """The same of so many replicas: means of simulations that differ in which steps happened to be slow."""
    draws = [replace(setup, draw=draw) for draw in range(DRAWS)]
    return mean_figures([figures(trace, simulate(trace, own, costs, turns), price_per_hour) for own in draws])


def mean_figures(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of figures of the same trace."""
    made: dict[str, Any] = {}
    for name, first in found[0].items():
        values = [own[name] for own in found]
        made[name] = (
            mean_figures(values) if isinstance(first, dict) else first if isinstance(first, int) else mean(values)
        )
    return made


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """The smallest value that so large a share of all does not exceed."""
    ranked = sorted(values)
    return {name: ranked[max(0, math.ceil(share * len(ranked)) - 1)] for name, share in QUANTILES.items() if ranked}


def run(setup: LoadSetup, traces: dict[str, list[TraceRequest]]) -> dict[str, Any]:
    """The figures of each trace, each in a process of its own."""
    name = setup.model if setup.shape is None else f"random {setup.shape}"
    result: dict[str, Any] = {"bench": "load", "model": name, "url": setup.url}
    result["price_per_hour"] = setup.price_per_hour
    result["runs"] = {name: in_fresh_process(setup, trace) for name, trace in traces.items()}
    if setup.url is None:
        result["hardware"] = common.hardware(common.Setup(setup.model, threads=setup.threads).thread_count())
    return result


def in_fresh_process(setup: LoadSetup, trace: list[TraceRequest]) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_one, args=(theirs, setup, trace), daemon=True)
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        raise ForerunError("the process of the bench ended without a result", "look at what it printed") from None
    finally:
        process.join(30)
        process.kill()
    if isinstance(found, BaseException):
        raise found
    return found


def _serve_one(pipe: Connection, setup: LoadSetup, trace: list[TraceRequest]) -> None:
    found: Any
    try:
        found = measure(setup, trace)
    except ForerunError as error:
        found = error
    except Exception as error:
        found = ForerunError(f"{type(error).__name__}: {error}", "")
    with suppress(*PARENT_GONE):
        pipe.send(found)


def run_simulation(
    setup: LoadSetup, traces: dict[str, list[TraceRequest]], counts: Sequence[int], cores: float | None
) -> dict[str, Any]:
    """The figures of each trace on so many replicas, simulated from costs that are measured first; a machine each,
    unless `cores` says how many they share: then so many processes are started and measured together."""
    from forerun import LLM

    threads = common.Setup(setup.model, threads=setup.threads).thread_count()
    with LLM(setup.model, dtype=setup.dtype, device=setup.device, threads=setup.threads, quiet=True) as llm:
        cache_tokens = setup.kv_cache_tokens or llm.engine.config.capacity
        texts = _texts(llm.encode)
        turns = {name: turn_tokens(trace, texts, llm.encode) for name, trace in traces.items()}
        alone = None if cores else asyncio.run(measured_costs(LibraryTarget(llm, speculation="off"), texts))
    beside = [] if alone is not None else together(counts, cores, threads)
    costs = {1: alone} if alone is not None else solved_together({n: _beside(setup, n, threads) for n in beside})
    result: dict[str, Any] = {"bench": "load simulation", "model": setup.model, "url": None}
    result["costs"] = {count: asdict(own) for count, own in costs.items()}
    result |= {"price_per_hour": setup.price_per_hour, "runs": {}}
    for name, trace in traces.items():
        for count in counts:
            made = SimulatedSetup(count, cores or float(count * threads), threads, cache_tokens)
            price, own = setup.price_per_hour * (1 if cores else count), costs if alone is None else alone
            result["runs"][f"{name} x{count}"] = simulated_figures(trace, made, own, price, turns[name])
    result["hardware"] = common.hardware(threads)
    return result


def together(counts: Sequence[int], cores: float | None, threads: int) -> list[int]:
    """Numbers of processes that are measured together: up to twice as many as have cores; beyond, in proportion."""
    most, found = min(max(counts), max(1, math.ceil(2 * (cores or 0.0) / threads))), [1]
    while found[-1] < most:
        found.append(min(most, 2 * found[-1]))
    return found


def _beside(setup: LoadSetup, processes: int, threads: int) -> Probes:
    with served_beside(setup.model, processes, threads) as target:
        return asyncio.run(probed(target, TraceTexts(), processes))


def measure(setup: LoadSetup, trace: list[TraceRequest]) -> dict[str, Any]:
    """Replay a trace in this process."""
    if setup.url is not None:
        target = EndpointTarget(setup.url, setup.model, dict(setup.api_keys), setup.api_key, setup.speculation)
        asyncio.run(target.check())
        answers = asyncio.run(replay(target, trace, TraceTexts()))
        if not any(answer.token_times for answer in answers):
            why = f"none of {len(answers)} requests was answered; the first: {answers[0].error or 'no text came'}"
            raise ForerunError(" ".join(why.split()), "check --url, --model and --api-key")
        return figures(trace, answers, setup.price_per_hour)
    from forerun import LLM

    longest = max(request.prompt_tokens + request.max_tokens for request in trace)
    with LLM(
        setup.model if setup.shape is None else _random_model(setup),
        dtype=setup.dtype,
        device=setup.device,
        threads=setup.threads,
        kv_cache_tokens=setup.kv_cache_tokens,
        quiet=True,
    ) as llm:
        if longest > llm.engine.max_length:
            message = f"{longest} tokens of prompt and answer, the model holds {llm.engine.max_length}"
            raise BadRequest(message, "shorten the trace's prompts, or raise kv_cache_tokens")
        encode = llm.encode if setup.shape is None else _word_ids(llm.config.vocab_size)
        answers = asyncio.run(replay(LibraryTarget(llm, encode, setup.speculation), trace, _texts(encode)))
    return figures(trace, answers, setup.price_per_hour)


def _texts(encode: Callable[[Messages], list[int]]) -> TraceTexts:
    """Documents that have about as many tokens as the trace says."""
    sample = common.long_text()[:20_000]
    return TraceTexts(len(sample) / len(encode([{"role": "user", "content": sample}])))


def _random_model(setup: LoadSetup) -> Any:
    from forerun.models.build import choose_device
    from forerun_research.bench.shapes import RandomCheckpoint

    return RandomCheckpoint(setup.shape or "", choose_device(setup.device))


def _word_ids(vocab: int) -> Callable[[Messages], list[int]]:
    """Token ids of a model without a tokenizer: one for each word."""
    return lambda messages: [zlib.crc32(word.encode()) % vocab for m in messages for word in m["content"].split()]


def without_long(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    return [replace(request) for request in trace if request.kind != "long"]


def table(result: dict[str, Any]) -> Table:
    title = f"load on {result['url'] or result['model']}, milliseconds"
    columns = ("", "answered", "first token p50 / p95 / p99", "gap p50 / p95 / p99 / longest")
    found, captions = Table(*columns, title=title, title_justify="left"), []
    for name, figure in result["runs"].items():
        for kind, own in figure["kinds"].items():
            first = _milliseconds(own["first_s"], ("p50", "p95", "p99"))
            gap = _milliseconds(own["gap_s"], tuple(QUANTILES))
            found.add_row(f"{name}: {kind}", f"{own['answered']} of {own['requests']}", first, gap)
        captions.append(
            f"{name}: {figure['seconds']:.1f} s, {figure['tokens_per_s']:.1f} tokens/s, "
            f"{figure['hit_rate']:.0%} of prompt tokens cached"
            + (
                f", {figure['cost_per_answer']:.6f} an answer, {figure['cost_per_session']:.6f} a session"
                if result["price_per_hour"]
                else ""
            )
        )
        captions += [f"{count} x {message}" for message, count in figure["errors"].items()]
    found.caption = "\n".join(captions)
    return found


def _milliseconds(figure: dict[str, float], names: Sequence[str]) -> str:
    return " / ".join(f"{1000 * figure[name]:,.0f}" for name in names if name in figure)
