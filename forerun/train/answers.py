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
import torch

from forerun import data
from forerun.errors import BadRequest
from forerun.llm import LLM
from forerun.params import SamplingParams
from forerun.prefill.calibration.dense import DenseModel
from forerun.prefill.calibration.files import find_files, split_held_out
from forerun.text.tokenizer import Tokenizer
from forerun.train.prompts import MAX_PROMPT_TOKENS, Prompt, PromptMix
from forerun.train.writer import BatchWriter

SYSTEMS = (
    "",  # the template's own
    "You are a helpful assistant that solves maths word problems step by step.",
    "You are an expert Python programmer who completes functions and explains code.",
    "You are a helpful assistant that writes, translates, summarises and rewrites text.",
    "You answer questions about science, history, geography and everyday life.",
)
QUESTION_TOKENS = 160  # at most, of a question that the target asks itself
OPENED_SHARE = 0.6  # of such questions that begin with given words: a small model alone asks much the same things
GROUP = 1024  # requests between two writes
CONTEXT_TOKENS = (48, 256)  # of a text that is continued
PIECE_TOKENS = 8192  # of one document that stay together: longer than the long windows of training
ANSWER_TOKENS, CONTINUED_TOKENS = 320, 160  # at most, of an answer and of a text that is continued in a batch
MIXED_SHARE = 0.55  # of a batch's prompts that are made; the others the target asks itself
BATCHES_TOGETHER = 2  # whose prompts are sorted by length
MAX_ROWS, CPU_ROWS = 2048, 16  # of a batch
LOOP_TOKENS = 16  # that come three times where an answer repeats itself
LOOP_WEIGHTS = np.array([pow(1_000_003, i, 1 << 61) for i in range(LOOP_TOKENS)], dtype=np.int64)
QUESTION_SHARE = 0.6  # of the answers that are to questions; the others continue text


def collect_answers(
    llm: LLM, path: Path, count: int, texts: Sequence[Path], max_tokens: int, seed: int, minutes: float | None = None
) -> None:
    """Until the file holds `count` answers: lines of token ids, prompt and answer together. `minutes`: after so many no
    further group starts."""
    deadline = None if minutes is None else time.monotonic() + 60.0 * minutes
    done = count_answers(path)
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


def write_answers(
    model: DenseModel,
    tokenizer: Tokenizer,
    path: Path,
    count: int,
    texts: Sequence[Path],
    seed: int,
    minutes: float | None = None,
    max_rows: int = MAX_ROWS,
) -> None:
    """As `collect_answers`, by the dense network: all rows of a batch at once (`BatchWriter`), to prompts of many kinds
    (`PromptMix`) and questions that the target asks itself. `texts`: folders whose source is continued and asked
    about. `max_rows`: of a batch, where several processes share one GPU's memory."""
    done = count_answers(path)
    if done >= count:
        return
    rng, written = random.Random(f"{seed} {done}"), 0
    room = model.config.max_context
    mix = iter(PromptMix(tokenizer, texts, rng.randrange(1 << 30), min(MAX_PROMPT_TOKENS, room // 2)))
    draw = torch.Generator(model.device).manual_seed(rng.randrange(1 << 30))
    rows, stops = min(batch_rows(model), max_rows), set(tokenizer.eos_ids)
    path.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()  # reading sources does not count
    while done < count and (minutes is None or time.monotonic() - start < 60.0 * minutes):
        made = min(BATCHES_TOGETHER * rows, max(1, round((count - done) * MIXED_SHARE)))
        prompts = [next(mix) for _ in range(made)]
        asked = round(made * (1.0 / MIXED_SHARE - 1.0)) if tokenizer.has_chat_template else 0
        prompts += _ask(model, tokenizer, asked, rows, rng, draw) if asked else []
        for batch in _batches(prompts, rows, rng):
            limit = ANSWER_TOKENS if batch[0].message else CONTINUED_TOKENS
            limit = min(limit, room - len(batch[-1].ids))
            answers = BatchWriter(model, [prompt.ids for prompt in batch], limit).run(stops)
            kept = [without_loop(answer) for answer in answers]
            with path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(answer, separators=(",", ":")) + "\n" for answer in kept)
            done, written = done + len(batch), written + sum(map(len, kept))
            spent = time.monotonic() - start
            line = f"answers: {done} in {spent:.0f} s, {written / 1e6:.2f} M tokens, {written / spent:.0f} a second"
            print(line, file=sys.stderr, flush=True)
            if minutes is not None and spent > 60.0 * minutes:
                break


def batch_rows(model: DenseModel) -> int:
    """Of a batch of answers: what half of the free memory holds the K/V of."""
    if model.device.type != "cuda":
        return CPU_ROWS
    c = model.config
    row = 4 * c.num_layers * c.num_kv_heads * c.head_dim * (MAX_PROMPT_TOKENS + ANSWER_TOKENS)
    return max(8, min(MAX_ROWS, torch.cuda.mem_get_info(model.device)[0] // (2 * row)))


def _batches(prompts: list[Prompt], rows: int, rng: random.Random) -> list[list[Prompt]]:
    """Prompts of one kind and of about the same length together, in any order: time may end before the last."""
    found: list[list[Prompt]] = []
    for message in (True, False):
        own = sorted((p for p in prompts if p.message == message), key=lambda prompt: len(prompt.ids))
        size = -(-len(own) // max(1, -(-len(own) // rows)))
        found += [own[at : at + size] for at in range(0, len(own), max(1, size))]
    rng.shuffle(found)
    return found


def _ask(
    model: DenseModel, tokenizer: Tokenizer, count: int, rows: int, rng: random.Random, draw: torch.Generator
) -> list[Prompt]:
    """Questions that the target writes itself, as the prompts of answers: some from given first words on."""
    openings = [_opening(tokenizer, system) for system in SYSTEMS]
    words = [tokenizer.encode(text) for text in json.loads(data.text("training_prompts.json"))["openings"]]
    begun = []
    for _ in range(count):
        head, tail = rng.choice(openings)
        begun.append((head, rng.choice(words) if rng.random() < OPENED_SHARE else [], tail))
    begun.sort(key=lambda parts: len(parts[0]) + len(parts[1]))
    found = []
    for lo in range(0, count, rows):
        part = begun[lo : lo + rows]
        turns = BatchWriter(model, [[*head, *first] for head, first, _ in part], QUESTION_TOKENS)
        for turn, (head, _, tail) in zip(turns.run(set(tokenizer.eos_ids), draw), part, strict=True):
            asked = [token for token in turn[len(head) :] if token not in tokenizer.special_ids]
            if asked:
                found.append(Prompt((*head, *asked, *tail), True))
    rng.shuffle(found)
    return found


def without_loop(ids: list[int]) -> list[int]:
    """Up to where the same few tokens come for the third time: a small model's greedy answer may repeat itself until it
    is cut off, and a drafter learns nothing from that."""
    if len(ids) < 3 * LOOP_TOKENS:
        return ids
    windows = np.lib.stride_tricks.sliding_window_view(np.array(ids, dtype=np.int64), LOOP_TOKENS)
    keys = (windows * LOOP_WEIGHTS).sum(1)
    order = np.argsort(keys, kind="stable")
    third = order[2:][keys[order[2:]] == keys[order[:-2]]]
    return ids if not len(third) else ids[: int(third.min()) + LOOP_TOKENS]


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


def count_answers(path: Path) -> int:
    """In a file, which loses a line that an interruption cut off."""
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
