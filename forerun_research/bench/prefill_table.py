"""The table of `forerun bench prefill --speculative`: a row for each way to the first token."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from forerun_research.bench import common


def table(result: dict[str, Any], against: str) -> Table:
    title = f"prefill {result['model']}, {result['runs']} runs"
    if result["random_weights"]:
        title += " (random weights: only the times mean anything)"
    made = Table("tokens", "first token", "seconds", "sooner", "", title=title, title_justify="left")
    for length, found in result["figures"].items():
        made.add_row(length, "exact", common.cell(found["exact"]["ttft_s"], digits=3), "", "")
        seconds = common.cell(found["speculative"]["ttft_s"], digits=3)
        made.add_row("", "speculative", seconds, f"{found['ratio']:.2f}x", _tokens(found["speculative"]))
        for cells in _provisional(found.get("provisional", {})):
            made.add_row("", *cells)
        if against != "none":
            made.add_row("", against, common.cell(found[against]["ttft_s"], digits=3), "", "")
        made.add_section()
    reasons = {why for found in result["figures"].values() for why in found["speculative"].get("fell_back", ())}
    if reasons:
        made.caption = "computed exactly after all: " + "; ".join(sorted(reasons))
    return made


def _tokens(own: dict[str, Any]) -> str:
    """What the work was, and where the time went."""
    if "cost" not in own:
        return ""
    drafted = f"{own['drafted']:.0f} drafted, {own['recomputed']:.0f} of them recomputed"
    parts = [f"{name} {own[f'{name}_s']:.3f} s" for name in ("read", "recompute", "check")]
    return f"cost {own['cost']['median']:.3f}; {drafted}\n{', '.join(parts)}"


def _provisional(own: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    if not own:
        return []
    rows = [("confirmed", common.cell(own["confirmed_s"], digits=3), "", "")]
    if "provisional_s" in own:
        stayed = f"{100 * own['share_confirmed']:.0f}% of what was shown stayed"
        rows.insert(0, ("provisional", common.cell(own["provisional_s"], digits=3), f"{own['ratio']:.2f}x", stayed))
    return rows
