"""What a drafter is trained on: the target's own greedy answers, to questions it asks itself and to text it continues.

An instruct model that is given the beginning of a user's turn writes one (Magpie), so no prompts are needed. Answers
are appended to a file as they come: an interrupted run goes on after the last. Knows an `LLM`; no training.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from forerun.errors import BadRequest
from forerun.llm import LLM
from forerun.params import SamplingParams
from forerun.prefill.calibration.files import find_files, split_held_out
from forerun.text.tokenizer import Tokenizer

SYSTEMS = (
    "",  # the template's own
    "You are a helpful assistant that solves maths word problems step by step.",
    "You are an expert Python programmer who completes functions and explains code.",
    "You are a helpful assistant that writes, translates, summarises and rewrites text.",
    "You answer questions about science, history, geography and everyday life.",
)
QUESTION_TOKENS = 160  # at most, of a question that the target asks itself
GROUP = 1024  # requests between two writes
CONTEXT_TOKENS = (48, 256)  # of a text that is continued
PIECE_TOKENS = 8192  # of one document that stay together: longer than the long windows of training
QUESTION_SHARE = 0.6  # of the answers that are to questions; the others continue text


def collect_answers(
    llm: LLM, path: Path, count: int, texts: Sequence[Path], max_tokens: int, seed: int, minutes: float | None = None
) -> None:
    """Until the file holds `count` answers: lines of token ids, prompt and answer together. `minutes`: after so many no
    further group starts."""
    deadline = None if minutes is None else time.monotonic() + 60.0 * minutes
    done = _count_lines(path)
    rng = random.Random(f"{seed} {done}")
    excerpts = _excerpts(llm.tokenizer, texts, rng) if texts else None
    chat = llm.tokenizer.has_chat_template
    if not chat and excerpts is None:
        hint = "give --text to continue"
        raise BadRequest(f"{llm.model} has no chat template, so it cannot ask itself questions", hint)
    start, before = time.monotonic(), done
    path.parent.mkdir(parents=True, exist_ok=True)
    while done < count and (deadline is None or time.monotonic() < deadline):
        size = min(GROUP, count - done)
        asked = size if excerpts is None else round(size * QUESTION_SHARE) if chat else 0
        prompts = _questions(llm, asked, rng) if asked else []
        if excerpts is not None:
            prompts += [next(excerpts) for _ in range(size - asked)]
        answers = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, speculation="off"))
        with path.open("a", encoding="utf-8") as file:
            for answer in answers:
                file.write(json.dumps([*answer.prompt_ids, *answer.token_ids]) + "\n")
        done += len(prompts)
        spent = time.monotonic() - start
        left = spent / max(1, done - before) * (count - done)
        print(f"answers: {done} of {count} in {spent:.0f} s, about {left:.0f} s left", file=sys.stderr, flush=True)


def _questions(llm: LLM, count: int, rng: random.Random) -> list[list[int]]:
    """Conversations that end where the assistant begins: the target wrote the user's turn."""
    openings = [_opening(llm.tokenizer, rng.choice(SYSTEMS)) for _ in range(count)]
    seeds = [rng.randrange(1 << 30) for _ in openings]
    params = [
        SamplingParams(max_tokens=QUESTION_TOKENS, temperature=1.0, top_p=0.95, seed=seed, speculation="off")
        for seed in seeds
    ]
    asked = llm.generate([head for head, _ in openings], params)
    return [
        [*head, *(t for t in turn.token_ids if t not in llm.tokenizer.special_ids), *tail]
        for (head, tail), turn in zip(openings, asked, strict=True)
        if turn.token_ids
    ]


def _opening(tokenizer: Tokenizer, system: str) -> tuple[list[int], list[int]]:
    """The ids of a conversation before the user's text and after it."""
    first = [{"role": "system", "content": system}] if system else []
    one, two = (tokenizer.apply_chat_template([*first, {"role": "user", "content": c}]) for c in ("a", "b"))
    at = next(i for i, (x, y) in enumerate(zip(one, two, strict=True)) if x != y)
    return one[:at], one[at + 1 :]


def _excerpts(tokenizer: Tokenizer, paths: Sequence[Path], rng: random.Random) -> Iterator[list[int]]:
    """Beginnings of different lengths, from places all over the text."""
    sections, _ = split_held_out(find_files(paths), 0.05, rng)
    while True:
        for section in rng.sample(sections, len(sections)):
            for text in section.texts():
                ids = tokenizer.encode(text[: 1 << 16], add_special=True)
                for at in range(0, len(ids) - CONTEXT_TOKENS[1], 4 * CONTEXT_TOKENS[1]):
                    start = 0 if at == 0 else at + rng.randrange(CONTEXT_TOKENS[1])
                    yield ids[start : start + rng.randint(*CONTEXT_TOKENS)]


def _count_lines(path: Path) -> int:
    if not path.exists():
        return 0
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):  # cut off by an interruption
        data = data[: data.rfind(b"\n") + 1]
        path.write_bytes(data)
    return data.count(b"\n")


def token_stream(
    tokenizer: Tokenizer, answers: Path | None, texts: Sequence[Path], text_tokens: int, seed: int
) -> np.ndarray:
    """[N] int32: answers and documents one after the other in a random order, each ended as texts end."""
    rng, documents = random.Random(seed), []
    end = list(tokenizer.eos_ids)[:1]
    if answers is not None and answers.exists():
        with answers.open(encoding="utf-8") as file:
            documents += [np.array([*json.loads(line), *end], dtype=np.int32) for line in file]
    if texts and text_tokens > 0:
        sections, _ = split_held_out(find_files(texts), 0.05, rng)
        taken = 0
        for section in sections:
            for text in section.texts():
                ids = np.array([*tokenizer.encode(text), *end], dtype=np.int32)
                documents += [ids[at : at + PIECE_TOKENS] for at in range(0, len(ids), PIECE_TOKENS)]
                taken += len(ids)
            if taken >= text_tokens:
                break
    rng.shuffle(documents)
    return np.concatenate(documents) if documents else np.zeros(0, dtype=np.int32)
