"""A drafter of one's own: boilerplate that a service answers with again and again is proposed as a chain of tokens. A
draft is verified, so a poor one costs a little time and never changes an answer.

    python examples/own_drafter.py
"""

from __future__ import annotations

from forerun import LLM, SamplingParams
from forerun.drafters import Draft, DraftContext, Drafter, DraftRequest, register

PHRASES = ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10", "one, two, three, four, five, six, seven, eight, nine, ten")


@register
class Boilerplate(Drafter):
    name = "boilerplate"

    def __init__(self, ctx: DraftContext) -> None:
        assert ctx.tokenizer is not None
        self._phrases = [ctx.tokenizer.encode(phrase) for phrase in PHRASES]

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        return [self._continue(request) for request in requests]

    def _continue(self, request: DraftRequest) -> Draft:
        """The rest of the phrase that holds the last two tokens in a row."""
        for phrase in self._phrases:
            for at in range(2, len(phrase)):
                if request.tokens[-2:] == phrase[at - 2 : at]:
                    rest = phrase[at : at + request.max_depth]
                    return Draft.chain(rest, [0.9] * len(rest), self.name)
        return Draft()


def main() -> None:
    with LLM() as llm:
        messages = [{"role": "user", "content": "Count from 1 to 10, with commas."}]
        plain = llm.chat(messages, SamplingParams(max_tokens=40, speculation="off"))[0]
        ours = llm.chat(messages, SamplingParams(max_tokens=40, speculation="boilerplate"))[0]
        usage = ours.usage
        print(ours.text)
        print(f"{usage.accepted} of {usage.drafted} drafted tokens accepted in {usage.steps} steps", end="; ")
        print("the same answer as plain decoding" if ours.token_ids == plain.token_ids else "a different answer")


if __name__ == "__main__":
    main()
