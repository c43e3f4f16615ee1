"""`forerun bench load`: traces replayed against the library or an OpenAI endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.commands import options as opt
from forerun.errors import BadRequest
from forerun.options import check_number

if TYPE_CHECKING:
    from forerun_research.bench.load_trace import TraceRequest

MAX_REQUESTS = 1_000_000  # of a trace that is made: it is a list in memory

Url = Annotated[
    str | None,
    typer.Option("--url", help="An endpoint such as http://127.0.0.1:8000/v1; default: the library."),
]
Keys = Annotated[list[str] | None, typer.Option("--key", help="NAME=KEY of a name in the trace; may be repeated.")]
TraceName = Annotated[
    str | None, typer.Option("--trace", help="Replay instead: users, documents, chats, or a file of JSON lines.")
]
Rate = Annotated[
    float | None, typer.Option("--rate", min=0.001, help="Instead: users who arrive at random, so many a second.")
]
Replicas = Annotated[
    str | None,
    typer.Option("--simulate", help="Instead: the trace on so many replicas, such as 1,2,8, by measured costs."),
]
Cores = Annotated[
    float | None, typer.Option("--cores", min=0.1, help="Of all simulated replicas; default: --threads of each.")
]
Speculation = Annotated[
    str, typer.Option("--speculation", help="Of the library or our server: auto, off or a drafter.")
]
RandomShape = Annotated[
    str | None, typer.Option("--random-shape", help="1.5b or 8b: random weights of that shape, for timing only.")
]


def load(
    context: typer.Context,
    model: opt.Model = opt.DEFAULT_MODEL,
    url: Url = None,
    api_key: Annotated[str, typer.Option("--api-key", help="For the endpoint.")] = "none",
    api_keys: Keys = None,
    chats: Annotated[int, typer.Option("--chats", min=1, help="Short chats that stream.")] = 4,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of each chat's answer.")] = 512,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Long prompts that arrive beside them.")] = 1,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=64, help="Tokens of each.")] = 6000,
    later: Annotated[int, typer.Option("--later", min=0, help="Short questions after them.")] = 4,
    trace: TraceName = None,
    rate: Rate = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1.0, help="Of arrivals, with --rate.")] = 60.0,
    documents: Annotated[int, typer.Option("--documents", min=0, help="Documents they ask about.")] = 4,
    document_tokens: Annotated[int, typer.Option("--document-tokens", min=1, help="Of each.")] = 2000,
    turns: Annotated[int, typer.Option("--turns", min=1, help="Questions of each user.")] = 2,
    think: Annotated[float, typer.Option("--think", min=0.0, help="Mean seconds between two questions.")] = 5.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the arrivals.")] = 1,
    save_trace: Annotated[Path | None, typer.Option("--save-trace", help="Write the trace here, too.")] = None,
    price: Annotated[float, typer.Option("--price", min=0.0, help="Of the machine, per hour.")] = 0.0,
    simulate: Replicas = None,
    cores: Cores = None,
    speculation: Speculation = "auto",
    weights: opt.Dtype = "auto",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    kv_cache_tokens: Annotated[int | None, typer.Option("--kv-cache-tokens", min=1, help="Of the library.")] = None,
    random_shape: RandomShape = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the JSON line.")] = False,
) -> None:
    """What readers of short chats feel beside long prompts, or in any trace: first token and gaps, p50 to p99.

    [bold]Examples[/bold]

    forerun bench load

    forerun bench load --url http://127.0.0.1:8000/v1 --model smollm2-135m-instruct --prompt-tokens 5500

    forerun bench load --rate 0.5 --seconds 120 --turns 3 --price 0.4 --save-trace users.jsonl

    forerun bench load --trace users --simulate 1,2,4,8 --price 0.4
    """
    from forerun_research.bench import common
    from forerun_research.bench import load as bench

    _refuse_unused(context, trace, rate, url, simulate)
    for name, value in (("--rate", rate), ("--seconds", seconds), ("--think", think), ("--price", price)):
        check_number(name, value or 0.0, 0.0)
    users = (seconds, documents, document_tokens, tokens, turns, think, seed)
    traces = _traces(trace, rate, users, (chats, tokens, prompts, prompt_tokens, later))
    if save_trace is not None:
        _save(save_trace, list(traces.values())[-1])
    keys = tuple(_pair(text) for text in api_keys or ())
    common.Setup(model, against="none", shape=random_shape)  # checks the shape's name
    limits = (weights, device, threads, kv_cache_tokens)
    setup = bench.LoadSetup(model, url, api_key, keys, *limits, speculation, price, random_shape)
    counts = _counts(simulate)
    result = bench.run(setup, traces) if not counts else bench.run_simulation(setup, traces, counts, cores)
    common.report(result, bench.table(result), as_json)


def _traces(
    name: str | None, rate: float | None, users: tuple[Any, ...], beside: tuple[int, ...]
) -> dict[str, list[TraceRequest]]:
    """What arrives: a named trace, users at random, or chats with and without long prompts beside them."""
    from forerun_research.bench import load, load_trace

    if name is not None and rate is not None:
        raise BadRequest("--trace and --rate both say what arrives", "leave one out")
    if name is not None:
        return {Path(name).stem: load_trace.named_trace(name)}
    if rate is not None:
        seconds, turns = users[0], users[4]
        if (expected := rate * seconds * turns) > MAX_REQUESTS:
            raise BadRequest(f"--rate {rate:g} is {expected:.0f} requests, at most {MAX_REQUESTS}", "lower --seconds")
        if not (arriving := load_trace.poisson(rate, *users)):
            raise BadRequest(f"no user arrives in {seconds:g} s at {rate:g} a second", "raise --rate or --seconds")
        return {"poisson": arriving}
    mixed = load_trace.chats_beside_prompts(*beside)
    return {"alone": load.without_long(mixed), "beside": mixed}


def _refuse_unused(
    context: typer.Context, trace: str | None, rate: float | None, url: str | None, simulate: str | None
) -> None:
    """Options that would do nothing beside others."""
    if simulate is not None and url is not None:
        raise BadRequest("--simulate computes with costs of this machine", "leave --url out")
    of_users = ("seconds", "documents", "document_tokens", "turns", "think", "seed")
    of_chats = ("chats", "prompts", "prompt_tokens", "later")
    sets = {
        "a trace that is given (--trace)": () if trace is None else (*of_users, *of_chats, "tokens"),
        "users at random (--rate)": () if rate is None or trace is not None else of_chats,
        "chats beside long prompts; give --rate": () if (trace, rate) != (None, None) else of_users,
        "a server (--url), which has its own": ()
        if url is None
        else ("weights", "device", "threads", "kv_cache_tokens", "random_shape"),
        "the library, which has no keys; give --url": () if url is not None else ("api_key", "api_keys"),
        "one process; give --simulate": () if simulate is not None else ("cores",),
        "a simulation (--simulate)": () if simulate is None else ("random_shape",),
    }
    spelled = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for where, names in sets.items():
        for name in names:
            if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
                raise BadRequest(f"{spelled[name]} has no meaning for {where}", f"leave {spelled[name]} out")


def _save(path: Path, trace: list[TraceRequest]) -> None:
    from forerun_research.bench.load_trace import write_trace

    try:
        write_trace(path, trace)
    except OSError as error:
        raise BadRequest(f"cannot write the trace to {path}: {error}", "name another file for --save-trace") from None


def _counts(text: str | None) -> list[int]:
    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= 1024 for part in parts):
        raise BadRequest(f"--simulate {text!r:.80} names no numbers of replicas", "write 1,2,8: each from 1 to 1024")
    return [int(part) for part in parts]


def _pair(text: str) -> tuple[str, str]:
    name, found, key = text.partition("=")
    if not found:
        raise BadRequest(f"--key {text!r:.80} is no NAME=KEY", "write --key ann=SECRET")
    return name, key
