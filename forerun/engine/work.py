"""What one sequence does in one forward."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.core import Draft
from forerun.decode.verifiers.base import Verifier
from forerun.decode.verifiers.match import MatchVerifier
from forerun.engine.sequence import Sequence
from forerun.models.execution.runner import Span


@dataclass
class Work:
    """Run the next `count` tokens of a sequence that have no K/V yet, and what was guessed to follow them."""

    seq: Sequence
    count: int
    draft: Draft = field(default_factory=Draft)

    @property
    def samples(self) -> bool:
        """Whether this brings the sequence to its end, so that its next token is drawn."""
        return self.seq.computed + self.count == len(self.seq.tokens)

    @property
    def decodes(self) -> bool:
        """Whether it goes on with an answer that has begun, one token at a time but for what is guessed."""
        return self.count == 1 and self.samples and self.seq.num_generated > 0

    @property
    def alone(self) -> bool:
        """Whether it runs as if there were no guide beside it: the answer must not depend on that."""
        return self.seq.provisional is not None and self.seq.prefilling

    @property
    def meets_guide(self) -> bool:
        """Whether the answer goes on now with what a guide said, or without it: that can be judged."""
        provisional = self.seq.provisional
        return provisional is not None and not provisional.judged and self.samples

    @property
    def verifier(self) -> Verifier:
        """A guide is followed as far as the answer would have gone by itself, whatever rule was asked for."""
        return MatchVerifier() if self.meets_guide else self.seq.verifier

    @property
    def span(self) -> Span:
        """What it runs: the tokens it is about, then its draft."""
        seq, draft = self.seq, self.draft
        ids = seq.tokens[seq.computed : seq.computed + self.count]
        want: range | tuple[()] = range(self.count - 1, self.count + len(draft)) if self.samples else ()
        known = seq.ready if self.count == 1 and self.samples and not len(draft) else None
        ids = [*ids, *draft.tokens]
        return Span(ids, seq.computed, seq.pages, want, len(seq.tokens), draft.parents, known, self.alone)
