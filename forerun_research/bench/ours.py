"""Forerun as a side of a bench, through the same public API its users have."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from forerun import __version__
from forerun.core import Prefill, SamplingParams
from forerun.decode.control.controller import Controller
from forerun.llm import LLM, Prompt
from forerun_research.bench.common import same_prefix
from forerun_research.bench.sides import Sample, SideSpec


def plain(tokens: int) -> SamplingParams:
    """Exactly `tokens` tokens without drafts, as the other engines decode here; `bench speculate` measures drafts."""
    return SamplingParams(max_tokens=tokens, ignore_eos=True, speculation="off")


class ForerunSide:
    def __init__(self, spec: SideSpec) -> None:
        # Room for all requests at once and a quarter more, so that cached prefixes never force work on a bench.
        pool = -(-spec.context * spec.batch * 5 // 4 // 16) * 16 + 64
        kind, models = self._models(spec)
        self.llm = kind(
            **models,
            dtype=spec.weights,
            device=spec.device,
            threads=spec.threads,
            kv_cache_tokens=pool,
            max_num_seqs=max(spec.batch, 1),
            max_model_len=spec.context,
            disk=spec.disk,
            quiet=True,
        )

    @staticmethod
    def _models(spec: SideSpec) -> tuple[type[LLM], dict[str, Any]]:
        """Files as they are named; with a shape everything is random, a draft and its profile too."""
        if spec.shape is None:
            named = {"model": spec.model, "draft_model": spec.draft}
            return LLM, named if spec.profile is None else named | {"prefill_profile": spec.profile}
        from forerun.models.build import choose_device
        from forerun_research.bench.random_profile import RandomDraft, RandomLLM, random_profile
        from forerun_research.bench.shapes import RandomCheckpoint

        where = choose_device(spec.device)
        model = RandomCheckpoint(spec.shape, where)
        if spec.draft is None:
            return LLM, {"model": model}
        draft = RandomDraft(spec.draft, where, model.config)
        return RandomLLM, {"model": model, "draft_model": draft, "prefill_profile": random_profile(model, draft)}

    def about(self) -> dict[str, Any]:
        weights, device = self.llm.precision.name, self.llm.decoder.device.type
        return {"weights": weights, "device": device, "version": __version__}

    def decode(self, ids: list[int], tokens: int) -> Sample:
        self.llm.clear_cache()
        answer = self.llm.generate(ids, plain(tokens))[0]
        usage = answer.usage
        return {
            "ttft_s": usage.ttft_s,
            "ms_per_token": 1000 / usage.tokens_per_second if usage.tokens_per_second else 0.0,
            "tokens_per_s": usage.tokens_per_second,
            "token_ids": answer.token_ids,
        }

    def prefill(self, ids: list[int]) -> Sample:
        self.llm.clear_cache()
        return self._first_token(ids)

    def shared(self, first: list[int], second: list[int]) -> Sample:
        """The second of two requests, after the first one left its prefix behind."""
        self.llm.clear_cache()
        self._first_token(first)
        return self._first_token(second)

    def batch(self, prompts: list[list[int]], tokens: int) -> Sample:
        self.llm.clear_cache()
        together: list[Prompt] = [*prompts]
        start = time.perf_counter()
        answers = self.llm.generate(together, plain(tokens))
        total = time.perf_counter() - start
        made = sum(answer.usage.completion_tokens for answer in answers)
        assert made == tokens * len(prompts), f"{made} tokens instead of {tokens * len(prompts)}"
        return {"total_s": total, "tokens_per_s": made / total}

    def forward(self, tokens: int, context: int) -> Sample:
        return {"ms": 1000 * self.llm.engine.time_forward(tokens, context)}

    # -- prefill that is drafted ---------------------------------------------------------------------------------------

    def drafted(self, ids: list[int], prefill: Prefill) -> Sample:
        """Time to the first token of a prompt never seen before, and what its prefill reports."""
        self.llm.clear_cache()
        usage = self.llm.generate(ids, SamplingParams(max_tokens=1, ignore_eos=True, prefill=prefill))[0].usage
        report = None if usage.prefill is None else asdict(usage.prefill)
        return {"ttft_s": usage.ttft_s, "report": report}

    def provisional(self, ids: list[int], prefill: Prefill, tokens: int) -> Sample:
        """When the first provisional and the first confirmed token came, and how many of the former stayed."""
        self.llm.clear_cache()
        return self.keeping(ids, prefill, tokens)

    def after(self, before: list[int], ids: list[int], prefill: Prefill, tokens: int) -> Sample:
        """The same after another prompt, which left its K/V behind."""
        self.llm.clear_cache()
        self._first_token(before)
        return self.keeping(ids, prefill, tokens)

    def keeping(self, ids: list[int], prefill: Prefill, tokens: int) -> Sample:
        """The same with whatever is in the caches."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, prefill=prefill)
        start, first, confirmed = time.perf_counter(), None, None
        shown, final, usage = list[int](), list[int](), None
        for event in self.llm.stream(ids, params):
            now, usage = time.perf_counter() - start, event.usage or usage
            if event.token_ids and event.provisional:
                first = now if first is None else first
                shown += event.token_ids
            elif event.token_ids:
                confirmed = now if confirmed is None else confirmed
                final += event.token_ids
        times: Sample = {"provisional_s": first, "confirmed_s": confirmed}
        report = None if usage is None or usage.prefill is None else asdict(usage.prefill)
        about = {"cached_tokens": 0 if usage is None else usage.cached_tokens, "report": report}
        return times | about | {"shown": len(shown), "kept": same_prefix(shown, final), "token_ids": final}

    def close(self) -> None:
        """What is cached goes to the disk tier, where there is one."""
        self.llm.close()

    # -- speculation: answers end where the model ends them, since text after an end is unlike any other ---------------

    def answer(self, ids: list[int], params: SamplingParams) -> Sample:
        """One cold answer and all that became of its drafts."""
        self._forget()
        answer = self.llm.generate(ids, params)[0]
        usage = answer.usage
        derived = {"decode_s": usage.total_s - usage.ttft_s, "other_s": usage.other_s}
        return {"token_ids": answer.token_ids, **asdict(usage), **derived}

    def together(self, prompts: list[list[int]], params: SamplingParams) -> Sample:
        """All prompts at once, cold."""
        self._forget()
        asked: list[Prompt] = [*prompts]
        start = time.perf_counter()
        answers = self.llm.generate(asked, params)
        total = time.perf_counter() - start
        made = sum(answer.usage.completion_tokens for answer in answers)
        return {"total_s": total, "tokens_per_s": made / total, "token_ids": [answer.token_ids for answer in answers]}

    def conversation(self, messages: list[dict[str, str]], follow_up: str, params: SamplingParams) -> Sample:
        """Two turns from a cold cache: how much of the second prompt was reused."""
        self._forget()
        first = self.llm.chat(messages, params)[0]
        more = [{"role": "assistant", "content": first.text}, {"role": "user", "content": follow_up}]
        usage = self.llm.chat([*messages, *more], params)[0].usage
        return {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}

    def _forget(self) -> None:
        """Leave nothing of earlier answers, neither their K/V nor what drafters remember of their text: all settings
        get the same tasks, and one that remembers the answer before would repeat it, ten times as fast as it is."""
        self.llm.clear_cache()

    def speculation(self) -> dict[str, Any]:
        """Figures over all requests so far, acceptance and cost curves."""
        return self.llm.speculation_stats()

    def bound(self, survival: list[float], drafter: str | None) -> float:
        """The speedup that the measured cost curves allow where drafts survive like this."""
        return max_speedup(self.llm.engine.speculator.controller, survival, drafter)

    def _first_token(self, ids: list[int]) -> Sample:
        usage = self.llm.generate(ids, SamplingParams(max_tokens=1, ignore_eos=True))[0].usage
        return {"ttft_s": usage.ttft_s, "cached_tokens": usage.cached_tokens}


def max_speedup(controller: Controller, survival: list[float], drafter: str | None) -> float:
    """The speedup that costs allow one sequence at the best fixed depth; `survival[j]` is the share of steps with more
    than j drafted tokens accepted."""
    one = controller.target.seconds(1, 1)
    round_s = controller.drafters[drafter].seconds(1, 1) if drafter else 0.0
    best, tokens = 1.0, 1.0
    for k, share in enumerate(survival, 1):
        tokens += share
        best = max(best, tokens * one / (controller.target.seconds(1 + k, 1) + k * round_s))
    return best
