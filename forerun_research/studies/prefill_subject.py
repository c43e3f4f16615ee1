"""The model under study: opened once for each variant, with everything that measures ask of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forerun.core import SamplingParams
from forerun.llm import LLM
from forerun_research.studies.prefill_drop import DROP, dropping
from forerun_research.studies.prefill_score import PromptScorer, adjusted, figures
from forerun_research.studies.prefill_texts import StudyTexts
from forerun_research.studies.study import Setting, Study, Variant


@dataclass(frozen=True)
class StudyAnswer:
    text: str
    token_ids: list[int]
    figures: dict[str, object]  # what the prefill cost


class StudySubject:
    def __init__(self, study: Study, variant: Variant) -> None:
        asked: dict[str, Any] = {} if variant.profile is None else {"prefill_profile": variant.profile}
        self.llm = LLM(
            study.model,
            draft_model=variant.draft,
            dtype=study.weights,
            device=study.device,
            threads=study.threads,
            kv_cache_tokens=study.kv_cache_tokens,
            max_model_len=study.max_model_len,
            quiet=True,
            **asked,
        )
        self.tokenizer, self.engine = self.llm.tokenizer, self.llm.engine
        self.scorer = PromptScorer(self.engine)
        self.texts = StudyTexts(study.data, self.tokenizer)

    @property
    def layers(self) -> int:
        return self.llm.config.num_layers

    def fits(self, tokens: int) -> bool:
        return tokens < min(self.engine.config.max_model_len, self.engine.config.capacity)

    def ask(self, text: str) -> list[int]:
        """A user's message as the model gets it."""
        return self.tokenizer.apply_chat_template([{"role": "user", "content": text}])

    def answer(self, ids: list[int], setting: Setting | None, tokens: int, stop: tuple[str, ...] = ()) -> StudyAnswer:
        """One greedy answer from cold caches; None: after exact prefill."""
        if setting is not None and setting.prefill.source == DROP:
            return self._answer_dropped(ids, setting, tokens, stop)
        self.llm.clear_cache()
        prefill = "exact" if setting is None else setting.prefill
        params = SamplingParams(max_tokens=tokens, stop=stop, prefill=prefill)
        if setting is None:
            found = self.llm.generate(ids, params)[0]
        else:
            with adjusted(self.engine, setting):
                found = self.llm.generate(ids, params)[0]
        self.llm.clear_cache()  # drops drafted prompts: none is upgraded while the engine is used directly
        usage = found.usage
        about = figures(usage.prefill, usage.ttft_s)
        if usage.provisional:
            about |= {name: getattr(usage, name) for name in ("provisional", "confirmed", "provisional_s")}
        return StudyAnswer(found.text, found.token_ids, about)

    def _answer_dropped(self, ids: list[int], setting: Setting, tokens: int, stop: tuple[str, ...]) -> StudyAnswer:
        with dropping(self.scorer, ids, setting, tokens) as dropped:
            found = dropped.greedy(tokens, list(self.llm.config.eos_ids))
        text = self.tokenizer.decode(found)
        ends = [at for mark in stop if (at := text.find(mark)) >= 0]
        return StudyAnswer(text[: min(ends)] if ends else text, found, figures(dropped.report, dropped.seconds))

    def close(self) -> None:
        self.llm.close()

    def __enter__(self) -> StudySubject:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
