"""What an engine gives its drafters: the target as a runner, an optional draft model, the page pool, the tokenizers.

Only a bundle: it runs nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from forerun.cache.pool import DraftKV, PagePool
from forerun.errors import BadRequest
from forerun.models.decoder import Decoder
from forerun.models.execution.hidden_features import HiddenFeatures
from forerun.models.execution.runner import Runner
from forerun.models.formats.pard import ParallelDrafting
from forerun.models.hidden_draft import HiddenDraftModel
from forerun.text.tokenizer import Tokenizer


@dataclass
class DraftModel:
    """A second model that is cheaper to run than the target."""

    decoder: Decoder
    tokenizer: Tokenizer | None
    same_tokens: bool  # whether its vocabulary is the target's
    source: str = "draft"
    parallel: ParallelDrafting | None = None  # how it drafts several tokens in one forward, where it was trained to
    markov: tuple[Tensor, Tensor] | None = None  # [tokens, r] of the token before and of the one that follows


@dataclass
class DraftContext:
    pool: PagePool
    runner: Runner  # runs the target on the pool
    tokenizer: Tokenizer | None
    max_context: int
    draft: DraftModel | None = None
    draft_runner: Runner | None = None  # runs the draft model on its K/V of the same pages
    draft_kv: DraftKV | None = None
    hidden: HiddenDraftModel | None = None  # a drafter on the target's hidden states
    hidden_kv: DraftKV | None = None  # its own K/V, where it has layers
    make_room: Callable[[int], bool] | None = None  # evicts cached pages until so many are free
    quiet: bool = True  # no progress while forwards are timed
    remote_drafters: list[str] = field(default_factory=list)  # of `auto`, on other machines
    draft_states: dict[int, Any] = field(default_factory=dict)  # sequence -> what is computed of it in `draft_kv`

    @classmethod
    def build(
        cls,
        pool: PagePool,
        runner: Runner,
        tokenizer: Tokenizer | None,
        max_context: int,
        draft: DraftModel | HiddenDraftModel | None,
    ) -> DraftContext:
        """Gives what drafts, if there is something, its K/V on the pool's pages and the target's hidden states."""
        if draft is None:
            return cls(pool, runner, tokenizer, max_context)
        if isinstance(draft, HiddenDraftModel):
            own = None if draft.layers is None else pool.add_draft_kv(draft.layers, draft.dtype, draft.device)
            if draft.depths:
                made = (draft.depths, draft.width, draft.project, pool, draft.dtype, draft.device)
                runner.read_hidden(HiddenFeatures(*made))
            return cls(pool, runner, tokenizer, max_context, hidden=draft, hidden_kv=own)
        draft_kv = pool.add_draft_kv(draft.decoder.config, draft.decoder.dtype, draft.decoder.device)
        context = min(max_context, draft.decoder.config.max_context)
        own_runner = Runner(draft.decoder, pool, context, draft_kv.kv, is_draft=True)
        return cls(pool, runner, tokenizer, max_context, draft, own_runner, draft_kv)

    def warm_up(self) -> None:
        """Compile now what the first forwards of both models would."""
        self.runner.warm_up()
        if self.draft_runner is not None:
            self.draft_runner.warm_up()

    @property
    def paid_drafters(self) -> list[str]:
        """The drafters that run the model which drafts here. One that was trained to draft in one forward does not also
        draft chains: these take a forward a token, and gained less wherever both were timed (docs/log.md)."""
        if self.hidden is not None:
            return [self.hidden.kind]
        if self.draft is None:
            return []
        if not self.draft.same_tokens:
            return ["cross"]
        return ["model"] if self.draft.parallel is None else ["parallel"]

    def hidden_problem(self, kind: str) -> BadRequest | None:
        """Why a drafter on hidden states of this kind cannot work."""
        if self.hidden is not None and self.hidden.kind == kind:
            return None
        found = "there is none" if self.hidden is None else f"{self.hidden.source} is of kind {self.hidden.kind!r}"
        trained = f"forerun train drafter --kind {kind}"
        made = "load a folder of the `speculators` package" if kind == "eagle3" else trained
        problem = f"the drafter {kind!r} reads the target's hidden states with a model trained for it: {found}"
        return BadRequest(problem, f"{made}; then give it as draft_model=..., or --draft-model")

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
