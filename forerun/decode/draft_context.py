"""What an engine gives its drafters: the target as a runner, an optional draft model, the page pool, the tokenizers.

Only a bundle: it runs nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.cache.pool import DraftKV, PagePool
from forerun.errors import BadRequest
from forerun.models.decoder import Decoder
from forerun.models.execution.runner import Runner
from forerun.models.formats.parallel import ParallelDrafting
from forerun.text.tokenizer import Tokenizer


@dataclass
class DraftModel:
    """A second model that is cheaper to run than the target."""

    decoder: Decoder
    tokenizer: Tokenizer | None
    same_tokens: bool  # whether its vocabulary is the target's
    source: str = "draft"
    parallel: ParallelDrafting | None = None  # how it drafts several tokens in one forward, where it was trained to


@dataclass
class DraftContext:
    pool: PagePool
    runner: Runner  # runs the target on the pool
    tokenizer: Tokenizer | None
    max_context: int
    draft: DraftModel | None = None
    draft_runner: Runner | None = None  # runs the draft model on its K/V of the same pages
    draft_kv: DraftKV | None = None
    make_room: Callable[[int], bool] | None = None  # evicts cached pages until so many are free
    quiet: bool = True  # no progress while forwards are timed

    @classmethod
    def build(
        cls, pool: PagePool, runner: Runner, tokenizer: Tokenizer | None, max_context: int, draft: DraftModel | None
    ) -> DraftContext:
        """Gives the draft model, if there is one, its K/V on the pool's pages."""
        if draft is None:
            return cls(pool, runner, tokenizer, max_context)
        draft_kv = pool.add_draft_kv(draft.decoder.config, draft.decoder.dtype, draft.decoder.device)
        context = min(max_context, draft.decoder.config.max_context)
        return cls(
            pool, runner, tokenizer, max_context, draft, Runner(draft.decoder, pool, context, draft_kv.kv), draft_kv
        )

    def warm_up(self) -> None:
        """Compile now what the first forwards of both models would."""
        self.runner.warm_up()
        if self.draft_runner is not None:
            self.draft_runner.warm_up()

    def draft_problem(self, user: str, through_text: bool) -> BadRequest | None:
        """Why `user` cannot work with the draft model: it needs the target's tokens, or goes through the text."""
        if self.draft is None:
            hint = "open the model with a draft: draft_model=..., or --draft-model on the command line"
            return BadRequest(f"{user} needs a draft model", hint)
        if through_text and (self.tokenizer is None or self.draft.tokenizer is None):
            missing = "the target" if self.tokenizer is None else self.draft.source
            hint = "use models that come with their tokenizer"
            return BadRequest(f"{user} goes through the text, and {missing} has no tokenizer", hint)
        if not through_text and not self.draft.same_tokens:
            hint = "use a draft of the same family, the drafter `cross` or the source `self`"
            return BadRequest(f"{user} needs the target's tokens, those of {self.draft.source} are others", hint)
        return None
