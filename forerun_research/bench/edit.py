"""Edit: seconds, exact matches and tests passed, by way of editing and drafter, on three kinds of tasks.

Every result is a line of a file, so that a run can be stopped and continued. Also what copying a span costs beside
decoding it, and whether oracle programs of all tasks give the new texts.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from forerun import LLM, SamplingParams
from forerun.params import Grammar
from forerun.recipes.edit import PROBES, SHORT_WAYS, BrokenEdit, EditRun, stream_edit
from forerun.text.edit_program import SourceLines, apply_program, oracle, program_text
from forerun.text.edit_replace import BlockReader, ReplaceReader, replace_grammar, replacements
from forerun_research.bench.edit_tasks import EditTask
from forerun_research.studies.intervals import bootstrap, wilson
from forerun_research.studies.sandbox import run_program

COPIED_TOKENS = (8, 16, 32, 64, 128, 256, 512)
FREE, MODEL = "copy+lookup+suffix", "model"  # drafters without and with a model
_EDITS = [(way, drafter) for way in ("rewrite", "replace", "copy") for drafter in ("off", FREE, MODEL)]
DEFAULT_SETTINGS = {"generation": [("write", by) for by in ("off", FREE, MODEL)], "edit": _EDITS, "release": _EDITS}


def settings_of(
    ways: Collection[str], with_model: bool, drafters: Collection[str] = ()
) -> dict[str, list[tuple[str, str]]]:
    """The default settings by category: of these ways and drafters, or of all; those with a draft model only where
    there is one."""
    return {
        category: [
            (way, by)
            for way, by in pairs
            if (not ways or way in ways) and (not drafters or by in drafters) and (by != MODEL or with_model)
        ]
        for category, pairs in DEFAULT_SETTINGS.items()
    }


def round_trips(llm: LLM, tasks: Iterable[EditTask]) -> dict[str, int]:
    """How many oracle programs and replacements give the new text, through the text alone and through the grammar; and
    the tokens of each way."""
    counts: dict[str, int] = defaultdict(int)
    encode = llm.tokenizer.encode
    for task in tasks:
        if task.category == "generation":
            continue
        source, lines = SourceLines(task.old), SourceLines(task.new).lines
        program, blocks = program_text(oracle(source, lines)), replacements(source, lines)
        reader = ReplaceReader(source)
        counts["tasks"] += 1
        counts["programs"] += apply_program(source, program) == task.new
        counts["through_grammar"] += follows_grammar(llm, task.old, encode(program))
        counts["replacements"] += source.join([*reader.push(blocks), *reader.flush()]) == task.new
        rules: Any = llm.engine.intake.constraint(Grammar.lark(replace_grammar(source)))
        counts["replacements_through_grammar"] += rules.accepts((), encode(blocks)) == len(encode(blocks))
        for name, text in (("program", program), ("replacement", blocks), ("rewrite", task.new)):
            counts[f"{name}_tokens"] += len(encode(text))
    return dict(counts)


def follows_grammar(llm: LLM, old: str, program: list[int]) -> bool:
    """Whether the grammar of a text accepts a program token by token, up to an end."""
    answer: Any = llm.engine.intake.constraint(Grammar.edit(old))
    while program:
        count = answer.until_part_end(program)
        if answer.accepts((), program[:count]) < count:
            return False
        answer.advance(program[:count])
        program = program[count:]
    return bool(answer.allowed(())[sorted(answer.vocabulary.end_ids)].any())


def copy_times(llm: LLM, context: int) -> list[dict[str, float]]:
    """Seconds of one forward over a copied span, and of decoding as many tokens, after `context` others."""
    found = []
    with llm.driver.exclusive() as engine:
        for tokens in COPIED_TOKENS:
            copied, one = engine.time_forward(tokens, context), engine.time_forward(1, context + tokens // 2)
            found.append({"tokens": tokens, "copy_s": copied, "decode_s": tokens * one, "times": tokens * one / copied})
    return found


def run_task(llm: LLM, task: EditTask, way: str, drafter: str) -> dict[str, Any]:
    """One task in one setting."""
    params, start = SamplingParams(speculation=drafter, max_tokens=1024), time.perf_counter()
    broken, text, usage = "", "", None
    if way == "write":
        done = llm.chat([{"role": "user", "content": f"```\n{task.old}```\n\n{task.instruction}"}], params)[0]
        reader = BlockReader(SourceLines(""))
        text, usage = "\n".join([*reader.push(done.text), *reader.flush()]) + "\n", done.usage
    else:
        try:
            for piece in stream_edit(llm, "file.py", task.instruction, text=task.old, mode=way, params=params):  # type: ignore[arg-type]
                if piece.result is not None:
                    text, usage = piece.result.text, piece.result.usage
        except BrokenEdit as error:
            broken = str(error)
    record: dict[str, Any] = {"seconds": time.perf_counter() - start, "broken": broken, "exact": text == task.new}
    record["text"] = text
    record["ttft_s"] = None if usage is None else usage.ttft_s
    if usage is not None:
        record |= {"prompt": usage.prompt_tokens, "tokens": usage.completion_tokens, "steps": usage.steps}
        record |= {"copied": usage.copied, "plain_s": usage.plain_s}
    return record


def run(
    llm: LLM,
    tasks: list[EditTask],
    settings: dict[str, list[tuple[str, str]]],
    out: Path | None,
    seconds: float,
    by_setting: bool = False,
) -> list[dict[str, Any]]:
    """All tasks in all settings that `out` has no line of, task by task or setting by setting, until the time is over.
    The examples of a prompt are cached, as they are after the first edit. The file is computed in the first setting of
    a way; the others find it cached, and their seconds have the first one's time to the first token in place of their
    own."""
    ways = {way for task in tasks for way, _ in settings.get(task.category, [])}
    for way in ways & set(SHORT_WAYS):
        warm = EditRun(llm, "warm", *PROBES[0][:2], way, "")  # type: ignore[arg-type]
        llm.chat(warm.messages(), max_tokens=1)
    lines = out.read_text(encoding="utf-8").splitlines() if out is not None and out.exists() else []
    found = [json.loads(line) for line in lines]
    known, start = {(r["category"], r["task"], r["way"], r["drafter"]) for r in found}, time.perf_counter()
    pairs = [(task, *setting) for task in tasks for setting in settings.get(task.category, [])]
    if by_setting:  # those that write a whole file token by token last
        pairs.sort(key=lambda p: (p[1] == "rewrite" and p[2] != FREE, settings[p[0].category].index(p[1:])))
    for task, way, drafter in pairs:
        if (task.category, task.name, way, drafter) in known or time.perf_counter() - start > seconds:
            continue
        named = {"category": task.category, "task": task.name, "way": way, "drafter": drafter}
        record = named | run_task(llm, task, way, drafter)
        first = next((r for r in found if all(r[k] == named[k] for k in ("category", "task", "way"))), record)
        if record["ttft_s"] is not None and first["ttft_s"] is not None:
            record["seconds"] += first["ttft_s"] - record["ttft_s"]
            record["ttft_s"] = first["ttft_s"]
        found.append(record)
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found[-1]) + "\n")
    return found


def judge(records: list[dict[str, Any]], tasks: list[EditTask]) -> None:
    """Run the tests of all results, after everything was timed."""
    tests = {(task.category, task.name): task.tests for task in tasks}
    for record in records:
        program = tests.get((record["category"], record["task"]), "")
        record["passed"] = bool(record["text"]) and run_program(record["text"] + program).passed if program else None


def fallbacks(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `llm.edit` gives where it takes `replace`: a rewrite follows where that broke, and both take their time."""
    rewrites = {(r["category"], r["task"], r["drafter"]): r for r in records if r["way"] == "rewrite"}
    found = []
    for tried in (r for r in records if r["way"] == "replace"):
        rewrite = rewrites.get((tried["category"], tried["task"], tried["drafter"]))
        if rewrite is not None:
            used = tried if not tried["broken"] else rewrite | {"seconds": tried["seconds"] + rewrite["seconds"]}
            found.append(used | {"way": "replace, else rewrite"})
    return found


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each category, way and drafter, over the tasks that were done in all settings of the category."""
    by_setting: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    for record in [*records, *fallbacks(records)]:
        by_setting[record["category"], record["way"], record["drafter"]][record["task"]] = record
    rows = []
    for (category, way, drafter), done in by_setting.items():
        others = [set(tasks) for (name, _, _), tasks in by_setting.items() if name == category]
        common = sorted(set.intersection(*others))
        if not common:
            continue
        mine = [done[task] for task in common]
        seconds = [r["seconds"] for r in mine]
        first = next(tasks for (name, _, _), tasks in by_setting.items() if name == category)
        base = [first[task]["seconds"] for task in common]
        row: dict[str, Any] = {"category": category, "way": way, "drafter": drafter, "tasks": len(common)}
        row |= {"seconds": sum(seconds) / len(seconds), "seconds_interval": bootstrap([seconds])}
        row["speedup"] = sum(base) / sum(seconds)
        row["speedup_interval"] = bootstrap([base, seconds], lambda a, b: float(a.sum() / b.sum()))
        row["exact"], row["exact_interval"] = _share([r["exact"] for r in mine])
        judged = [r["passed"] for r in mine if r["passed"] is not None]
        if judged:
            row["passed"], row["passed_interval"] = _share(judged)
        row["broken"] = sum(bool(r["broken"]) for r in mine)
        row["tokens"] = sum(r.get("tokens", 0) for r in mine) / len(mine)
        rows.append(row)
    return rows


def _share(hits: list[bool]) -> tuple[int, tuple[float, float]]:
    return sum(hits), wilson(sum(hits), len(hits))


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(
        "category", "way", "drafter", "tasks", "seconds", "times the first", "exact", "tests passed", "broken"
    )
    for row in rows:
        low, high = row["seconds_interval"]
        a, b = row["speedup_interval"]
        cells = [row["category"], row["way"], row["drafter"], str(row["tasks"])]
        cells += [f"{row['seconds']:.2f} ({low:.2f}-{high:.2f})", f"{row['speedup']:.2f} ({a:.2f}-{b:.2f})"]
        for name in ("exact", "passed"):
            low, high = row.get(f"{name}_interval", (0.0, 0.0))
            cells.append(f"{row[name]} ({low:.0%}-{high:.0%})" if name in row else "-")
        shown.add_row(*cells, str(row["broken"]))
    return shown
