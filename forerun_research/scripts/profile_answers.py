"""A model's own answers about documents, as conversations to calibrate a profile on.

    python -m forerun_research.scripts.profile_answers TEXTS --model MODEL [--count 600] [--seconds 60]
    forerun calibrate --target MODEL --text TEXTS --out PROFILE

TEXTS is a folder of folders of text, one of each kind (`profile_texts`). Of each kind in turn a piece of a file and one
of some questions make a prompt, so long that a window of calibration ends within the answer; answers that end before
are left out. Writes TEXTS/answers/NNNN.jsonl, a few conversations each, as they come. Knows no profile.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from forerun.core import SamplingParams
from forerun.llm import LLM

FOLDER = "answers"
WINDOW_TOKENS = 2112  # of calibration: 2,048 and 64 more
ANSWER_TOKENS = 176  # of them that are the answer's: 128 are compared, and the prompt's tail ends before those
MAX_ANSWER_TOKENS = 260
CONVERSATIONS_PER_FILE = 8  # files are held out as wholes: many of them, about as large as the other texts
BATCH = 96  # prompts at a time
KV_TOKENS = 160_000  # of the engine: 64 prompts with their answers, whatever else runs on the device
QUESTIONS = (
    "Summarize the text above in detail, part by part.",
    "What are the most important facts in the text above? List at least eight, each with an explanation.",
    "Explain what stands above to a reader who has never seen such a thing, with examples quoted from it.",
    "Continue the text above in the same style, for at least three paragraphs or thirty lines.",
    "Which names, numbers and terms occur above, and what is said about each of them?",
    "Write ten questions about the text above, each followed by its answer.",
    "Rewrite the last part of the text above so that it is clearer, and say what you changed.",
    "Find mistakes, oddities or risks in the text above and discuss each of them at length.",
    "Describe step by step how what stands above works or is organised.",
    "Repeat the passage above that matters most word for word, then comment on it.",
)


def pieces(texts: Path, draw: random.Random) -> Iterator[str]:
    """Parts of files, the kinds taking turns, each long enough for a prompt."""
    kinds = [sorted(p for p in folder.rglob("*") if p.is_file()) for folder in sorted(texts.iterdir())]
    kinds = [files for files in kinds if files and files[0].parent.name != FOLDER]
    while kinds:
        for files in kinds:
            text = draw.choice(files).read_text(encoding="utf-8", errors="ignore")
            at = text.find("\n", draw.randrange(max(1, len(text) - 12_000))) + 1
            yield text[at : at + 16_000]


def conversations(llm: LLM, texts: Path, draw: random.Random) -> Iterator[tuple[str, list[int]]]:
    """What a user says, a piece and a question, and the prompt as the model gets it."""
    encode, decode, render = llm.tokenizer.encode, llm.tokenizer.decode, llm.tokenizer.apply_chat_template
    most = WINDOW_TOKENS - ANSWER_TOKENS
    for piece in pieces(texts, draw):
        question = f"\n\n{draw.choice(QUESTIONS)}"
        frame = len(render([{"role": "user", "content": question}]))
        ids = encode(piece)
        if len(ids) < most - frame:
            continue
        content = decode(ids[: most - frame]) + question
        prompt = render([{"role": "user", "content": content}])
        if abs(len(prompt) - most) <= 8:  # a piece cut within a character may have other tokens at its end
            yield content, prompt


def write(llm: LLM, texts: Path, count: int, seconds: float, seed: int) -> int:
    out, draw, start = texts / FOLDER, random.Random(seed), time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    asked, kept, lines = conversations(llm, texts, draw), 0, list[str]()
    params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=MAX_ANSWER_TOKENS, speculation="off")
    while kept + len(lines) < count and time.monotonic() - start < seconds:
        batch = [next(asked) for _ in range(min(BATCH, count))]
        for (content, prompt), answer in zip(
            batch, llm.generate([ids for _, ids in batch], params, cache=False), strict=True
        ):
            if len(prompt) + len(answer.token_ids) < WINDOW_TOKENS:
                continue
            messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer.text}]
            lines.append(json.dumps({"messages": messages}))
            if len(lines) == CONVERSATIONS_PER_FILE:
                (out / f"{kept // CONVERSATIONS_PER_FILE:04}.jsonl").write_text("\n".join(lines) + "\n")
                kept, lines = kept + len(lines), []
        print(f"{time.monotonic() - start:.0f} s: {kept + len(lines)} answers", flush=True)
    return kept


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A model's own answers about documents.")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(given)
    longest = WINDOW_TOKENS + MAX_ANSWER_TOKENS
    with LLM(args.model, device=args.device, max_model_len=longest, kv_cache_tokens=KV_TOKENS, quiet=True) as llm:
        print(f"{write(llm, args.texts, args.count, args.seconds, args.seed)} conversations")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
