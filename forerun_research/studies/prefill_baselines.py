"""What else could be done for the same time: drafted K/V beside the draft's own answer, and beside the target run
cheaper over the whole prompt.

`draft alone`: the draft model in place of the target. `float8`: all layers of the target with their MLPs in float8,
where the device can (elsewhere exact prefill). `window N`: the target sees N entries back in all layers while it reads
(sparse prefill). The prompt's last tokens are always run exactly. Maps without repair and token dropping are settings
(`share: 0`, `source: drop`). Seconds are those of the prompt alone.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from forerun.models.decoder import Decoder
from forerun.models.execution.float8_mlp import float8_decoder
from forerun.models.execution.runner import Runner, Span
from forerun.prefill.recompute import RaggedDepthPass, Rows
from forerun_research.studies.prefill_agreement import Agreement
from forerun_research.studies.prefill_measure import Found, Record, StudyCase
from forerun_research.studies.prefill_score import TAIL_TOKENS, PromptPages, prefiller_of
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.study import EXACT, Setting

DRAFT, FLOAT8 = "draft alone", "float8"


@dataclass(frozen=True)
class Baselines(Agreement):
    name: ClassVar[str] = "baselines"

    prompts: int = 48
    texts: tuple[str, ...] = ("stdlib", "essays", "tables", "gsm8k_test_half.jsonl")
    windows: tuple[int, ...] = (256, 1024)

    def conditions(self, settings: Sequence[Setting], layers: int) -> list[str]:
        return [*super().conditions(settings, layers), DRAFT, FLOAT8, *(f"window {size}" for size in self.windows)]

    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        yield from super().run(subject, case, settings, [name for name in wanted if name not in self._own], done)
        follow: list[int] = case.more["follow"]
        mine = [name for name in self._own if name in wanted]
        if not mine:
            return
        with subject.scorer.hold(case.ids, None, len(follow)) as held:
            reference = held.logits(follow)
        for name in mine:
            logits, seconds, cost = self._made(subject, name, case.ids, follow)
            yield name, self._record(case, seconds, None, reference, logits) | {"cost": cost}

    @cached_property
    def _own(self) -> list[str]:
        return [name for name in self.conditions((), 0) if name != EXACT]

    def _made(self, subject: StudySubject, name: str, ids: list[int], follow: list[int]) -> tuple[Tensor, float, float]:
        """Logits of a continuation, the seconds of the prompt and its work as a share of exact prefill's."""
        runner = subject.engine.runner
        if name == DRAFT:
            draft = prefiller_of(subject.engine)._ctx.draft_runner
            assert draft is not None
            share = draft.decoder.config.macs / runner.decoder.config.macs
            with pages_for(runner, len(ids) + len(follow)) as pages:
                span = Span(ids + follow[:-1], 0, pages, range(len(ids) - 1, len(ids) + len(follow) - 1))
                logits, seconds = timed(lambda: draft.forward([span]).logits.clone())
            return logits, seconds, share
        decoder = runner.decoder
        if name == FLOAT8:
            reader = float8_decoder(decoder, decoder.config.num_layers)
        else:
            reader = replace(decoder, attention=decoder.attention.narrowed(int(name.split()[1]), 0))
        with pages_for(runner, len(ids) + len(follow)) as pages:
            held = PromptPages(subject.engine, ids, pages, max(0, len(ids) - TAIL_TOKENS))
            _, seconds = timed(lambda: read_with(runner, reader, held))
            return held.logits(follow), seconds, 1.0


def read_with(runner: Runner, reader: Decoder, held: PromptPages) -> None:
    """The prompt without its last tokens through all layers of another decoder on the same K/V."""
    depths = np.full(held.end, reader.config.num_layers)
    rows = Rows(np.array(held.ids[: held.end]), np.arange(held.end), held.pages, depths)
    RaggedDepthPass(runner, reader).run(rows)


@contextmanager
def pages_for(runner: Runner, tokens: int) -> Iterator[array[int]]:
    pages = array("i", runner.pool.allocate(runner.pool.pages_for(tokens)))
    try:
        yield pages
    finally:
        runner.pool.release(pages)


def timed(work: Callable[[], Tensor | None]) -> tuple[Tensor, float]:
    """What it gives, and seconds until the device has done it."""
    start = time.perf_counter()
    found = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return torch.empty(0) if found is None else found, time.perf_counter() - start
