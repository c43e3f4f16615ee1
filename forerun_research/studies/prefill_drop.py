"""Token dropping (the published SpecPrefill) as a setting of studies: the baseline that drafted K/V is to beat.

The draft model reads the prompt and says by its attention which share of the tokens is kept; the target runs those
alone. Only for measuring: the engine does not offer it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from forerun.core import PrefillReport
from forerun.errors import BadRequest
from forerun.prefill.choosers import select
from forerun_research.studies.prefill_score import PromptPages, PromptScorer, prefiller_of, read_all
from forerun_research.studies.study import Setting
from forerun_research.studies.token_drop import SINK_TOKENS, TokenDropRun, drop_tokens

DROP = "drop"


@dataclass
class Dropped:
    """A prompt of which only the kept tokens were run; `logits` and `greedy` go on from there, once."""

    run: TokenDropRun
    first: Tensor  # [V] logits of the answer's first token
    report: PrefillReport
    seconds: float

    def logits(self, follow: list[int]) -> Tensor:
        """Logits [len(follow), V] for each token of a continuation."""
        rest = [self.run.score(follow[:-1])] if len(follow) > 1 else []
        return torch.cat([self.first[None], *rest])

    def greedy(self, tokens: int, stop: list[int]) -> list[int]:
        return self.run.greedy(self.first, tokens, stop)


@contextmanager
def holding(
    scorer: PromptScorer, ids: list[int], setting: Setting | None, room: int
) -> Iterator[PromptPages | Dropped]:
    """A prompt under any setting, to be scored once."""
    if setting is not None and setting.prefill.source == DROP:
        with dropping(scorer, ids, setting, room) as dropped:
            yield dropped
    else:
        with scorer.hold(ids, setting, room) as held:
            yield held


@contextmanager
def dropping(scorer: PromptScorer, ids: list[int], setting: Setting, room: int) -> Iterator[Dropped]:
    """`setting.share` of the tokens before the tail is kept."""
    if setting.share is None:
        raise BadRequest(
            f"setting {setting.name!r} drops tokens and has no share", "say which share is kept: share: 0.2"
        )
    engine = scorer.engine
    engine.clear_cache()
    start = time.perf_counter()
    scores, tail, cost = _scores(scorer, ids, setting)
    candidates = np.arange(SINK_TOKENS, len(ids) - tail)
    kept = drop_tokens(ids, select(scores, candidates, round(setting.share * len(candidates))), tail)
    with TokenDropRun(engine.runner, kept, room) as run:
        first = run.prefill().clone()
        seconds = time.perf_counter() - start
        layers = engine.decoder.config.num_layers
        share = cost / len(ids) + len(kept) / len(ids)
        report = PrefillReport(len(ids), layers, DROP, "draft", cost=share, token_layers=len(kept) * layers)
        report.recomputed = len(kept)
        yield Dropped(run, first, report, seconds)


def _scores(scorer: PromptScorer, ids: list[int], setting: Setting) -> tuple[np.ndarray, int, float]:
    """What the draft's attention says of each token, the tail's length, and the work it took, in target tokens.

    The maps run, too, since the draft source reads for them; they are cheap, and counted.
    """
    engine = scorer.engine
    reading = replace(setting, prefill=replace(setting.prefill, source="draft", chooser="draft"), share=0.0)
    pages = array("i", engine.pool.allocate(engine.pool.pages_for(len(ids))))
    try:
        with scorer.reading(ids, pages, reading) as state:
            source = prefiller_of(engine).source(reading.prefill)
            read_all(source, state, engine.config.max_num_batched_tokens)
            scores = source.scores(state)
    finally:
        engine.pool.release(pages)
    assert scores is not None  # all was read
    return scores, len(ids) - state.end, source.cost(len(ids))
