"""What an answer cost, in words (`--stats`) and as JSON (`--json`). Knows only `Usage`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.core import Usage


def usage_lines(usage: Usage, finish_reason: str | None) -> str:
    """One line about the answer, one about the guesses that made it."""
    parts = [
        f"prompt {usage.prompt_tokens:,} tokens ({usage.cached_tokens:,} reused)",
        f"first token {usage.ttft_s:.2f} s",
        f"{usage.completion_tokens:,} tokens at {usage.tokens_per_second:.1f}/s",
        f"total {usage.total_s:.2f} s",
        finish_reason or "unfinished",
    ]
    return " · ".join(parts) + "\n" + speculation_line(usage)


def speculation_line(usage: Usage) -> str:
    if not usage.drafted:
        return "nothing was drafted: plain decoding"
    parts = [
        f"drafted {usage.drafted:,}, accepted {usage.accepted:,}",
        f"{usage.accepted_length:.2f} tokens a pass",
        _shares(usage),
        f"draft {_ms(usage.draft_s)}, verify {_ms(usage.verify_s)}, other {_ms(usage.other_s)}",
        usage.verifier if usage.lossless else f"{usage.verifier} (lossy: not the model's own distribution)",
    ]
    return " · ".join(part for part in parts if part)


def _shares(usage: Usage) -> str:
    """Who made the guesses that were accepted, most first."""
    ranked = sorted(usage.drafters.items(), key=lambda item: -item[1].accepted)
    total = sum(tally.accepted for _, tally in ranked)
    return ", ".join(f"{name} {tally.accepted / total:.0%}" for name, tally in ranked) if total else ""


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"


def usage_record(usage: Usage) -> dict[str, Any]:
    """Every figure, the derived ones too."""
    derived = {
        "tokens_per_second": usage.tokens_per_second,
        "accepted_length": usage.accepted_length,
        "other_s": usage.other_s,
    }
    return asdict(usage) | derived
