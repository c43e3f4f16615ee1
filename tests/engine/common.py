"""What engine tests share: a tiny model in an engine, and a way to run requests to their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from forerun.core import SamplingParams
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.sequence import Event, Request
from forerun.models.build import build_decoder
from forerun.models.formats.checkpoint import open_checkpoint


def make_engine(folder: Path, *, weights: str = "float32", prefiller: Any = None, **config: Any) -> Engine:
    checkpoint = open_checkpoint(folder)
    decoder, _ = build_decoder(checkpoint, torch.device("cpu"), weights, 512)
    values = {
        "max_model_len": 512,
        "kv_cache_tokens": 2048,
        "page_size": 8,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
    } | config
    return Engine(decoder, checkpoint.tokenizer(), EngineConfig(**values), prefiller=prefiller)


class Answer:
    """Collects one request's events."""

    def __init__(self, engine: Engine, prompt: list[int], params: SamplingParams, session: str | None = None) -> None:
        self.events: list[Event] = []
        self.request = Request(prompt, params, sink=self.events.append, session=session)
        engine.submit(self.request)

    def tokens(self, index: int = 0) -> list[int]:
        return [t for e in self.events if e.index == index for t in e.token_ids]

    def text(self, index: int = 0) -> str:
        return "".join(e.text for e in self.events if e.index == index)

    @property
    def last(self) -> Event:
        return self.events[-1]


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Greedy or seeded answers of prompts that run together."""
    answers = [Answer(engine, prompt, params) for prompt in prompts]
    finish(engine)
    return [answer.tokens() for answer in answers]


def finish(engine: Engine, steps: int = 10_000) -> None:
    for _ in range(steps):
        engine.step()
        if engine.idle:
            return
    raise AssertionError(f"still busy after {steps} steps")


def leaked(engine: Engine) -> int:
    """References to pages that neither of the caches accounts for, when no sequence is left."""
    texts = sum(cache.num_pages for cache in engine.scheduler.text_caches)
    return int(engine.pool.refs.sum()) - engine.tree.num_pages - engine.approximate.num_pages - texts
