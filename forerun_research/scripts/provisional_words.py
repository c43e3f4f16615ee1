"""Which words of provisional answers stand: by how sure each was over drafted K/V. The doubt that holds words back is
fitted to one half of the texts and reported on the other.

    python -m forerun_research.scripts.provisional_words --data DATA --out WORDS.jsonl [--model MODEL]
        [--draft-model DRAFT] [--source chunk] [--tokens 1700,2400] [--seconds 100]
    python -m forerun_research.scripts.provisional_words --read WORDS.jsonl

Prompts of essays, of Python's own documentation and of its standard library, each with a question. With `chunk` a
prompt was met before with another first line. A record has the margin of every token of the drafted answer, how many of
its first tokens are those of exact prefill's answer, and the KL that was expected. What is tested is greedy answers.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from statistics import fmean, median
from typing import Any

from forerun.core import SamplingParams
from forerun.engine.provisional import MIN_STANDING, ODDS_PER_DEVIATION
from forerun.llm import LLM
from forerun.params import Prefill
from forerun_research.studies.intervals import wilson
from forerun_research.studies.prefill_score import prefiller_of
from forerun_research.studies.prefill_texts import STDLIB, StudyTexts

ANSWER_TOKENS = 40
ROOM = 100  # tokens of a prompt beside its text
MOST = 60  # prompts of a kind and half
KINDS, PROSE = ("essays", "pydoc", "stdlib"), ("essays", "pydoc")
HALVES = ("tune", "report")
QUESTIONS = (
    "Say in a few sentences what the text above is about.",
    "What is the main point of the text?",
    "Summarize the text above.",
    "Name three things that the text mentions.",
    "What does the author want to show?",
)
BOUNDS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, math.inf)
Words = dict[str, Any]  # of one prompt


def documents(texts: StudyTexts) -> dict[str, list[str]]:
    found = {"essays": texts.documents("essays"), "stdlib": texts.documents(STDLIB)}
    return found | {"pydoc": [text for _, text in sorted(topics.topics.items())]}


def pieces(texts: StudyTexts, lengths: list[int]) -> Iterator[tuple[str, str, list[int]]]:
    """(kind, half, ids) in turn. A document is in one half, by a checksum of its beginning."""
    draw, found = random.Random(7), list[list[tuple[str, str, list[int]]]]()
    for kind, own in documents(texts).items():
        for number, half in enumerate(HALVES):
            mine = [text for text in own if zlib.crc32(text[:200].encode()) % len(HALVES) == number]
            ids, at, cut = texts.tokenizer.encode("\n\n".join(mine)), 0, list[tuple[str, str, list[int]]]()
            while at + (length := draw.choice(lengths) - ROOM) <= len(ids) and len(cut) < MOST:
                cut.append((kind, half, ids[at : at + length]))
                at += length
            found.append(cut)
    for same in zip(*found, strict=False):
        yield from same


def answers(llm: LLM, source: str, lengths: list[int], data: Path | None) -> Iterator[Words]:
    assert llm.tokenizer is not None
    prefiller = prefiller_of(llm.engine)
    for number, (kind, half, ids) in enumerate(pieces(StudyTexts(data, llm.tokenizer), lengths)):
        text, question = llm.tokenizer.decode(ids), QUESTIONS[number % len(QUESTIONS)]
        old, new = (
            llm.tokenizer.apply_chat_template(
                [
                    {
                        "role": "user",
                        "content": f"Turn {n} at 09:{n % 60:02}, checksum {97 * n + 13:05}.\n{text}\n\n{question}",
                    }
                ]
            )
            for n in (number, number + 31)
        )
        exact = answer(llm, new, Prefill())
        if source == "chunk":
            llm.generate(old, SamplingParams(max_tokens=1))
        drafted = answer(llm, new, Prefill("speculative", source=source, allow_exact=True))
        pairs = enumerate(zip(exact.token_ids, drafted.token_ids, strict=False))
        least, report = min(len(exact.token_ids), len(drafted.token_ids)), drafted.usage.prefill
        if report is None or report.fell_back:
            continue
        yield {
            "kind": kind,
            "half": half,
            "tokens": len(new),
            "stand": next((i for i, (a, b) in pairs if a != b), least),
            "compared": least,
            "margins": [round(entry.top[0][1] - entry.top[1][1], 4) for entry in drafted.choices[0].logprobs],
            "kl": prefiller.expected_kl(report),
        }


def answer(llm: LLM, ids: list[int], prefill: Prefill) -> Any:
    params = SamplingParams(max_tokens=ANSWER_TOKENS, prefill=prefill, speculation="off", logprobs=2)
    found = llm.generate(ids, params)[0]
    llm.clear_cache()
    return found


def seen_tokens(words: list[Words]) -> list[tuple[float, float, bool]]:
    """(margin, expected KL, whether it stands) of every token up to the first that does not."""
    found = []
    for own in words:
        upto = min(own["stand"] + 1, own["compared"])
        found += [(m, own["kl"], i < own["stand"]) for i, m in enumerate(own["margins"][:upto])]
    return found


def chance(margin: float, kl: float, odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-min(60.0, odds * margin / math.sqrt(kl))))


def fit(words: list[Words]) -> float:
    """Log-odds that a token stands for a margin of one root of the expected KL, by likelihood."""
    seen = seen_tokens(words)

    def likelihood(odds: float) -> float:
        chances = [(chance(m, kl, odds), stands) for m, kl, stands in seen]
        return sum(math.log(max(1e-9, p if stands else 1.0 - p)) for p, stands in chances)

    return max((math.exp(step / 20) for step in range(-80, 60)), key=likelihood)


def shown(words: list[Words], odds: float, least: float, most: int = 64) -> dict[str, Any]:
    """What would have been shown and stood where nothing less likely than `least` is shown."""
    counts = []
    for own in words:
        standing, count = 1.0, 0
        for margin in own["margins"][:most]:
            standing *= chance(margin, own["kl"], odds)
            if standing < least:
                break
            count += 1
        counts.append((count, min(count, own["stand"])))
    total, stood = (sum(column) for column in zip(*counts, strict=True))
    found: dict[str, Any] = {"least": least, "shown": total, "stood": stood, "answers": len(words)}
    if total:
        found |= {"share": round(stood / total, 3), "interval": [round(end, 3) for end in wilson(stood, total)]}
    return found | {"with_words": sum(count > 0 for count, _ in counts), "stood_each": round(stood / len(words), 2)}


def tables(words: list[Words]) -> dict[str, Any]:
    halves = {half: [own for own in words if own["half"] == half] for half in HALVES}
    odds = fit(halves["tune"])
    found: dict[str, Any] = {
        "prompts": {
            f"{kind} {half}": sum(w["kind"] == kind for w in halves[half]) for kind in KINDS for half in HALVES
        },
        "kl": [min(w["kl"] for w in words), median(w["kl"] for w in words), max(w["kl"] for w in words)],
        "stand_each": round(fmean(w["stand"] for w in words), 2),
        "odds_tuned": round(odds, 3),
        "odds_of_other_half": round(fit(halves["report"]), 3),
        "in_use": [ODDS_PER_DEVIATION, MIN_STANDING],
        "by_margin": [],
    }
    for low, high in zip(BOUNDS, BOUNDS[1:], strict=False):
        own = [stands for margin, _, stands in seen_tokens(words) if low <= margin < high]
        found["by_margin"].append([low, len(own), round(fmean(own), 4) if own else None])
    groups = halves | {"report, prose": [w for w in halves["report"] if w["kind"] in PROSE]}
    groups |= {"report, code": [w for w in halves["report"] if w["kind"] not in PROSE]}
    for name, members in groups.items():
        found[name] = [shown(members, odds, least / 10) for least in range(10)] if members else []
    return found


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Which words of provisional answers stand.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--draft-model")
    parser.add_argument("--source", default="chunk")
    parser.add_argument("--tokens", default="1700,2400")
    parser.add_argument("--seconds", type=float, default=100.0, help="after which no prompt is begun")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path, nargs="*", default=[], help="records in place of a model")
    args = parser.parse_args(given)
    words = [json.loads(line) for path in args.read for line in path.read_text().splitlines()]
    if not args.read:
        lengths, begun = [int(length) for length in args.tokens.split(",")], time.monotonic()
        context = max(lengths) + ROOM + ANSWER_TOKENS
        with LLM(args.model, draft_model=args.draft_model, max_model_len=context, quiet=True) as llm:
            for own in answers(llm, args.source, lengths, args.data):
                words.append(own)
                if args.out is not None:
                    with args.out.open("a") as file:
                        file.write(json.dumps(own) + "\n")
                if time.monotonic() - begun > args.seconds:
                    break
    print(json.dumps(tables(words), indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
