"""Plain decoding alone and beside busy processes: tokens a second, and the longest gap between two tokens.

python -m forerun_research.scripts.beside_others [--model NAME] [--quantization int8] [--others 0 1 4]

Rounds alternate: alone, then beside each number of others, several times over. A busy process is one thread of Python.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median

from forerun import LLM, SamplingParams
from forerun.commands.stats import threads_line

PROMPT = "Write a long story about a lighthouse keeper and the sea."


def measure(llm: LLM, tokens: int) -> tuple[float, list[float]]:
    """Tokens a second after the first, and all gaps in seconds."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, speculation="off")
    times = [time.perf_counter() for event in llm.stream(PROMPT, params) if event.token_ids]
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    return len(gaps) / (times[-1] - times[0]), gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--others", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    speeds: dict[int, list[float]] = {count: [] for count in args.others}
    worst: dict[int, list[float]] = {count: [] for count in args.others}
    with LLM(args.model, quantization=args.quantization, quiet=True) as llm:
        measure(llm, 16)
        for _ in range(args.rounds):
            for count in args.others:
                busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
                time.sleep(1.0)
                try:
                    speed, gaps = measure(llm, args.tokens)
                finally:
                    for process in busy:
                        process.kill()
                        process.wait()
                speeds[count].append(speed)
                worst[count].append(max(gaps) / median(gaps))
                print(f"{count} others: {speed:.1f} tokens/s, longest gap {worst[count][-1]:.1f} medians", flush=True)
        print(threads_line(llm.thread_stats()))
        alone = median(speeds[args.others[0]])
        result = {
            str(count): {
                "tokens_per_s": {"median": median(speeds[count]), "min": min(speeds[count]), "max": max(speeds[count])},
                "share_of_alone": median(speeds[count]) / alone,
                "longest_gap_in_medians": max(worst[count]),
            }
            for count in args.others
        }
        print(json.dumps({"bench": "beside_others", "model": args.model, "weights": llm.precision.name, **result}))


if __name__ == "__main__":
    main()
