"""The table of `forerun bench sharing`: a few rows for each part, and whether its goal is reached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from forerun_research.bench import common
from forerun_research.bench.sharing_branches import LOOSE, SHARED, UNSHARED

Row = tuple[str, str, str]


def table(result: dict[str, Any]) -> Table:
    title = f"sharing {result['model']}" + (", quick: goals are set for full sizes" if result["quick"] else "")
    made = Table("part", "", "figures", "goal", title=title, title_justify="left")
    rows = {
        "branches": _branches,
        "restart": _restart,
        "rollouts": _rollouts,
        "trace": _trace,
        "plan": _plan,
        "tree": _tree,
        "operations": _operations,
    }
    for part, describe in rows.items():
        if part not in result:
            continue
        for number, (what, figures, goal) in enumerate(describe(result[part])):
            made.add_row("" if number else part, what, figures, goal)
        if "goal" in result[part] and not result["quick"]:
            for name, mark in result[part]["goal"].items():
                if name.startswith("reached"):
                    way = name.removeprefix("reached_").replace("_", " ") if name != "reached" else ""
                    made.add_row("", way, "", "reached" if mark else "[bold]missed[/bold]")
        made.add_section()
    return made


def _branches(own: dict[str, Any]) -> Iterator[Row]:
    """Ratios are to shared branches: both kinds of those where a row has no kind of its own."""
    what = f"{own['branches']} branches of {own['tokens']} from {own['prompt_tokens']:,} tokens, seconds"
    names = {
        SHARED: what,
        UNSHARED: "without shared-prefix attention",
        SHARED + LOOSE: "branches, batch_invariant=False",
        UNSHARED + LOOSE: "the same without shared-prefix attention",
        "independent": "requests at once, no prefix cache",
        "one_by_one": "the same, one after the other",
    }
    goals = dict.fromkeys((UNSHARED, UNSHARED + LOOSE), own["goal"]["attention"]) | {
        "independent": own["goal"]["unshared"]
    }
    for name, label in names.items():
        if name not in own["seconds"]:
            continue
        ratios = [f"{own['ratios'][name]:.2f}x"] if name in own["ratios"] else []
        if name + LOOSE in own["ratios"] and name + LOOSE not in own["seconds"]:
            ratios.append(f"{own['ratios'][name + LOOSE]:.2f}x with batch_invariant=False")
        goal = f"{goals[name]:.1f}x" if name in goals else ""
        yield label, ", ".join([common.cell(own["seconds"][name]), *ratios]), goal
    yield "prompt tokens computed for all branches", f"{own['computed_prompt_tokens']:,}", "the prompt once"


def _restart(own: dict[str, Any]) -> Iterator[Row]:
    seconds = own["seconds"]
    yield f"{own['prompt_tokens']:,} tokens, computed", f"{seconds['computed']:.3f} s to the first token", ""
    kept = f"{own['disk_tokens']:,} tokens from {own['disk_bytes'] / 1e6:,.0f} MB on disk"
    yield (
        "after a restart",
        f"{seconds['from_disk']:.3f} s, {own['ratio']:.1f}x ({kept})",
        f"{own['goal']['ratio']:.0f}x",
    )


def _rollouts(own: dict[str, Any]) -> Iterator[Row]:
    for name in ("tree", "independent"):
        part = own[name]
        counts = f"{part['distinct']} distinct of {part['trajectories']} in {part['tokens']:,} tokens"
        yield name, f"{part['per_thousand']:.2f} per 1,000 tokens ({counts}; distance {part['distance']:.2f})", ""
    gain = "no answer was complete" if own["gain"] is None else f"{own['gain']:.2f}x"
    yield "gain", gain, f"{own['goal']['gain']:.1f}x"


def _trace(own: dict[str, Any]) -> Iterator[Row]:
    for name, label in (("speculation_off", "no guesses"), ("speculation_auto", "guessing ahead")):
        part = own[name]
        read = f"{part['cached_share']:.1%} of {part['prompt_tokens']:,} prompt tokens read from cache"
        yield (
            f"{part['turns']} turns, {label}",
            f"{read}, {part['seconds']:.1f} s",
            f"{own['goal']['cached_share']:.0%}",
        )


def _plan(own: dict[str, Any]) -> Iterator[Row]:
    for kind, label in (("same_calls", "the same calls"), ("own_calls", "calls of the model's choice")):
        for name in ("plan", "interleaved"):
            part = own[kind][name]
            tokens = f"{part['tokens']:,} tokens, {part['computed_tokens']:,} computed"
            calls = f"{part['requests']} requests, {part['calls']} calls, {part['right']} of {own['tasks']} right"
            yield f"{name}, {label}", f"{part['total_s']:.2f} s, {tokens}; {calls}", ""


def _tree(own: dict[str, Any]) -> Iterator[Row]:
    yield f"{own['nodes']:,} nodes, {own['tokens']:,} tokens", f"{own['bytes_per_node']:,} bytes a node", ""
    for name, label in (("match_s", "match"), ("match_and_insert_s", "match and insert")):
        part = {key: 1000 * value for key, value in own[name].items()}
        figures = f"{part['median']:.3f} ms, p99 {part['p99']:.3f}, at most {part['max']:.3f}"
        yield label, figures, f"{1000 * own['goal']['seconds']:.0f} ms"


def _operations(own: dict[str, Any]) -> Iterator[Row]:
    found = own["difference"] or "no difference"
    yield f"{own['steps']:,} random operations", f"{found}, {own['leaked_pages']} pages leaked", "none"
