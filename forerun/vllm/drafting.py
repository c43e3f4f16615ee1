"""Drafts prompts in a worker of vLLM, piece by piece between its steps, into the blocks that it allocated for them.

`PromptDrafter` opens what a profile needs around vLLM's loaded model and moves one `PrefillState` after the other
through the `Prefiller`. What comes out is K/V in vLLM's cache, or a report why vLLM has to compute the prompt itself.
Knows neither vLLM's scheduler nor the connector.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import psutil
import torch

from forerun.cache.pool import PagePool
from forerun.core import PrefillReport
from forerun.decode.draft_context import DraftContext, DraftModel
from forerun.errors import ForerunError, UnsupportedModel
from forerun.loading import ModelLoader, opened
from forerun.models.decoder import Decoder
from forerun.models.execution.runner import Runner
from forerun.models.formats.checkpoint import Checkpoint
from forerun.params import Prefill
from forerun.prefill.open_profile import draft_for_profile, open_profile, read_profile
from forerun.prefill.prefiller import Prefiller
from forerun.prefill.profile import chunk_profile
from forerun.prefill.recompute import RaggedDepthPass, Rows
from forerun.prefill.state import PrefillStage, PrefillState
from forerun.vllm.attention import PromptBlocks, VllmAttention
from forerun.vllm.models import loaded_model
from forerun.vllm.settings import PluginSettings, staging_pages
from forerun.vllm.target import decoder_of

log = logging.getLogger("forerun")

STAGING_PAGE_SIZE = 16  # entries
HIDDEN_FIELDS = ("scores", "spans", "depth_runs")  # of a report: too long for an answer's label


@dataclass
class PromptToDraft:
    """A prompt whose blocks are allocated, as it travels from the scheduler to the worker."""

    request_id: str
    tokens: list[int]
    blocks: list[int]  # of vLLM's cache, for the entries before `end`
    end: int
    settings: Prefill


@dataclass
class DraftResults:
    """What has become of prompts since the last step."""

    done: dict[str, dict[str, Any]] = field(default_factory=dict)  # request -> its label
    failed: dict[str, dict[str, Any]] = field(default_factory=dict)  # those vLLM has to compute


def label_of(report: PrefillReport) -> dict[str, Any]:
    """What an answer says about its prompt."""
    label = {name: value for name, value in asdict(report).items() if name not in HIDDEN_FIELDS}
    label["checks"] = {"passed": sum(s["passed"] for s in report.spans), "spans": len(report.spans)}
    return {"approximate": not report.fell_back and report.accepted > 0} | label


def _staging_pages(
    settings: PluginSettings, checkpoint: Checkpoint, context: int, dtype: torch.dtype, device: torch.device
) -> int:
    page_bytes = PagePool.page_bytes(checkpoint.config, STAGING_PAGE_SIZE, dtype)
    # Of a GPU the allocation itself says what there is and what was asked
    free = psutil.virtual_memory().available if device.type == "cpu" else sys.maxsize
    return staging_pages(settings.staging_tokens, context, STAGING_PAGE_SIZE, page_bytes, free)


class PromptDrafter:
    """`config`: a VllmConfig; `spec`: of the one group of layers that have K/V."""

    def __init__(self, config: Any, spec: Any, settings: PluginSettings) -> None:
        name, self._settings = config.model_config.model, settings
        model = loaded_model(name)
        if model is None:
            raise UnsupportedModel(
                f"{name} was loaded by a class that forerun.vllm does not know",
                "allow the plugin: VLLM_PLUGINS unset, or with forerun in it",
            )
        checkpoint, context = opened(name), config.model_config.max_model_len
        draft = None if settings.draft_model is None else opened(settings.draft_model)
        if draft is not None and settings.profile is not None:
            draft = draft_for_profile(read_profile(settings.profile), draft)
        profile = open_profile(settings.profile, checkpoint, draft)
        modules = [layer.self_attn for layer in model.model.layers]
        device, dtype = modules[0].attn.kv_cache.device, config.model_config.dtype
        pages = _staging_pages(settings, checkpoint, context, dtype, device)
        self._pool = PagePool(checkpoint.config, pages, STAGING_PAGE_SIZE, dtype, device)
        builder_cls = modules[0].attn.get_attn_backend().get_builder_cls()
        builder = builder_cls(spec, [module.attn.layer_name for module in modules], config, device)
        self._attention = VllmAttention(checkpoint.config, self._pool, context, modules, builder)
        self._block_size, self._step_tokens = spec.block_size, config.scheduler_config.max_num_batched_tokens
        decoder = decoder_of(model, checkpoint.config, self._attention, dtype)
        runner = Runner(decoder, self._pool, context, plain=True)
        loaded = None if draft is None else self._load_draft(draft, checkpoint, decoder, context)
        ctx = DraftContext.build(self._pool, runner, None, context, loaded)
        self._prefiller = Prefiller(ctx, profile or chunk_profile(), settings.policy)
        self._pass = RaggedDepthPass(runner)
        self._index = self._prefiller.source(Prefill("speculative", source="chunk")).text_index
        self._waiting: list[PromptToDraft] = []
        self._drafting: dict[str, PromptBlocks] = {}  # the first one is next
        self._opened = 0  # prompts so far
        self._results = DraftResults()

    def _load_draft(self, draft: Checkpoint, target: Checkpoint, decoder: Decoder, context: int) -> DraftModel:
        loader = ModelLoader(decoder.device, self._settings.draft_weights, quiet=True, batch_invariant=None)
        return loader.draft(draft, decoder, target.tokenizer(), context)

    def add(self, prompts: Sequence[PromptToDraft]) -> None:
        self._waiting += prompts

    def drop(self, request_id: str) -> bool:
        """The request has ended; whether it was being drafted."""
        before = len(self._waiting)
        self._waiting = [prompt for prompt in self._waiting if prompt.request_id != request_id]
        if request_id in self._drafting:
            self._close(request_id)
            return True
        return len(self._waiting) < before

    def results(self) -> DraftResults:
        """Since the last call."""
        found, self._results = self._results, DraftResults()
        return found

    @torch.inference_mode()
    def step(self, alone: bool = False) -> None:
        """One piece of one prompt; prompts take turns. `alone`: this step of vLLM computes nothing else, so that pieces
        follow each other until a prompt is done, or as much is done as vLLM itself would put into a step: its processes
        look for each other's messages for a second after each, on cores that drafting could use."""
        left = self._step_tokens if alone else 1
        while left > 0 and not (self._results.done or self._results.failed):
            self._open_waiting()
            if not self._drafting:
                return
            left -= self._run_piece()

    def _run_piece(self) -> int:
        """Of the prompt that is next; how much work it was, in tokens of the target's prefill."""
        request_id, prompt = next(iter(self._drafting.items()))
        self._drafting[request_id] = self._drafting.pop(request_id)
        state, self._attention.prompt = prompt.state, prompt
        spent = 1
        try:
            if prompt.computed is not None:
                spent = self._compute(prompt, prompt.computed)
            elif not state.finished:
                spent = self._prefiller.advance(state, self._settings.piece_tokens)
                self._begin_exact(prompt)
            if state.stage is PrefillStage.DONE:
                self._attention.sync(prompt.end)
        except Exception as error:  # ends this prompt's drafting alone
            log.exception("drafting a prompt failed")
            state.fall_back(f"{type(error).__name__}: {error}")
        finally:
            self._attention.prompt = None
        if state.finished and prompt.computed is None:
            self._finish(request_id, state)
        return spent

    def _begin_exact(self, prompt: PromptBlocks) -> None:
        """Whole prompts that chunks may later be taken from are computed here: vLLM's cache cannot be read back."""
        settings = prompt.state.settings
        if settings.exact or (settings.source == "chunk" and prompt.state.stage is PrefillStage.EXACT):
            prompt.computed = 0

    def _compute(self, prompt: PromptBlocks, first: int) -> int:
        """The next entries through all layers, and how many they were; the tail is vLLM's."""
        state, end = prompt.state, min(first + self._settings.piece_tokens, prompt.end)
        depths = np.full(end - first, state.layers)
        self._pass.run(Rows(state.ids[first:end], np.arange(first, end), state.pages, depths))
        prompt.computed = end
        if end == prompt.end:
            prompt.computed, prompt.synced = None, end
            if state.settings.exact:
                state.fall_back("")
            state.stage = PrefillStage.DONE
            if self._index is not None:
                self._index.remember(state.tokens[:end], state.pages)
        return end - first

    def _finish(self, request_id: str, state: PrefillState) -> None:
        found = self._results.done if state.stage is PrefillStage.DONE else self._results.failed
        found[request_id] = label_of(state.report)
        self._close(request_id)

    def _close(self, request_id: str) -> None:
        state = self._drafting.pop(request_id).state
        self._prefiller.close(state)
        self._pool.release(state.pages)

    def _open_waiting(self) -> None:
        """In their order, as staging pages allow; chunks of earlier prompts give theirs up."""
        while self._waiting:
            needed = self._pool.pages_for(len(self._waiting[0].tokens))
            if self._index is not None and needed <= self._pool.num_pages:
                self._index.release(needed - self._pool.free)
            if self._pool.free < needed <= self._pool.num_pages:
                return
            prompt = self._waiting.pop(0)
            if needed > self._pool.num_pages:
                staged = self._pool.num_pages * STAGING_PAGE_SIZE
                why = f"{len(prompt.tokens)} tokens are more than staging_tokens, which is {staged}"
                self._results.failed[prompt.request_id] = {"approximate": False, "fell_back": why}
                continue
            pages = array("i", self._pool.allocate(needed))
            self._opened += 1
            state = PrefillState(
                *(self._opened, prompt.tokens, pages, 0, len(prompt.tokens), prompt.settings, len(self._pool.kv))
            )
            blocks = PromptBlocks(state, np.array(prompt.blocks, dtype=np.int32), self._block_size, prompt.end)
            self._drafting[prompt.request_id] = blocks
            if not prompt.settings.exact:
                self._open(blocks)
            self._begin_exact(blocks)

    def _open(self, prompt: PromptBlocks) -> None:
        state = prompt.state
        try:
            self._prefiller.open(state)
        except ForerunError as error:
            state.fall_back(str(error))
        if state.opened:
            prompt.base = state.source.base
