"""Speculative prefill: the K/V cache of a long prompt is drafted, checked and repaired, so that the first token comes
earlier. The answer is approximate; `provisional` shows it at once and ends with exactly the exact answer.

    python examples/earlier_first_token.py [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from forerun import LLM, SamplingParams

QUESTION = "\n\nIn one sentence: what is this document about?"


def main(path: Path) -> None:
    messages = [{"role": "user", "content": path.read_text()[:8000] + QUESTION}]
    with LLM() as llm:
        for mode in ("exact", "speculative"):
            params = SamplingParams(max_tokens=32, prefill=mode, cache=False)  # neither reads what the other computed
            answer = llm.chat(messages, params)[0]
            report = answer.usage.prefill
            how = "computed" if report is None else f"{report.cost:.0%} of the work, {report.recomputed} recomputed"
            print(f"{mode:12} first token {answer.usage.ttft_s:5.2f} s ({how}): {answer.text.strip()}")

        print(f"{'provisional':12} ", end="")
        for event in llm.stream(messages, SamplingParams(max_tokens=32, prefill="provisional", cache=False)):
            if event.retracted:
                print(f" [{event.retracted} tokens retracted] ", end="")
            print(event.text, end="", flush=True)
        print()


if __name__ == "__main__":
    here = Path(__file__).parent
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else here.parent / "forerun" / "data" / "documents" / "handbook.txt")
