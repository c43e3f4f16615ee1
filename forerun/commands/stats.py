"""What an answer cost, in words (`--stats`) and as JSON (`--json`). Knows only reports."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.core import PrefillReport, Usage
    from forerun.core.usage import ConditionalReport, LoadReport


def usage_lines(usage: Usage, finish_reason: str | None) -> str:
    """A line about the answer, one or two where its prompt was drafted, one about speculative decoding."""
    parts = [
        f"prompt {usage.prompt_tokens:,} tokens ({_served(usage)})",
        f"first token {usage.ttft_s:.2f} s",
        f"{usage.completion_tokens:,} tokens at {usage.tokens_per_second:.1f}/s"
        + (f", {usage.copied:,} copied" if usage.copied else ""),
        f"total {usage.total_s:.2f} s",
        finish_reason or "unfinished",
    ]
    lines = [" · ".join(parts)]
    if usage.prefill is not None:
        lines.append(prefill_line(usage.prefill))
    if usage.provisional:
        lines.append(
            f"first provisional token {usage.provisional_s:.2f} s · "
            f"{usage.confirmed:,} of {usage.provisional:,} provisional tokens confirmed"
        )
    if usage.conditional is not None:
        lines.append(conditional_line(usage.conditional))
    return "\n".join([*lines, speculation_line(usage)])


def process_age_s() -> float:
    """Since this process started. Where the kernel tells it by its own clock, not by the time of day at boot: that is
    in whole seconds, and off by more on machines whose clock was set since."""
    if sys.platform == "linux":
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    import psutil

    return time.time() - psutil.Process().create_time()


def load_line(report: LoadReport, process_started: float | None = None) -> str:
    """What opening the model took, by stage, and what of it came from the cache folder. Before it a process imports."""
    started = time.time() - process_age_s() if process_started is None else process_started
    imports_s = max(0.0, report.started - started)
    weights = report.stages.get("weights", 0.0)
    packed = f"{report.packed_bytes / 1e6:,.0f} MB {'from' if report.packed_read else 'written to'} the cache"
    costs = "from the cache" if report.costs_read else "timed"
    parts = [
        f"imports {imports_s:.2f} s",
        f"tokenizer {report.stages.get('tokenizer', 0.0):.2f} s",
        *([f"bits {report.stages.get('bits', 0.0):.2f} s ({report.bits})"] if report.bits else []),
        f"weights {weights:.2f} s" + (f" ({packed})" if report.packed_bytes else ""),
        f"costs {report.stages.get('costs', 0.0):.2f} s ({costs})",
        f"other {max(0.0, report.total_s - sum(report.stages.values())):.2f} s",
    ]
    return f"loaded in {imports_s + report.total_s:.2f} s: " + " · ".join(parts)


def threads_line(stats: Mapping[str, Any]) -> str:
    """CPU threads and what other programs cost them."""
    line = f"{stats['threads']} thread{'' if stats['threads'] == 1 else 's'} ({stats['chosen']})"
    if stats["retaken"]:
        line += (
            f" · {stats['retaken']:,} pieces of {stats['jobs']:,} jobs computed again, their thread had lost its core"
            f" · waited {stats['waited_s']:.2f} s"
        )
    return line


_SERVED = {
    "pool": "{:,} from the pool",
    "host": "{:,} from host memory",
    "disk": "{:,} from disk",
    "store": "{:,} from the store",
    "approximate": "{:,} approximate",
    "computed": "{:,} computed",
}


def _served(usage: Usage) -> str:
    """Where the prompt's K/V came from, and how many tokens were added to the cache."""
    served = usage.served or {"pool": usage.cached_tokens, "computed": usage.computed_tokens}
    parts = [text.format(served[name]) for name, text in _SERVED.items() if served.get(name)]
    return ", ".join([*parts, f"{usage.written:,} written"])


def prefill_line(report: PrefillReport) -> str:
    """How the prompt's K/V came about, where it was not simply computed."""
    if report.fell_back:
        return f"prompt computed exactly after all: {report.fell_back}"
    seconds = (report.read_s, report.recompute_s, report.check_s)
    scores = [f"{name} {sum(values) / len(values):.3f}" for name, values in report.scores.items() if values]
    parts = [
        f"prompt drafted by {report.source}",
        f"drafted {report.drafted:,}, accepted {report.accepted:,}, recomputed {report.recomputed:,}, "
        f"exact {report.exact:,} tokens",
        f"cost {report.cost:.2f} of exact prefill",
        "checks: " + ", ".join(scores) if scores else "",
        "read {}, recompute {}, check {}".format(*map(_ms, seconds)),
    ]
    return " · ".join(part for part in parts if part)


def conditional_line(report: ConditionalReport) -> str:
    """How an answer was drawn from the model given its grammar."""
    if report.exact:
        how = f"all {report.answers:,} answers scored" if report.answers else f"drawn in {report.tries:,} tries"
    else:
        how = f"not exact after {report.tries:,} tries, off by {report.error:.2g} at most (total variation)"
    return f"given the grammar: {how} · {report.scored_tokens:,} tokens run ahead in {report.seconds:.2f} s"


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
    """Each drafter's share of the accepted tokens, largest first."""
    ranked = sorted(usage.drafters.items(), key=lambda item: -item[1].accepted)
    total = sum(tally.accepted for _, tally in ranked)
    return ", ".join(f"{name} {tally.accepted / total:.0%}" for name, tally in ranked) if total else ""


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"
