"""Questions about a document, in a session: the document is computed once, every question reads it from the cache.
With a folder for the disk tier the session is there again after a restart.

    python examples/documents.py [FILE [KV_FOLDER]]
"""

from __future__ import annotations

import sys
from pathlib import Path

from forerun import LLM, SamplingParams

QUESTIONS = ("What is this text about? One sentence.", "Who is it written for? One sentence.")


def main(path: Path, folder: Path | None = None) -> None:
    document = path.read_text()[:6000]
    with LLM(disk=folder) as llm:
        session = llm.session("document")
        if not session.messages:  # else: it was kept on disk
            session.append({"role": "system", "content": f"Answer from this document.\n\n{document}"})
        for number, question in enumerate(QUESTIONS):
            with session.fork(f"question {number}") as branch:  # starts from the document, not from the question before
                branch.append({"role": "user", "content": question})
                answer = branch.answer(SamplingParams(max_tokens=48))
            usage = answer.usage
            print(f"{question}\n  {answer.text.strip()}")
            print(f"  {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached, {usage.ttft_s:.2f} s")


if __name__ == "__main__":
    here = Path(__file__).parent
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else here.parent / "forerun" / "data" / "documents" / "handbook.txt"
    main(given, Path(sys.argv[2]) if len(sys.argv) > 2 else None)
