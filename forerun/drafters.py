"""What an author of a drafter needs, under public names.

A drafter proposes tokens that may follow a sequence; the target model verifies them, so a drafter changes how fast an
answer comes and never what it says. It is one class with a name:

    from forerun import LLM, SamplingParams
    from forerun.drafters import Draft, Drafter, DraftRequest, register


    @register
    class RepeatDrafter(Drafter):
        \"\"\"Proposes that the last two tokens come again.\"\"\"

        name = "repeat"

        def propose(self, requests: list[DraftRequest]) -> list[Draft]:
            drafts = []
            for request in requests:
                tokens = request.tokens[-2:][: request.max_nodes]
                drafts.append(Draft.chain(tokens, [0.3, 0.9][: len(tokens)], self.name))
            return drafts


    with LLM() as llm:
        answer = llm.generate("ha ha ha ha", SamplingParams(max_tokens=24, speculation="repeat+lookup"))[0]
        print(answer.text, answer.usage.drafters)

A `Draft` is a tree of tokens: `Draft.chain` makes one path, `Draft.add` one node below a parent (`ROOT` for the first
ones). Each node has the probability that it is accepted once its parent is; the engine corrects it by what it observes.
`Drafter` documents the hooks for drafters that hold state, run a model (`free = False`) or sample from their own
distribution (`can_sample`). The constructor takes a `DraftContext`: the models, the tokenizers and the page pool.
"""

from forerun.core import ROOT, Draft
from forerun.decode.draft_context import DraftContext, DraftModel
from forerun.decode.drafters.base import Drafter, DraftRequest, DraftRound, register, registered, unregister
from forerun.decode.sampling import Context, Rng, SeededRng

__all__ = [
    "ROOT",
    "Context",
    "Draft",
    "DraftContext",
    "DraftModel",
    "DraftRequest",
    "DraftRound",
    "Drafter",
    "Rng",
    "SeededRng",
    "register",
    "registered",
    "unregister",
]
