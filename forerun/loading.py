"""Opens models for `LLM`: checkpoint, tokenizer, decoder, draft model, costs of forwards, engine; times each stage.

Knows what is kept on disk between starts, not what the engine does with any of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from forerun import data
from forerun.cache.tiers import TierConfig, Tiers
from forerun.core.usage import LoadReport
from forerun.decode.control.cost_cache import CostCache
from forerun.decode.draft_context import DraftModel
from forerun.engine.config import EngineConfig, size_kv_cache
from forerun.engine.engine import Engine
from forerun.errors import BadRequest
from forerun.models.build import MIN_KEPT_BYTES, build_decoder, checkpoint_bytes
from forerun.models.cpu.importance import WeightGoal, WeightPlan
from forerun.models.cpu.library import build_key, cpu_kind
from forerun.models.decoder import Decoder
from forerun.models.fetch.store import resolve
from forerun.models.formats.adapter import open_draft
from forerun.models.formats.checkpoint import Checkpoint, open_checkpoint
from forerun.models.formats.fingerprint import fingerprint, sampled_fingerprint
from forerun.models.formats.hidden_drafter import HiddenDrafterWeights
from forerun.models.hidden_draft import HiddenDraftModel, build_hidden_draft
from forerun.models.linear import Precision
from forerun.options import check_number
from forerun.prefill.open_profile import draft_for_profile, open_profile, prefiller_factory, read_profile
from forerun.prefill.profile import Profile
from forerun.text.tokenizer import NoTokenizer, Tokenizer

log = logging.getLogger("forerun")

IMPORTANCE_PROMPTS, IMPORTANCE_TOKENS = 12, 24  # of shipped prompts that the importance of layers is measured on


def opened(model: str | Path | Checkpoint) -> Checkpoint:
    if isinstance(model, (str, Path)):
        return open_checkpoint(resolve(str(model)))
    if not hasattr(model, "tokenizer"):
        hint = "give a name, a path or a hub id"
        raise BadRequest(f"a model cannot be a {type(model).__name__}: {model!r:.80}", hint)
    return model


def checked_model_len(asked: int | None, limit: int) -> int:
    """`max_model_len`, or all that the model allows."""
    if asked is None:
        return limit
    hint = f"leave it out for {limit}, all that the model was trained for, or choose a smaller value"
    check_number("max_model_len", asked, 2, limit, whole=True, hint=hint)
    return asked


@dataclass
class OpenedModels:
    """A target, what drafts for it (a draft model, or a drafter on its hidden states), and their profile."""

    checkpoint: Checkpoint
    context: int  # longest prompt and answer together
    tokenizer: Tokenizer
    decoder: Decoder
    precision: Precision
    drafting: Checkpoint | None
    draft: DraftModel | None
    hidden: HiddenDrafterWeights | None
    reader: HiddenDraftModel | None
    profile: Profile | None
    remote: str | None  # where drafts of another machine come from

    @property
    def checkpoints(self) -> list[Checkpoint]:
        return [self.checkpoint] if self.drafting is None else [self.checkpoint, self.drafting]

    def size_kv_cache(self, asked: int | None, gpu_memory_utilization: float | None) -> int:
        """Tokens of the pool: as many as asked for, or by memory."""
        decoders = [self.decoder] if self.draft is None else [self.decoder, self.draft.decoder]
        beside = [] if self.reader is None else self.reader.on_pages
        return size_kv_cache(decoders, self.context, asked, gpu_memory_utilization, beside=beside)


@dataclass(eq=False)
class ModelLoader:
    """One start: what is opened, with the same settings, and what that took."""

    device: torch.device
    weights: str
    quiet: bool
    batch_invariant: bool | None
    goal: WeightGoal | None = None  # what the bits of the target's layers are chosen for
    skip_tokenizer: bool = False
    is_draft: bool = False  # the model's own answers are not wanted, only its guesses for targets elsewhere

    def __post_init__(self) -> None:
        self.report, self._start = LoadReport(time.time()), time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.report.stages[name] = self.report.stages.get(name, 0.0) + time.perf_counter() - start

    def open(
        self,
        model: str | Path | Checkpoint,
        draft_model: str | Path | Checkpoint | HiddenDrafterWeights | None,
        prefill_profile: str | Path | Profile | None,
        max_model_len: int | None,
        adapt: bool,
    ) -> OpenedModels:
        """The models of an `LLM`; the arguments are its own."""
        checkpoint = opened(model)
        by_name = draft_model is not None or isinstance(model, (str, Path))  # an opened checkpoint stays alone
        remote = draft_model if isinstance(draft_model, str) and draft_model.startswith("remote:") else None
        named = None if prefill_profile is None else read_profile(prefill_profile)
        found = open_draft(None if remote else draft_model, checkpoint, search=by_name and remote is None)
        hidden = found if isinstance(found, HiddenDrafterWeights) else None
        drafting = None if found is None or isinstance(found, HiddenDrafterWeights) else opened(found)
        if named is not None and drafting is not None and not str(draft_model).endswith(".safetensors"):
            drafting = draft_for_profile(named, drafting)
        if adapt and hidden is None:
            hint = "give one as draft_model (forerun train drafter --kind block), or leave adapt out"
            raise BadRequest("adapt is for a drafter on the target's hidden states, and there is none", hint)
        context = checked_model_len(max_model_len, checkpoint.config.max_context)
        tokenizer = self._tokenizer(checkpoint)
        plan = self._plan(checkpoint, tokenizer)
        decoder, precision = self._decoder(checkpoint, context, self.is_draft, plan)
        draft = None if drafting is None else self.draft(drafting, decoder, tokenizer, context)
        reader = None
        if hidden is not None:
            with self.stage("weights"):
                reader = build_hidden_draft(hidden, checkpoint, decoder, context, adapt)
        profile = open_profile(named, checkpoint, drafting)
        target = (checkpoint, context, tokenizer, decoder, precision)
        return OpenedModels(*target, drafting, draft, hidden, reader, profile, remote)

    def draft(self, checkpoint: Checkpoint, target: Decoder, tokenizer: Tokenizer, context: int) -> DraftModel:
        """A draft model for that target."""
        own = self._tokenizer(checkpoint)
        decoder, _ = self._decoder(checkpoint, min(context, checkpoint.config.max_context), is_draft=True)
        if decoder.weight_bytes > target.weight_bytes:
            raise BadRequest(
                f"the draft {checkpoint.source} has {decoder.weight_bytes / 1e6:,.0f} MB of weights, its target "
                f"{target.weight_bytes / 1e6:,.0f} MB",
                "a draft must be cheaper than its target: swap them, or leave draft_model out",
            )
        parallel = (getattr(checkpoint, "parallel", None), getattr(checkpoint, "markov", None))
        known = None if isinstance(own, NoTokenizer) else own
        return DraftModel(decoder, known, tokenizer is None or tokenizer.same_tokens(own), checkpoint.source, *parallel)

    def _tokenizer(self, checkpoint: Checkpoint) -> Tokenizer:
        if self.skip_tokenizer:
            return NoTokenizer(checkpoint.source, checkpoint.config.eos_ids)
        with self.stage("tokenizer"):
            return checkpoint.tokenizer()

    def _plan(self, checkpoint: Checkpoint, tokenizer: Tokenizer) -> WeightPlan | None:
        if self.goal is None:
            return None
        from forerun.models.cpu.planning import plan_weights

        def prompts() -> list[list[int]]:
            """Spread over all kinds; other texts than those that `forerun models info --quality` measures on."""
            texts = [prompt.text for prompt in data.read_prompts()]
            chosen = texts[:: len(texts) // IMPORTANCE_PROMPTS][:IMPORTANCE_PROMPTS]
            return [tokenizer.encode(text, add_special=True)[:IMPORTANCE_TOKENS] for text in chosen]

        with self.stage("bits"):
            plan = plan_weights(checkpoint, self.goal, prompts, self.quiet)
        self.report.bits = plan.summary
        log.info("%s: %s", checkpoint.source, plan.summary)
        return plan

    def _decoder(
        self, checkpoint: Checkpoint, context: int, is_draft: bool = False, plan: WeightPlan | None = None
    ) -> tuple[Decoder, Precision]:
        with self.stage("weights"):
            how = (self.device, self.weights, context, self.quiet, is_draft, self.batch_invariant)
            decoder, precision = build_decoder(checkpoint, *how, report=self.report, plan=plan)
        if plan is not None and plan.streamed:
            from forerun.models.cpu.planning import warn_streamed

            warn_streamed(decoder, plan, checkpoint.source)
        return decoder, precision

    def engine(self, opened: OpenedModels, config: EngineConfig, tiers: TierConfig) -> tuple[Engine, CostCache | None]:
        """The engine of what was opened, with the costs that an earlier start measured, and where they are kept. The
        last stage."""
        precision = opened.precision
        # of all weights: names the K/V on disk
        identity = f"{fingerprint(opened.checkpoint, self.quiet) if tiers.outlives else ''} {precision.identity}"
        if precision.name in ("int8", "file", "mixed") and self.batch_invariant is False:
            identity += " loose"  # bits depend on the batch: an engine that promises others must not read them
        keep = (lambda pool: Tiers(pool, tiers, identity)) if tiers.any else None
        costs = self._costs(opened, config.capacity)
        known = None if costs is None else costs.load()
        with self.stage("costs"):
            text, draft = None if self.skip_tokenizer else opened.tokenizer, opened.draft or opened.reader
            prefiller = prefiller_factory(opened.profile)
            engine = Engine(opened.decoder, text, config, draft, known, prefiller, keep, self.quiet)
        if costs is not None:
            if known is None:
                costs.store(engine.speculator.controller)
            costs.load_learnt(engine.speculator.controller)
        if opened.remote is not None:
            engine.speculator.draft_remotely(opened.remote)
        self.report.total_s, self.report.costs_read = time.perf_counter() - self._start, known is not None
        return engine, costs

    def _costs(self, opened: OpenedModels, context: int) -> CostCache | None:
        """Where the costs of these models' forwards and what was accepted are kept; None for tiny models."""
        models, precision, reader = opened.checkpoints, opened.precision, opened.reader
        files = [file for checkpoint in models for file in checkpoint.files]
        if min(map(checkpoint_bytes, models)) < MIN_KEPT_BYTES:
            return None
        identity = f"{precision.identity} of a draft model" if self.is_draft else precision.identity
        settings = (identity, self.weights, self.batch_invariant, torch.get_num_threads(), torch.__version__)
        with self.stage("costs"):
            whole = precision.name in ("int8", "file", "mixed")  # then it is known: packed weights have its name
            weights = [fingerprint(c, self.quiet) if whole else sampled_fingerprint(c) for c in models]
        if reader is not None:
            weights.append(reader.identity)
        key = [*weights, *map(str, settings), str(min(context, 1024)), cpu_kind(), build_key()]
        return CostCache(key, files, timed=self.device.type == "cpu", accepts_by=len(weights) + 1)
