"""Whether a drafter that learns while serving gets better: long answers one after the other, with `adapt` and without.

    python -m forerun_research.scripts.adapting_rounds --target smollm2-135m-instruct \\
        --draft-model artifacts/drafters/smollm2-block.safetensors --drafter block --answers 8 --tokens 2000

The prompts are made here, in a template that no drafter was trained on (a dialogue as plain text). Every answer is
decoded twice, by an engine that learns and by one that does not; between two answers the first has idle time, as
between the requests of a user who reads. Both give the same tokens, so that rounds are compared in pairs: tokens a
round in the first and in the last quarter of the answers, and over all of them. Tokens are counted, so the machine's
speed does not matter.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from forerun import LLM, SamplingParams, Speculation
from forerun.decode.drafters.hidden import HiddenDrafter

TEMPLATE = "A conversation between a curious user and a writer.\n\nUSER: {task}\nWRITER:"
TASK = "Write a long and detailed guide to {}. Start with an overview, then go through every part of it, one by one."
SUBJECTS = (
    *("the harbour of a small town", "a railway line in the mountains", "the kitchen of a school", "a public library"),
    *("an orchard with old trees", "the archive of a newspaper", "a workshop for bicycles", "a hospital's laundry"),
    *("the lighthouse on the north shore", "a bakery with twelve ovens", "the town's water works", "a theatre"),
)
ROOM = 64  # tokens of context behind an answer


def prompts(count: int) -> list[str]:
    return [TEMPLATE.format(task=TASK.format(subject)) for subject in SUBJECTS[:count]]


def quarter(lengths: list[int], number: int) -> float:
    """Tokens a round in one quarter of an answer's rounds."""
    size = len(lengths) // 4
    part = lengths[number * size : (number + 1) * size if number < 3 else None]
    return 1.0 + sum(part) / max(1, len(part))


def decode(args: argparse.Namespace, adapt: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    spec = Speculation("+".join((args.drafter, *args.beside)), nodes=args.nodes, depth=min(args.depth, args.nodes))
    options: dict[str, Any] = {"temperature": args.temperature, "top_p": 0.95} if args.temperature else {}
    with LLM(
        args.target, draft_model=args.draft_model, adapt=adapt, max_model_len=args.tokens + 512, quiet=True
    ) as llm:
        llm.generate(["Hello"], SamplingParams(max_tokens=2, speculation=spec))  # the drafter is made
        drafter = llm.engine.speculator.drafter_pool[args.drafter]
        assert isinstance(drafter, HiddenDrafter)
        if args.learn == "adapter":
            drafter.habits = None
        for number, text in enumerate(prompts(args.answers)):
            params = SamplingParams(
                max_tokens=args.tokens, ignore_eos=True, speculation=spec, seed=args.seed + number, **options
            )
            answer = llm.generate([text], params)[0]
            lengths = answer.usage.lengths
            record = {"answer": number, "adapt": adapt, "tokens": answer.token_ids, "rounds": len(lengths)}
            record |= {"first": quarter(lengths, 0), "last": quarter(lengths, 3)}
            record["all"] = 1.0 + sum(lengths) / max(1, len(lengths))
            if adapt and drafter.habits is not None:
                record["habits"] = drafter.habits.stats | {"gain": round(drafter.habits.gain, 1)}
            if adapt and args.learn != "habits":
                llm.upgrade()  # what happens while no request runs
                hidden = llm.engine.speculator.ctx.hidden
                assert hidden is not None and hidden.adapter is not None
                record["stats"] = dict(hidden.adapter.stats)
            found.append(record)
            shown = {key: value for key, value in record.items() if key != "tokens"}
            print(json.dumps(shown), flush=True)
    return found


def compare(fixed: list[dict[str, Any]], learnt: list[dict[str, Any]]) -> dict[str, Any]:
    """Accepted tokens a round with learning over without, in pairs, from the second answer on."""
    pairs = list(zip(fixed, learnt, strict=True))[1:]
    result: dict[str, Any] = {"pairs": len(pairs), "same_answers": all(a["tokens"] == b["tokens"] for a, b in pairs)}
    for part in ("first", "last", "all"):
        plain, better = ([each[part] for each in side] for side in zip(*pairs, strict=True))
        ratios = [(b - 1.0) / max(1e-6, a - 1.0) for a, b in zip(plain, better, strict=True)]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
        result[part] = {
            "without": round(statistics.mean(plain), 3),
            "with": round(statistics.mean(better), 3),
            "accepted_ratio": [round(statistics.mean(ratios), 3), round(error, 3)],
        }
    drift = [each["last"] - each["first"] for each in learnt[1:]]
    spread = statistics.stdev(drift) / len(drift) ** 0.5 if len(drift) > 1 else 0.0
    result["end_minus_start"] = [round(statistics.mean(drift), 3), round(spread, 3)]
    return result


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tokens a round of a drafter that learns while serving.")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--drafter", default="block", help="block or heads")
    parser.add_argument("--answers", type=int, default=8, help=f"at most {len(SUBJECTS)}")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.9, help="0: greedy; small models then repeat themselves")
    parser.add_argument("--learn", choices=("both", "habits", "adapter"), default="both", help="one part of it alone")
    parser.add_argument("--beside", nargs="*", default=[], help="free drafters that draft as well: lookup suffix")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(given)
    result = compare(decode(args, adapt=False), decode(args, adapt=True))
    print(json.dumps(result))
    if args.out is not None:
        args.out.write_text(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
