"""Scores of prefill below the level of answers: a prompt's K/V on pages of its own, and the logits that follow from it.

`Scorer.hold` prefills a prompt, exactly or as a setting says, all but its tail; `Held.logits` then runs the tail and a
given continuation in one forward. Held K/V can be looked at, overwritten and scored again: what `layers` and `signals`
do. Works between an engine's steps, directly on its runner and prefiller, and leaves nothing in its caches.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core import PrefillReport
from forerun.engine.engine import Engine
from forerun.errors import BadProfile, BadRequest, OutOfPages
from forerun.models.decoder import Watch
from forerun.models.execution.runner import Span
from forerun.prefill.forecast import MAX_SHOWN, PrefillForecast
from forerun.prefill.prefiller import Prefiller
from forerun.prefill.sources import KVSource
from forerun.prefill.state import PrefillStage, PrefillState
from forerun_research.studies.study import Setting

ROWS_AT_ONCE = 128  # distributions compared at once: bounds the temporaries
TAIL_TOKENS = 64  # last tokens of a prompt, which the target always runs itself
_ids = itertools.count(1 << 40)  # far from those of sequences


class EveryPromptPays(PrefillForecast):
    """Studies ask what drafts are worth, whatever they cost on this machine."""

    def why_exact(self, source: str, tokens: int, cost: float) -> str:
        return ""

    def why_not_provisional(self, source: str, top1: float) -> str:
        return ""

    def max_shown(self, source: str, top1: float) -> int:
        return MAX_SHOWN


@dataclass
class PromptPages:
    """A prompt whose entries before `end` have K/V; from there on it is run again with every score."""

    engine: Engine
    ids: list[int]
    pages: array[int]
    end: int
    report: PrefillReport | None = None  # None: exact prefill
    seconds: float = 0.0  # without the tail
    slots: Tensor = field(init=False)  # [end] int64

    def __post_init__(self) -> None:
        self.slots = torch.tensor(Span(self.ids[: self.end], 0, self.pages, ()).slots(self.engine.pool.page_size))
        self.slots = self.slots.to(self.engine.decoder.device)

    def logits(self, follow: list[int], watch: Watch | None = None) -> Tensor:
        """Logits [len(follow), V] float32 for each token of a continuation, given the prompt and those before it.
        `watch` sees the tail and all of the continuation but its last token."""
        ids = self.ids[self.end :] + follow[:-1]
        first = len(self.ids) - self.end - 1
        span = Span(ids, self.end, self.pages, range(first, len(ids)))
        return self.engine.runner.forward([span], watch=watch).logits.clone()

    def score(self, ids: list[int], first: int) -> Tensor:
        """Logits [len(ids), V] of tokens that run at entries from `first` on."""
        return self.engine.runner.forward([Span(ids, first, self.pages, range(len(ids)))]).logits.clone()

    def run(self, ids: list[int], first: int) -> None:
        """Compute K/V of these tokens from entry `first` on, from whatever lies before it."""
        run(self.engine, self.pages, ids, first)

    def entry(self, layer: int, part: int) -> Tensor:
        """K (part 0, rotated) or V (part 1) of a layer, [end, Hkv, D]: a copy."""
        return self.engine.runner.kv[layer][part].index_select(0, self.slots)

    def replace(self, layer: int, part: int, values: Tensor, entries: slice = slice(None)) -> None:
        self.engine.runner.kv[layer][part].index_copy_(0, self.slots[entries], values[entries])


def run(engine: Engine, pages: array[int], ids: list[int], first: int) -> None:
    chunk = engine.config.max_num_batched_tokens
    for lo in range(0, len(ids), chunk):
        engine.runner.forward([Span(ids[lo : lo + chunk], first + lo, pages, ())])


class PromptScorer:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @contextmanager
    def hold(
        self, ids: list[int], setting: Setting | None = None, room: int = 0, repair: bool = True, keep: bool = False
    ) -> Iterator[PromptPages]:
        """Prefill a prompt; None: exactly. `room`: tokens that will follow it. Without `repair` the source's K/V stays
        as it was read. `keep`: leave what earlier requests left behind, for sources that live on it."""
        engine, pool = self.engine, self.engine.pool
        if not keep:
            engine.clear_cache()
        count = pool.pages_for(len(ids) + room)
        if count > pool.free:
            raise OutOfPages(
                f"{len(ids)} tokens and {room} to follow need {count} pages, {pool.free} are free",
                "shorten the prompts of the study, or raise kv_cache_tokens",
            )
        pages = array("i", pool.allocate(count))
        try:
            yield self._exact(ids, pages) if setting is None else self._drafted(ids, pages, setting, repair)
        finally:
            pool.release(pages)

    def _exact(self, ids: list[int], pages: array[int]) -> PromptPages:
        held = PromptPages(self.engine, ids, pages, max(0, len(ids) - TAIL_TOKENS))
        start = time.perf_counter()
        held.run(ids[: held.end], 0)
        self._wait()
        held.seconds = time.perf_counter() - start
        return held

    def _drafted(self, ids: list[int], pages: array[int], setting: Setting, repair: bool) -> PromptPages:
        start = time.perf_counter()
        with self.reading(ids, pages, setting if repair else replace(setting, share=0.0)) as state:
            prefiller, chunk = prefiller_of(self.engine), self.engine.config.max_num_batched_tokens
            if repair:
                while not state.finished:
                    prefiller.advance(state, chunk)
            else:
                read_all(prefiller.source(setting.prefill), state, chunk)
        held = PromptPages(self.engine, ids, pages, state.end, state.report)
        if state.stage is PrefillStage.EXACT:
            held.run(ids[: held.end], 0)
        self._wait()
        held.seconds = time.perf_counter() - start
        return held

    @contextmanager
    def reading(self, ids: list[int], pages: array[int], setting: Setting) -> Iterator[PrefillState]:
        """A prompt that is about to be drafted."""
        prefiller = prefiller_of(self.engine)
        problem = prefiller.problem(setting.prefill, len(ids))
        if problem is not None:
            raise problem
        with adjusted(self.engine, setting):
            state = prefiller.open(
                PrefillState(next(_ids), ids, pages, 0, len(ids), setting.prefill, len(self.engine.pool.kv))
            )
            try:
                yield state
            finally:
                prefiller.close(state)

    def _wait(self) -> None:
        if self.engine.decoder.device.type == "cuda":
            torch.cuda.synchronize()


def prefiller_of(engine: Engine) -> Prefiller:
    prefiller = engine.speculative_prefill.prefiller
    if prefiller is None:
        raise BadProfile(
            "the study's settings need a profile, and it names none", "give it a `profile`, or --prefill-profile"
        )
    return prefiller


def read_all(source: KVSource, state: PrefillState, chunk: int) -> None:
    """Let the source read the whole prompt; nothing is planned or repaired."""
    if state.stage is PrefillStage.EXACT:
        raise BadRequest(f"this prompt is never drafted: {state.report.fell_back}", "use longer prompts")
    while state.read < state.read_end:
        source.read(state, min(chunk, state.read_end - state.read))


@contextmanager
def adjusted(engine: Engine, setting: Setting) -> Iterator[None]:
    """For as long as it lasts: the profile suggests the setting's own share, failed checks deepen as it says, and no
    prompt is turned away for its text or its length's cost."""
    prefiller = prefiller_of(engine)
    profile, policy = prefiller.profile_of(setting.prefill.source), prefiller.policy
    share, damage, texts, forecast = profile.share, profile.damage, profile.texts, prefiller.forecast
    gate = profile.gate
    try:
        profile.texts, prefiller.forecast = None, EveryPromptPays()
        profile.share = share if setting.share is None else setting.share
        if not setting.deepen:
            prefiller.policy, profile.damage, profile.gate = replace(policy, deepenings=0), None, None
        yield
    finally:
        profile.share, profile.damage, prefiller.policy = share, damage, policy
        profile.texts, prefiller.forecast, profile.gate = texts, forecast, gate


def divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || other) of every row in nats: [N, V] each -> [N]."""
    found = []
    for ours, theirs in zip(logits.split(ROWS_AT_ONCE), reference.split(ROWS_AT_ONCE), strict=True):
        p, q = F.log_softmax(theirs.float(), -1), F.log_softmax(ours.float(), -1)
        found.append((p.exp() * (p - q)).sum(-1).clamp_min(0.0))
    return torch.cat(found)


def agreement(reference: Tensor, logits: Tensor) -> Tensor:
    """Whether both would choose the same token: [N, V] each -> [N] bool."""
    return reference.argmax(-1) == logits.argmax(-1)


def figures(report: PrefillReport | None, seconds: float) -> dict[str, object]:
    """What a prefill cost, for a record of results."""
    if report is None:
        return {"cost": 1.0, "seconds": round(seconds, 4)}
    names = ["cost", "exact", "drafted", "accepted", "recomputed", "token_layers", "rounds", "fell_back", "source"]
    names += ["predicted_kl", "kl_bound", "covered", "uncovered", "drift", "read_s", "recompute_s", "check_s"]
    found: dict[str, object] = {name: getattr(report, name) for name in names}
    return found | {"seconds": round(seconds, 4)}
