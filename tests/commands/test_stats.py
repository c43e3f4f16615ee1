"""What `--stats` says about an answer."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from forerun.commands.stats import load_line, threads_line, usage_lines
from forerun.core import PrefillReport, Tally, Usage
from forerun.core.usage import ConditionalReport, LoadReport


def spoken() -> Usage:
    return Usage(
        prompt_tokens=1200,
        cached_tokens=1000,
        completion_tokens=21,
        ttft_s=1.0,
        total_s=3.0,
        steps=7,
        drafted=30,
        accepted=14,
        drafters={"lookup": Tally(10, 4), "model": Tally(20, 10)},
        verifier="match",
        draft_s=0.25,
        verify_s=1.5,
    )


def test_the_second_line_is_about_guesses() -> None:
    first, second = usage_lines(spoken(), "stop").split("\n")
    assert first == (
        "prompt 1,200 tokens (1,000 from the pool, 200 computed, 0 written) · first token 1.00 s"
        " · 21 tokens at 10.0/s · total 3.00 s · stop"
    )
    assert second == (
        "drafted 30, accepted 14 · 3.00 tokens a pass · model 71%, lookup 29%"
        " · draft 250 ms, verify 1,500 ms, other 250 ms · match"
    )


def test_without_guesses_it_says_so() -> None:
    first, second = usage_lines(Usage(completion_tokens=1), None).split("\n")
    assert first.endswith("unfinished") and "nothing was drafted" in second


def test_nothing_accepted_names_no_shares() -> None:
    usage = Usage(drafted=4, drafters={"lookup": Tally(4, 0)}, verifier="match", steps=2, completion_tokens=2)
    assert "accepted 0" in usage_lines(usage, "length") and "lookup" not in usage_lines(usage, "length")


def test_lossy_rules_are_called_lossy() -> None:
    usage = spoken()
    usage.verifier, usage.lossless = "typical", False
    assert "typical (lossy" in usage_lines(usage, "stop")


def test_answers_given_a_grammar_say_whether_they_are_exact() -> None:
    reports = {
        "all 3 answers scored · 9 tokens run ahead in 0.50 s": ConditionalReport(True, 0.0, 9, answers=3, seconds=0.5),
        "drawn in 4 tries": ConditionalReport(True, 0.0, 9, tries=4),
        "not exact after 7 tries, off by 0.25 at most": ConditionalReport(False, 0.25, 9, tries=7),
    }
    for text, report in reports.items():
        assert text in usage_lines(Usage(completion_tokens=1, conditional=report), "stop").split("\n")[1]


def test_the_record_has_derived_figures_and_is_json() -> None:
    record = json.loads(json.dumps(spoken().record()))
    assert record["drafters"]["model"] == {"drafted": 20, "accepted": 10}
    assert (record["accepted_length"], record["other_s"], record["tokens_per_second"]) == (3.0, 0.25, 10.0)


def drafted() -> PrefillReport:
    return PrefillReport(
        tokens=1200,
        source="draft",
        exact=80,
        drafted=1120,
        accepted=1000,
        recomputed=120,
        cost=0.41,
        scores={"key": [0.1, 0.3], "attention": [0.99, 0.97], "kl": []},
        read_s=0.5,
        recompute_s=0.25,
        check_s=0.01,
    )


def test_a_drafted_prompt_has_a_line_of_its_own() -> None:
    usage = spoken()
    usage.prefill = drafted()
    _, second, third = usage_lines(usage, "stop").split("\n")
    assert second == (
        "prompt drafted by draft · drafted 1,120, accepted 1,000, recomputed 120, exact 80 tokens"
        " · cost 0.41 of exact prefill · checks: key 0.200, attention 0.980"
        " · read 500 ms, recompute 250 ms, check 10 ms"
    )
    assert third.startswith("drafted 30")
    usage.prefill.fell_back = "the prompt is short"
    assert "computed exactly after all: the prompt is short" in usage_lines(usage, "stop")


def test_provisional_tokens_are_counted() -> None:
    usage = spoken()
    usage.provisional, usage.confirmed, usage.provisional_s = 20, 15, 0.25
    assert "first provisional token 0.25 s · 15 of 20 provisional tokens confirmed" in usage_lines(usage, "stop")
    record = usage.record()
    assert record["confirmed_share"] == 0.75 and spoken().record()["confirmed_share"] == 0.0


def test_the_record_has_the_prefill_report() -> None:
    usage = spoken()
    assert usage.record()["prefill"] is None
    usage.prefill = drafted()
    record = json.loads(json.dumps(usage.record()))
    assert record["prefill"]["recomputed"] == 120 and record["prefill"]["scores"]["key"] == [0.1, 0.3]


def test_tokens_from_slower_tiers_are_named() -> None:
    usage = spoken()
    usage.served = {"pool": 150, "host": 50, "disk": 700, "approximate": 100, "computed": 200}
    usage.written = 16
    said = "150 from the pool, 50 from host memory, 700 from disk, 100 approximate, 200 computed, 16 written"
    assert f"prompt 1,200 tokens ({said}) · first" in usage_lines(usage, "stop")
    assert usage.record()["served"]["disk"] == 700


def test_the_line_about_loading() -> None:
    stages = {"tokenizer": 0.1, "weights": 0.25, "costs": 0.05}
    report = LoadReport(101.25, 0.5, stages, packed_bytes=135_000_000, packed_read=True, costs_read=True)
    assert load_line(report, process_started=100.0) == (
        "loaded in 1.75 s: imports 1.25 s · tokenizer 0.10 s · weights 0.25 s (135 MB from the cache)"
        " · costs 0.05 s (from the cache) · other 0.10 s"
    )
    report.packed_read = report.costs_read = False
    assert "135 MB written to the cache" in load_line(report) and "(timed)" in load_line(report)
    assert "weights 0.00 s ·" in load_line(LoadReport())


def test_threads_and_what_other_programs_cost() -> None:
    stats = {"threads": 2, "chosen": "one for each core", "jobs": 1200, "retaken": 0, "waited_s": 0.01}
    assert threads_line(stats) == "2 threads (one for each core)"
    assert "7 pieces of 1,200 jobs computed again" in threads_line({**stats, "retaken": 7})


def test_a_process_is_no_older_than_its_parent_waited_for_it() -> None:
    start = time.perf_counter()
    command = "from forerun.commands.stats import process_age_s; print(process_age_s())"
    age_s = float(subprocess.run([sys.executable, "-c", command], capture_output=True, check=True).stdout)
    assert 0.0 < age_s < time.perf_counter() - start + 0.02  # the kernel counts hundredths
