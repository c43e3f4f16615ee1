"""The public face: `LLM` turns prompts and messages into answers.

It translates between text and the engine's tokens. `loading` opens models, the engine computes answers, the driver
steps it; none of these is here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import psutil
import torch

from forerun import inputs
from forerun.cache.prefix import TreeSummary, summarise_tree
from forerun.cache.tiers import TierConfig
from forerun.core import SamplingParams
from forerun.engine.config import EngineConfig
from forerun.engine.intake import check_token_ids
from forerun.engine.sequence import Event, Request
from forerun.engine.stats import Stats
from forerun.errors import BadRequest
from forerun.inputs import Asked, Messages, OneOrMore, Prompt
from forerun.loading import ModelLoader, OpenedModels
from forerun.models.build import choose_device
from forerun.models.cpu.block_linear import pool_stats
from forerun.models.fetch.store import DEFAULT_MODEL
from forerun.models.formats.checkpoint import Checkpoint
from forerun.models.formats.fingerprint import sampled_fingerprint
from forerun.models.formats.hidden_drafter import HiddenDrafterWeights
from forerun.outputs import Choice, Completion, acomplete, complete
from forerun.params import SamplingOptions
from forerun.prefill.profile import Profile
from forerun.renamed import LLM_ARGUMENTS, OldLLMNames, accepts_old_arguments
from forerun.runtime.driver import Driver
from forerun.runtime.threads import choose_threads

if TYPE_CHECKING:
    from forerun.recipes.edit import Edited, EditMode, EditPiece
    from forerun.sharing.branching import BranchOn
    from forerun.sharing.rollout_config import Score
    from forerun.sharing.session import Session
    from forerun.sharing.session_registry import SessionRegistry
    from forerun.sharing.top_items import TopItems, Trie
    from forerun.sharing.tree import RolloutTree

__all__ = ["DEFAULT_MODEL", "LLM", "Choice", "Completion", "Messages", "Prompt"]

STEP_TOKENS = {"cpu": 512, "cuda": 16384}  # of one step: enough to keep the device busy, few enough for others to go on


class LLM(OldLLMNames):
    """A model ready to answer.

        with LLM("smollm2-135m-instruct") as llm:
            print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}])[0].text)

    `model`: a known name, a folder, a .gguf file, a hub id, or an opened checkpoint. `draft_model`: a smaller model
    that drafts tokens, a file of `forerun train drafter`, or a folder of the `speculators` package (EAGLE-3, DFlash,
    DSpark), or remote:HOST:PORT, where `forerun draft serve` runs; a drafter trained for the models is found by itself.
    Its K/V is part of the pool. `prefill_profile`: a file made by `forerun calibrate` for these models, for requests
    whose prompts are drafted; the default model has one.

    `dtype`: auto, float32, float16, bfloat16 or int8. `quantization`: file multiplies a GGUF file's own blocks, 4 bits
    as 4 bits, by C kernels that are compiled at first use; int8 rounds them again; fp16 and float32 are as in `dtype`.
    On a CPU auto means file for quantised files, and int8 where there is no compiler or int8 is faster. `device`: auto,
    cpu or cuda. `memory`, `quality`: for float weights on a CPU: each layer gets 16, 8 or 4 bits by its importance, so
    that all matrices fit ("1.2G"; the KV pool and the embedding come on top), or so that the KL divergence from the
    float weights stays below a value (0.01). `threads`: of the CPU; auto or None: OMP_NUM_THREADS, else one for each
    core (`thread_stats`).

    `max_model_len`: longest prompt and answer together; None: what the model allows. `max_num_seqs`: sequences that run
    at once. `max_num_batched_tokens`: tokens of one step. `max_gap_ms`: how long a step may take that runs a part of a
    prompt while answers stream; None: about three steps without (CUDA: at least 25 ms). `kv_cache_tokens`: size of the
    KV pool; None takes the model's context four times over, within a quarter of the memory that is free; on CUDA, 80%
    of what is free, or what `gpu_memory_utilization` (share of all memory of the GPU, weights included) leaves.

    `enable_prefix_caching`: requests read the K/V of prefixes that were computed before. `disk`: a folder where K/V
    outlives the process, up to `disk_bytes` of it; `host_bytes`: main memory for pages that the pool has no room for.
    `store`: mooncake://HOST:PORT, pages shared with other processes, `store_bytes` of them in this one's memory.

    `batch_invariant`: a token is the same bits alone, in any batch, as a draft and after a preemption. On a CPU with
    int8 weights that is the default; False lets sequences that share a long prefix attend over it in one call: branches
    of one prompt are much faster, and equal to rounding. On CUDA in bf16 the default promises it where it costs at most
    5%: up to 32 sequences at once (16 of a model of 8B) and prompts below 4,096 tokens; True always, False never. With
    other weights it changes nothing. `adapt`: a drafter of kind block or heads learns from accepted tokens when no
    request runs (`save_drafter`); answers do not change. `quiet`: no progress bar while loading.
    `skip_tokenizer_init`: for models whose tokens are not text: prompts and answers are token ids.
    Of what is open, `llm.tokenizer` encodes and decodes, and `llm.config` describes the model.
    """

    _is_draft = False  # whether only guesses for targets elsewhere are wanted of it

    @accepts_old_arguments(LLM_ARGUMENTS)
    def __init__(
        self,
        model: str | Path | Checkpoint = DEFAULT_MODEL,
        *,
        draft_model: str | Path | Checkpoint | HiddenDrafterWeights | None = None,
        prefill_profile: str | Path | Profile | None = None,
        dtype: str | torch.dtype = "auto",
        quantization: str | None = None,
        memory: str | int | None = None,
        quality: float | None = None,
        device: str = "auto",
        threads: int | Literal["auto"] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        max_gap_ms: float | None = None,
        kv_cache_tokens: int | None = None,
        gpu_memory_utilization: float | None = None,
        enable_prefix_caching: bool = True,
        disk: str | Path | None = None,
        disk_bytes: int = TierConfig.disk_bytes,
        host_bytes: int = 0,
        store: str | None = None,
        store_bytes: int = TierConfig.store_bytes,
        batch_invariant: bool | None = None,
        adapt: bool = False,
        skip_tokenizer_init: bool = False,
        quiet: bool = False,
    ) -> None:
        where, weights = choose_device(device), inputs.weights_mode(dtype, quantization)
        tiers = TierConfig(host_bytes, disk, disk_bytes, store, store_bytes)
        if tiers.any and not enable_prefix_caching:
            hint = "leave one of them out"
            raise BadRequest("tiers keep what the prefix cache holds, and enable_prefix_caching is off", hint)
        inputs.check_counts(threads=None if threads == "auto" else threads, kv_cache_tokens=kv_cache_tokens)
        inputs.check_counts(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
        inputs.check_switches(enable_prefix_caching=enable_prefix_caching, adapt=adapt)
        inputs.check_switches(skip_tokenizer_init=skip_tokenizer_init)
        if batch_invariant is not None:
            inputs.check_switches(batch_invariant=batch_invariant)
        if where.type == "cpu":
            count, self._threads_chosen = choose_threads(threads)
            torch.set_num_threads(count)
        goal = inputs.weight_goal(memory, quality, weights, where)
        loader = ModelLoader(where, weights, quiet, batch_invariant, goal, skip_tokenizer_init, self._is_draft)
        opened = loader.open(model, draft_model, prefill_profile, max_model_len, adapt)
        config = EngineConfig(
            max_model_len=opened.context,
            kv_cache_tokens=opened.size_kv_cache(kv_cache_tokens, gpu_memory_utilization),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens or STEP_TOKENS[where.type],
            enable_prefix_caching=enable_prefix_caching,
            max_gap_ms=max_gap_ms,
        )
        self._adapted = opened.hidden if adapt else None
        self._start(loader, opened, config, tiers)

    def _start(self, loader: ModelLoader, opened: OpenedModels, config: EngineConfig, tiers: TierConfig) -> None:
        """The engine of what was opened, and what goes with it."""
        self.tokenizer, self.decoder, self.precision = opened.tokenizer, opened.decoder, opened.precision
        self.config, self.model, self.prefill_profile = self.decoder.config, opened.checkpoint.source, opened.profile
        self._generation: dict[str, Any] = getattr(opened.checkpoint, "generation", {})
        drafts = opened.drafting or opened.hidden
        self.draft_name = opened.remote if drafts is None else drafts.source
        self.model_id = sampled_fingerprint(opened.checkpoint) if tiers.outlives else ""  # names sessions on disk
        self.engine, self._costs = loader.engine(opened, config, tiers)
        self.load_report, self.driver = loader.report, Driver(self.engine)
        self._sessions: SessionRegistry | None = None
        self._sessions_lock = threading.Lock()

    # -- answers -------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **options: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """Continue each prompt (text or token ids); one `Completion` per prompt, in order.

        `params`: for all prompts, or one for each. `options`: fields of `SamplingParams` for this call, such as
        `max_tokens=64`. `progress`: show on stderr how many answers are done."""
        return self._complete(inputs.as_prompts(prompts), params, progress, options)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **options: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """Answer each conversation; one `Completion` per conversation, in order. The rest is as in `generate`."""
        return self._complete(inputs.as_conversations(messages), params, progress, options)

    def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **options: Unpack[SamplingOptions]
    ) -> Iterator[Event]:
        """Events of one answer as they come; leaving the loop cancels the request."""
        return self.driver.stream(self.request(self.encode(prompt), inputs.as_params(params, options)))

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **options: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """`generate` for asyncio; calls that run at the same time share batches."""
        return await self._acomplete(inputs.as_prompts(prompts), params, progress, options)

    async def achat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **options: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """`chat` for asyncio; calls that run at the same time share batches."""
        return await self._acomplete(inputs.as_conversations(messages), params, progress, options)

    def astream(
        self,
        prompt: Prompt | Messages | Request,
        params: SamplingParams | None = None,
        **options: Unpack[SamplingOptions],
    ) -> AsyncIterator[Event]:
        """`stream` for asyncio; the prompt is encoded and checked in a thread. A `Request` was checked by `request`."""
        if isinstance(prompt, Request):
            return self.driver.astream(prompt)
        asked = inputs.as_params(params, options)
        return self.driver.astream(lambda: self.request(self.encode(prompt), asked))

    def request(
        self, prompt_ids: list[int], params: SamplingParams | None = None, session: str | None = None
    ) -> Request:
        """Check a request and pack its prompt, once and in any thread, for `astream`. `session`: the name of the
        session that it is a turn of."""
        params = inputs.as_params(params)
        if isinstance(params.prediction, str):
            params = replace(params, prediction=self.tokenizer.encode(params.prediction))
        return self.driver.request(prompt_ids, params, session)

    def encode(self, prompt: Prompt | Messages) -> list[int]:
        """Token ids of a prompt: text is encoded as plain text, messages go through the model's chat template."""
        if isinstance(prompt, str):
            if not prompt:  # a model that starts every text with a BOS token would answer that token
                raise BadRequest("the prompt is empty", "give at least one character of text")
            return self.tokenizer.encode(prompt, add_special=True)
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], dict):
            return self.tokenizer.apply_chat_template(prompt)
        return inputs.as_token_ids(prompt)

    def _complete(
        self, prompts: Asked, params: OneOrMore, progress: bool, options: SamplingOptions
    ) -> list[Completion]:
        each = inputs.params_for_each(params, len(prompts), options)
        return complete(self.driver, self._requests(prompts, each), progress)

    async def _acomplete(
        self, prompts: Asked, params: OneOrMore, progress: bool, options: SamplingOptions
    ) -> list[Completion]:
        each = inputs.params_for_each(params, len(prompts), options)
        return await acomplete(self.driver, await asyncio.to_thread(self._requests, prompts, each), progress)

    def _requests(self, prompts: Asked, params: list[SamplingParams]) -> list[Request]:
        encoded = [self.encode(prompt) for prompt in prompts]  # all of them first: a request's time starts when made
        return [self.request(ids, each) for ids, each in zip(encoded, params, strict=True)]

    # -- sessions ------------------------------------------------------------------------------------------------------

    def session(self, name: str, ttl: float | None = None, create: bool = True) -> Session:
        """The session of that name: the open one, one that the disk tier kept from an earlier process, or else a new
        one. Its K/V stays in the pool for `ttl` seconds after each turn. `create=False`: unknown names are errors."""
        return self.sessions.open(name, ttl, create)

    @property
    def sessions(self) -> SessionRegistry:
        """All sessions by name, those on disk too."""
        from forerun.sharing.session_registry import SessionRegistry

        with self._sessions_lock:  # one registry: two would open the same session twice
            if self._sessions is None:
                self._sessions = SessionRegistry(self, self.driver)
            return self._sessions

    def workers(
        self,
        prompt: Prompt | Messages,
        n: int,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        prefixes: Sequence[Prompt] | None = None,
    ) -> Iterator[Event]:
        """n answers to one prompt that are generated at once, each seeing the others' tokens as they appear.

        `Event.index` is the worker's number, from 0. `params`: for all workers, or one for each. `prefixes`: what each
        worker's answer starts with; None: its number. Closing the iterator ends all workers."""
        from forerun.sharing.workers import Workers

        return Workers(self, prompt, n, params, prefixes).run()

    def rollout(
        self,
        prompt: Prompt | Messages,
        width: int,
        depth: int,
        token_budget: int,
        branch_on: BranchOn = "step",
        score: Score | None = None,
        params: SamplingParams | None = None,
        *,
        separator: str = "\n",
        keep: float = 0.5,
        prune_below: float | None = None,
        min_distance: float = 0.0,
        min_prob: float = 0.02,
        seed: int | None = None,
    ) -> RolloutTree:
        """A tree of answers to one prompt that share their common prefixes; see `RolloutConfig` for the values."""
        from forerun.sharing.branches import run_sync
        from forerun.sharing.rollout import arollout
        from forerun.sharing.rollout_config import SAMPLING, RolloutConfig

        asked = (width, depth, token_budget, branch_on, score, SAMPLING if params is None else params)
        config = RolloutConfig(*asked, separator, keep, prune_below, min_distance, min_prob, seed)
        return run_sync(arollout(self, prompt, config))

    def topk(
        self, prompt: Prompt | Messages, trie: Trie, k: int = 10, end: bool = False, beam: int | None = None
    ) -> TopItems:
        """The k best items of a trie (or its file), with exact scores. `end`: these include the token that ends it.
        `beam`: only so many beginnings of one length go on: quicker, and `proven` says whether these are the best."""
        from forerun.sharing.top_items import top_items

        return top_items(self, self.encode(prompt), trie, k, end, beam)

    def edit(
        self,
        file: str | Path,
        instruction: str,
        *,
        text: str | None = None,
        mode: EditMode = "auto",
        params: SamplingParams | None = None,
    ) -> Edited:
        """Edit a file as the instruction says: the new text and a unified diff; nothing is written. `text`: the file's
        text, where it is not to be read. `mode`: copy: a program of copied and new lines, a copied span in one forward;
        replace: old and new lines; rewrite: the whole file again, with copied drafts; auto: the better of the first two
        where the model can write it. See `recipes.edit`."""
        from forerun.recipes.edit import edit

        return edit(self, file, instruction, text=text, mode=mode, params=params)

    def stream_edit(
        self,
        file: str | Path,
        instruction: str,
        *,
        text: str | None = None,
        mode: EditMode = "auto",
        params: SamplingParams | None = None,
    ) -> Iterator[EditPiece]:
        """`edit` as it comes: text of the new file and hunks of the diff; the last piece has the result."""
        from forerun.recipes.edit import stream_edit

        return stream_edit(self, file, instruction, text=text, mode=mode, params=params)

    def stats(self) -> Stats:
        """How prompt tokens were served and what answers cost so far, in total and by session."""
        tiers = self.engine.tiers
        with self.driver.exclusive() as engine:
            return engine.stats.snapshot(tiers.figures() if tiers is not None else None)

    def prefixes(self, prompt: Prompt | Messages | None = None, most: int = 200) -> TreeSummary:
        """What the prefix tree holds and how often it was read; `prompt`: its path through the tree is marked."""
        ids = [] if prompt is None else self.encode(prompt)
        check_token_ids(ids, self.config.vocab_size)
        with self.driver.exclusive() as engine:
            return summarise_tree(engine.tree, ids, most)

    # -- settings and statistics ---------------------------------------------------------------------------------------

    def memory_stats(self) -> dict[str, int]:
        """Bytes by part: weights, KV pool, and the whole process."""
        resident = psutil.Process().memory_info().rss
        return {"weights": self.decoder.weight_bytes, "kv_pool": self.engine.pool.nbytes, "resident": resident}

    def thread_stats(self) -> dict[str, Any]:
        """CPU threads, why so many, and how often one was too late because another program had its core."""
        if self.decoder.device.type != "cpu":
            return {"threads": 0, "chosen": "the model runs on a GPU", "jobs": 0, "retaken": 0, "waited_s": 0.0}
        return {"threads": torch.get_num_threads(), "chosen": self._threads_chosen, **pool_stats()}

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's makers recommend (generation_config.json of its folder); greedy where they do not. Requests
        without params are greedy in any case."""
        return SamplingParams.from_generation_config(self._generation)

    def prepare(self, params: SamplingParams) -> None:
        """Check parameters and make what they need (a drafter that is timed or searched for), ahead of requests."""
        self.engine.speculator.check(inputs.as_params(params))
        self.driver.prepare(params)

    def speculation_stats(self) -> dict[str, Any]:
        """What drafting cost and earned over all requests so far, and what the controller has measured."""
        return self.engine.speculator.stats()

    def save_drafter(self, path: str | Path) -> dict[str, int]:
        """Write the drafter with what it has learnt while serving (`adapt=True`) as a file for `draft_model`; returns
        how many trials of learning there were, and how many were kept."""
        hidden = self.engine.speculator.ctx.hidden
        if self._adapted is None or hidden is None or hidden.adapter is None:
            raise BadRequest("nothing learns here", "open the model with adapt=True and a block or heads drafter")
        with self.driver.exclusive():
            learnt, stats = hidden.learnt()
        self._adapted.with_adapter(learnt, stats).save(Path(path))
        return stats

    def upgrade(self) -> None:
        """Wait until prompts and answers that came from drafted K/V are known exactly. Without this call it happens
        by itself while no request is open."""
        self.driver.upgrade()

    def clear_cache(self) -> None:
        """Forget all cached prefixes in memory; the disk tier keeps its files."""
        with self.driver.exclusive() as engine:
            engine.clear_cache()

    def close(self) -> None:
        """Cancel what still runs and write what the disk tier is to keep; asking again is an error."""
        first = not self.driver.closed
        self.driver.close()
        self.engine.speculator.drafter_pool.close()
        if first and self._costs is not None:
            self._costs.close(self.engine.speculator.controller)

    def __repr__(self) -> str:
        limits, drafts = self.engine.config, "" if self.draft_name is None else f", draft_model={self.draft_name!r}"
        where = f"dtype={self.precision.name!r}, device={self.decoder.device.type!r}{drafts}"
        sizes = f"max_model_len={limits.max_model_len}, kv_cache_tokens={limits.kv_cache_tokens}"
        return f"LLM({self.model!r}, {where}, {sizes}{', closed' if self.driver.closed else ''})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
