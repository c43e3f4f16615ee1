"""Several studies of prefill with one opening of the models, in the order they are named, each within its seconds.

    python -m forerun_research.scripts.prefill_evidence prefill_first_token:30 prefill_trust:60 --seconds 300 \\
        --prefill-profile PROFILE --data DATA --out RESULTS [--cases CASES] [--part 1/4]

What `forerun lab run` does for one study, for machines that are lent for minutes: opening a pair takes a minute there,
and prompts can be made beforehand on another machine (`--prepare CASES`, then `--cases CASES`). Records are written as
they come, into a folder for each study; the same command goes on where it stopped, and `forerun lab run STUDY
--report-only --out RESULTS/STUDY` makes the tables. All studies must name the same models. Seconds that a study leaves
over are the next one's. Prompts come in an order drawn from a seed, measures in turns, so that a study that is cut off
has measured a fair sample of each. `--part 1/4`: every fourth of these prompts, for four processes side by side.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from forerun.errors import BadRequest
from forerun_research.studies.execute import measure_cases, measures
from forerun_research.studies.prefill_measure import Measure, StudyCase
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.results import Results
from forerun_research.studies.study import Study, find, load, narrowed

Cases = dict[str, list[StudyCase]]  # by study and measure
Part = tuple[int, int]  # number from 1 on, count
WHOLE: Part = (1, 1)
AT_ONCE = 4  # prompts of a measure before the next one's turn


def read_cases(path: Path | None) -> Cases:
    if path is None:
        return {}
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found: dict[str, list[dict[str, Any]]] = json.load(file)
    return {name: [StudyCase(**case) for case in cases] for name, cases in found.items()}


def write_cases(path: Path, studies: dict[str, Study], subject: StudySubject) -> None:
    found = {
        f"{Path(name).stem} {measure.name}": [vars(case) for case in measure.cases(subject)]
        for name, study in studies.items()
        for measure in measures(study)
    }
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(found, file)
    print({name: len(cases) for name, cases in found.items()})


def opened(studies: dict[str, Study]) -> StudySubject:
    """The models of all of them."""
    first, *others = studies.values()
    for study in others:
        if (study.model, study.variants) != (first.model, first.variants):
            problem = f"{study.title!r} and {first.title!r} have different models, drafts or profiles"
            raise BadRequest(problem, "run them one by one: forerun lab run")
    return StudySubject(first, first.variants[0])


def run(
    studies: dict[str, Study], limits: dict[str, float], seconds: float, out: Path, cases: Cases, part: Part = WHOLE
) -> None:
    start = time.monotonic()
    with opened(studies) as subject:
        _say(start, "the models are open")
        end = time.monotonic()  # of what was given so far
        for name, study in studies.items():
            end = min(end + limits[name], start + seconds)
            results = Results(out / Path(name).stem, study)
            made = {measure.name: cases.get(f"{Path(name).stem} {measure.name}") for measure in measures(study)}
            _one(study, subject, made, results, part, end)
            for measure in measures(study):
                done = results.of(study.variants[0].name, measure.name)
                counts = {condition: len(records) for condition, records in done.items()}
                _say(start, f"{study.title}, {measure.name}: {counts}")


def _one(
    study: Study,
    subject: StudySubject,
    made: dict[str, list[StudyCase] | None],
    results: Results,
    part: Part,
    end: float,
) -> None:
    """A study until its time is up, a few prompts of each measure in turn. What fails is said and left: other measures
    are worth having."""
    waiting: list[tuple[Measure, list[StudyCase]]] = []
    for measure in measures(study):
        if time.monotonic() < end:
            given = made[measure.name]
            try:
                waiting.append((measure, drawn(measure.cases(subject) if given is None else given, part)))
            except Exception:
                traceback.print_exc()
    while waiting and time.monotonic() < end:
        measure, cases = waiting.pop(0)
        some, rest = cases[:AT_ONCE], cases[AT_ONCE:]
        try:
            measure_cases(
                *(study, study.variants[0], subject, measure, some, results),
                lambda text: None,
                lambda: time.monotonic() >= end,
            )
        except Exception:
            traceback.print_exc()
            continue
        if rest:
            waiting.append((measure, rest))


def drawn(cases: list[StudyCase], part: Part) -> list[StudyCase]:
    """A part of the cases in an order that is the same for all parts."""
    number, count = part
    order = random.Random(0).sample(cases, len(cases))
    return order[number - 1 :: count]


def part_of(text: str) -> Part:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise BadRequest(f"--part is {text!r}", "give a number and a count, such as 1/4")
    return int(number), int(count)


def _say(start: float, text: str) -> None:
    print(f"{time.monotonic() - start:6.1f} s  {text}", flush=True)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Several studies of prefill with one opening of the models.")
    parser.add_argument("studies", nargs="+", metavar="STUDY:SECONDS")
    parser.add_argument("--seconds", type=float, default=1e9, help="of all of it, the opening included")
    parser.add_argument("--out", type=Path, default=Path("lab-results"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--draft-model")
    parser.add_argument("--prefill-profile")
    parser.add_argument("--device")
    parser.add_argument("--kv-cache-tokens", type=int, help="of the engine, where others need the device's memory, too")
    parser.add_argument("--prompts", type=int, help="of each measure, in place of the studies' counts")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th prompt, from the K-th on")
    parser.add_argument("--cases", type=Path, help="prompts made beforehand")
    parser.add_argument("--prepare", type=Path, help="make the prompts and write them there; measure nothing")
    args = parser.parse_args(given)
    asked = {"data": args.data, "model": args.model, "draft": args.draft_model, "device": args.device}
    asked |= {"profile": args.prefill_profile, "kv_cache_tokens": args.kv_cache_tokens}
    limits = {name: float(limit or 1e9) for name, _, limit in (part.partition(":") for part in args.studies)}
    try:
        studies = {name: narrowed(load(find(name), asked), [], args.prompts) for name in limits}
        if args.prepare is not None:
            with opened(studies) as subject:
                write_cases(args.prepare, studies, subject)
        else:
            run(studies, limits, args.seconds, args.out, read_cases(args.cases), part_of(args.part))
    except BadRequest as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
