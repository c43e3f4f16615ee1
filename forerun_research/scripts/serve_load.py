"""The load run: many streaming clients on a real `forerun serve`, and what the server costs beside the library.

    python -m forerun_research.scripts.serve_load [--clients 64] [--seconds 300] [--model NAME] [--threads 2]
    [--out FILE]

Three parts. `first`: at one client, the same short questions to the server and to the library in turn; how much later
the first token comes. `throughput`: the same requests, all at once to the server and as one batch to the library, in
turn; tokens a second. `load`: clients that ask again as soon as they have an answer, some of which go away half-way;
every answer is compared with the library's, statuses are counted, the server's resident memory is sampled. Exit status
1 when a bound is broken. Sampled answers are the library's, too, where logits do not depend on the batch (int8 on a
CPU); elsewhere rounding may decide a draw, so they are told but not judged.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from forerun_research.scripts.serve_clients import ClientAnswer, ask_once, keep_asking, outcomes, together
from forerun_research.scripts.serve_requests import mixed, short
from forerun_research.scripts.serve_sides import NAME, LibrarySide, Memory, ServerSide

REQUESTS_PER_CLIENT = 3  # requests of the load for each client; clients go round them all
WARM_UP_SHARE = 1 / 3  # of the load's time, until the pool has been written to everywhere
BOUNDS = {"added_ttft_ms": 15.0, "overhead": 0.05, "growth_mb": 16.0}
EXPECTED_OUTCOMES = ("complete", "left by the client", "429 announced")  # outcomes that are as they should be


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that both sides are ended, too
    console = Console(stderr=True, highlight=False)
    settings = {name: getattr(args, name) for name in ("model", "threads", "kv_cache_tokens", "max_model_len")}
    with tempfile.TemporaryDirectory() as scratch:
        server, library = ServerSide(settings, Path(scratch) / "server.log"), LibrarySide(settings)
        try:
            result = run(server, library, args, console)
        finally:
            library.close()
            left = server.close()
    result |= {"settings": settings | {"clients": args.clients, "seconds": args.seconds}, "server_exit": left}
    result["broken"] = broken(result)
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result) if args.json else "", end="")
    console.print(table(result))
    return int(bool(result["broken"]))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Many streaming clients on a real server, beside the library.")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, folder or .gguf file")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0, help="of the load")
    parser.add_argument("--rounds", type=int, default=5, help="of the throughput, server and library in turn")
    parser.add_argument("--firsts", type=int, default=31, help="questions for the time to the first token")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-cache-tokens", type=int, default=32_768)
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None, help="write the result here as JSON")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


def run(server: ServerSide, library: LibrarySide, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    console.print("first tokens at one client ...")
    firsts = first_tokens(server, library, args.firsts)
    console.print(f"throughput, {args.clients} requests at once ...")
    throughput = compare_throughput(server, library, args)
    console.print(f"load, {args.clients} clients for {args.seconds:g} s ...")
    return {"first": firsts, "throughput": throughput, "load": load(server, library, args)}


def first_tokens(server: ServerSide, library: LibrarySide, count: int) -> dict[str, float]:
    served, direct = [], []
    for number, ask in enumerate(short(count + 2, seed=1)):
        there = asyncio.run(ask_once(server.host, server.port, NAME, ask)).first_s
        here = library.first(ask)
        if number >= 2:  # the first ones warm both sides up
            served.append(there)
            direct.append(here)
    added = [1000 * (a - b) for a, b in zip(served, direct, strict=True)]
    medians = (1000 * statistics.median(values) for values in (served, direct))
    return dict(zip(("server_ms", "library_ms"), medians, strict=True)) | {
        "added_ms": statistics.median(added),
        "added_of_medians_ms": 1000 * (statistics.median(served) - statistics.median(direct)),
        "questions": count,
    }


def compare_throughput(server: ServerSide, library: LibrarySide, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of new requests, so that neither side finds more in its cache than the other."""
    rates: dict[str, list[float]] = {"server": [], "library": []}
    different = {"greedy_different": 0, "sampled_different": 0}
    for number in range(args.rounds + 1):
        asks = mixed(args.clients, seed=1000 + number)
        sides = ["server", "library"] if number % 2 else ["library", "server"]
        texts: dict[str, list[str]] = {}
        for side in sides:
            if side == "library":
                seconds, tokens, texts[side] = library.batch(asks)
            else:
                seconds, answers = asyncio.run(together(server.host, server.port, NAME, asks))
                tokens, texts[side] = sum(a.tokens for a in answers), [a.text for a in answers]
            if number:  # the first round warms up
                rates[side].append(tokens / seconds)
        for ask, there, here in zip(asks, texts["server"], texts["library"], strict=True):
            different["greedy_different" if ask.greedy else "sampled_different"] += there != here
    ratios = [a / b for a, b in zip(rates["server"], rates["library"], strict=True)]
    return {f"{side}_tokens_per_s": statistics.median(found) for side, found in rates.items()} | {
        "overhead": 1 - statistics.median(ratios),
        "overheads": [1 - ratio for ratio in ratios],
        **different,
        "requests": args.clients * (args.rounds + 1),
    }


def load(server: ServerSide, library: LibrarySide, args: argparse.Namespace) -> dict[str, Any]:
    asks = mixed(REQUESTS_PER_CLIENT * args.clients, seed=7, leaving=0.15)
    expected = dict(zip(asks, library.batch(asks)[2], strict=True))
    with Memory(server.process) as memory:
        coming = itertools.cycle(asks)
        answers = asyncio.run(keep_asking(server.host, server.port, NAME, coming, args.clients, args.seconds))
    slope, minutes = memory.slope(WARM_UP_SHARE), args.seconds * (1 - WARM_UP_SHARE) / 60
    complete = [answer for answer in answers if answer.complete]
    wrong = [answer for answer in complete if answer.ask.greedy and answer.text != expected[answer.ask]]
    beginnings = [a for a in answers if a.left and a.ask.greedy and not expected[a.ask].startswith(a.text)]
    return {
        "outcomes": dict(outcomes(answers)),
        "greedy_compared": sum(answer.ask.greedy for answer in complete),
        "greedy_different": len(wrong) + len(beginnings),
        "sampled_different": sum(not a.ask.greedy and a.text != expected[a.ask] for a in complete),
        "examples": [example(answer, expected[answer.ask]) for answer in (*wrong, *beginnings)[:3]],
        "tokens_per_s": sum(answer.tokens for answer in complete) / args.seconds,
        "ttft_s": quantiles([answer.first_s for answer in complete]),
        "resident_mb": {"first": memory.samples[0][1], "last": memory.samples[-1][1]} if memory.samples else {},
        "slope_mb_per_minute": slope,
        "growth_mb": slope * minutes,
        "pages_used": server.figure("forerun_pages_used"),
        "open_afterwards": server.figure("forerun_answers_open"),
    }


def example(answer: ClientAnswer, expected: str) -> dict[str, str]:
    return {"prompt": answer.ask.content[-120:], "server": answer.text, "library": expected}


def quantiles(values: list[float]) -> dict[str, float]:
    ranked = sorted(values)
    return {name: ranked[int(share * (len(ranked) - 1))] for name, share in (("p50", 0.5), ("p99", 0.99)) if ranked}


def broken(result: dict[str, Any]) -> list[str]:
    """Every bound that does not hold, in words."""
    first, throughput, load = (result[name] for name in ("first", "throughput", "load"))
    found = []
    if first["added_ms"] >= BOUNDS["added_ttft_ms"]:
        found.append(
            f"the first token comes {first['added_ms']:.1f} ms later, the bound is {BOUNDS['added_ttft_ms']:g}"
        )
    if throughput["overhead"] > BOUNDS["overhead"]:
        found.append(f"overhead {throughput['overhead']:.1%}, the bound is {BOUNDS['overhead']:.0%}")
    if load["growth_mb"] > BOUNDS["growth_mb"]:
        found.append(f"memory grew by {load['growth_mb']:.1f} MB, the bound is {BOUNDS['growth_mb']:g}")
    different = load["greedy_different"] + throughput["greedy_different"]
    if different:
        found.append(f"{different} answers differ from the library's")
    found += [f"{count} x {name}" for name, count in load["outcomes"].items() if name not in EXPECTED_OUTCOMES]
    if load["open_afterwards"]:
        found.append(f"{load['open_afterwards']:g} answers are still open")
    if not load["greedy_compared"]:
        found.append("no greedy answer was compared")
    return found


def table(result: dict[str, Any]) -> Table:
    first, throughput, load = (result[name] for name in ("first", "throughput", "load"))
    found = Table("", "server", "library", "difference", "bound", title="forerun serve under load")
    added, limit = f"{first['added_ms']:+.1f} ms", f"< {BOUNDS['added_ttft_ms']:g} ms"
    found.add_row("first token", f"{first['server_ms']:.1f} ms", f"{first['library_ms']:.1f} ms", added, limit)
    rates = [f"{throughput[f'{side}_tokens_per_s']:.0f} tokens/s" for side in ("server", "library")]
    found.add_row("throughput", *rates, f"{throughput['overhead']:+.1%}", f"<= {BOUNDS['overhead']:.0%}")
    compared = f"{load['greedy_different']} of {load['greedy_compared']} differ"
    found.add_row("greedy answers", compared, "", f"sampled: {load['sampled_different']}", "0")
    growth = f"{load['slope_mb_per_minute']:+.2f} MB/min"
    found.add_row("memory", f"{load['resident_mb'].get('last', 0):.0f} MB", "", growth, f"{BOUNDS['growth_mb']:g} MB")
    for name, count in sorted(load["outcomes"].items()):
        found.add_row(name, f"{count:,}", "", "", "" if name in EXPECTED_OUTCOMES else "0")
    found.caption = "; ".join(result["broken"]) or "every bound holds"
    return found


if __name__ == "__main__":
    sys.exit(main())
