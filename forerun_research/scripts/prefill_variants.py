"""Ways to make long drafted prompts cheaper, side by side: first tokens, and what each costs in agreement.

    python -m forerun_research.scripts.prefill_variants --variants 0,2048,0:0 --lengths 8192,16384 \\
        --data DATA --out VARIANTS.jsonl [--prefill-profile PROFILE] [--device cuda] [--prompts 24] [--judged 16]

A variant is WINDOW[:SPANS]: how far back the draft's upper layers see while they read (0: all), and how many spans are
checked. Of every prompt exact prefill and all variants in turn, from cold caches, as requests have them
(`prefill_first_token`); then KL and agreement over 64 tokens that follow other prompts of the same lengths. A line for
each, as it is done; the first prompt of a length meets kernels that have not run yet.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from forerun.params import Prefill
from forerun.prefill.plan import Policy
from forerun.prefill.sources.draft import DraftSource
from forerun_research.studies.prefill_agreement import Agreement
from forerun_research.studies.prefill_first_token import FirstToken, first_token
from forerun_research.studies.prefill_score import prefiller_of
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.study import EXACT, Setting, Study, Variant

SETTING = Setting("default", Prefill("speculative", source="draft"))


def use(subject: StudySubject, variant: str) -> None:
    """From now on prompts are drafted so."""
    prefiller = prefiller_of(subject.engine)
    source = prefiller.source(SETTING.prefill)
    assert isinstance(source, DraftSource)
    window, _, spans = variant.partition(":")
    source.narrow(int(window))
    prefiller.policy = replace(prefiller.policy, spans=int(spans or Policy.spans))


def first_tokens(subject: StudySubject, args: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> None:
    for case in FirstToken(prompts=args.prompts, lengths=args.lengths, texts=args.texts).cases(subject):
        about = {"measure": "first token", "case": case.id, **case.more}
        write({**about, "variant": EXACT, **first_token(subject, case.ids, Prefill())})
        for variant in args.variants:
            use(subject, variant)
            write({**about, "variant": variant, **first_token(subject, case.ids, SETTING.prefill)})


def agreements(subject: StudySubject, args: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> None:
    """The seed differs from that of the first tokens: other prompts."""
    for length in args.lengths:
        measure = Agreement(prompts=args.judged, length=length - 64, texts=args.texts, seed=1)
        for case in measure.cases(subject):
            for variant in args.variants:
                use(subject, variant)
                for _, record in measure.run(subject, case, [SETTING], [SETTING.name], {}):
                    write({"measure": "agreement", "case": case.id, "length": length, "variant": variant, **record})


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Ways to make long drafted prompts cheaper, side by side.")
    parser.add_argument("--model", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--draft-model", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--prefill-profile")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=["0"])
    parser.add_argument("--lengths", type=lambda text: tuple(map(int, text.split(","))), default=(8192, 16384))
    parser.add_argument("--texts", type=lambda text: tuple(text.split(",")), default=FirstToken.texts)
    parser.add_argument("--prompts", type=int, default=24, help="of each length, timed")
    parser.add_argument("--judged", type=int, default=16, help="of each length, for agreement")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(given)
    start, found = time.monotonic(), list[dict[str, Any]]()
    study = Study("variants", args.model, (), data=args.data, device=args.device)
    with (
        StudySubject(study, Variant("", args.draft_model, args.prefill_profile)) as subject,
        args.out.open("a") as file,
    ):

        def write(record: dict[str, Any]) -> None:
            found.append(record)
            file.write(json.dumps(record | {"at_s": round(time.monotonic() - start, 2)}) + "\n")
            file.flush()

        first_tokens(subject, args, write)
        show(found, "ttft_s", start)
        agreements(subject, args, write)
        show(found, "kl", start)
    return 0


def show(found: list[dict[str, Any]], key: str, start: float) -> None:
    groups = dict.fromkeys((r["length"], r["variant"]) for r in found if key in r)
    for length, variant in groups:
        own = [r for r in found if key in r and (r["length"], r["variant"]) == (length, variant) and not r.get("first")]
        print(
            f"{time.monotonic() - start:5.1f} s  {length} {variant}: {key} {median(r[key] for r in own):.4f}",
            flush=True,
        )


if __name__ == "__main__":
    raise SystemExit(main())
