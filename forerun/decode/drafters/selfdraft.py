"""The target drafts for itself with some of its blocks skipped (self-speculation). No second model and no training.

The blocks that run read the target's own K/V, which is exact for all but the last token, so there is nothing to catch
up with. What they write for drafted tokens lies in entries that verification overwrites before anything else reads
them. Knows no verifier; `layer_search` finds which blocks to run.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters.base import DraftRequest, register
from forerun.decode.drafters.model import ModelDrafter, _State
from forerun.decode.drafters.tree_builder import TreeBuilder
from forerun.decode.layer_search import find_blocks
from forerun.errors import BadRequest
from forerun.models.decoder import Output
from forerun.models.execution.runner import Runner, Span


class PartialRunner:
    """A runner whose forwards run some blocks only."""

    def __init__(self, runner: Runner, blocks: Sequence[int]) -> None:
        self.runner, self.blocks = runner, tuple(blocks)

    def forward(self, spans: list[Span]) -> Output:
        return self.runner.forward(spans, blocks=self.blocks)

    def chains(self, spans: list[Span], depth: int, least: Sequence[float]) -> None:
        """Drafting in one launch runs whole models only."""

    def time_forward(self, tokens: int, context: int, repeats: int, prompt: bool = False) -> float:
        return self.runner.time_forward(tokens, context, repeats, blocks=self.blocks, prompt=prompt)


@register
class SelfDrafter(ModelDrafter):
    """Grows trees as a draft model does."""

    name = "self"

    def __init__(self, ctx: DraftContext, blocks: Sequence[int] | None = None) -> None:
        """`blocks`: run these, without a search."""
        if blocks is None:
            assert ctx.tokenizer is not None
            blocks = find_blocks(ctx.runner, ctx.tokenizer, ctx.max_context).blocks
        self._runner = PartialRunner(ctx.runner, blocks)  # type: ignore[assignment]
        self._pool, self._vocab = ctx.pool, ctx.runner.decoder.config.vocab_size
        self._states = {}

    @classmethod
    def problem(cls, ctx: DraftContext) -> BadRequest | None:
        if ctx.tokenizer is None:
            hint = "use another drafter"
            return BadRequest(f"the drafter {cls.name!r} needs a tokenizer to find the layers it can skip", hint)
        return None

    def catch_up_tokens(self, request: DraftRequest) -> int:
        return 1

    def finish(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:
        self._states.pop(seq_id, None)

    def _state(self, request: DraftRequest) -> _State:
        """The target has computed all but the last token, in any step."""
        state = self._states[request.seq_id] = _State(request.pages, len(request.tokens) - 1)
        return state

    def _advance(self, state: _State, valid: int) -> None:
        """Nothing to record: the pages are the target's own."""

    def _grow_chains(self, ready: list[TreeBuilder]) -> bool:
        """A launch of several rounds runs every layer."""
        return False
