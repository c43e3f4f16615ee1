"""Forward: what one pass over 1, 2, 4, 8, 16 tokens of a sequence costs. Speculation lives on this curve being flat."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from forerun_research.bench import common
from forerun_research.bench.sides import SideProcess, alternate


def run(setup: common.Setup, context: int, sizes: list[int]) -> dict[str, Any]:
    common.Prompts(setup).check(context + max(sizes))
    with SideProcess(setup.spec("forerun", context + max(sizes))) as side:
        found = {str(size): _time(side, setup.runs, size, context) for size in sizes}
        result: dict[str, Any] = {
            "bench": "forward",
            "model": setup.name,
            "context": context,
            "runs": setup.runs,
            **common.side_results([side], {"forerun": {"ms": found}}),
        }
    one = found[str(sizes[0])]["median"]
    result["ratio"] = {size: round(ms["median"] / one, 3) for size, ms in found.items()}
    result["hardware"] = common.hardware(setup.thread_count())
    return result


def _time(side: SideProcess, runs: int, size: int, context: int) -> dict[str, float]:
    samples = alternate([side], runs, "forward", size, context)[side.name]
    return common.spread([sample["ms"] for sample in samples])


def table(result: dict[str, Any]) -> Table:
    title = f"forward {result['model']}, {result['context']} tokens of context, weights {result['forerun']['weights']}"
    smallest = next(iter(result["ratio"]))
    found = Table("tokens", "ms", f"against {smallest}", title=title, title_justify="left")
    for size, ms in result["forerun"]["ms"].items():
        found.add_row(size, common.cell(ms), f"{result['ratio'][size]:.2f}x")
    return found
