"""Classification: one of some labels, with the probability of each, from the model conditioned on the labels.

Every label is scored as a whole answer with its end, so a label is not preferred for its first token alone. Texts of
one task share the prompt before them, which is read from the prefix cache. Knows `LLM` and its public methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.decode.trie import TokenTrie
from forerun.errors import BadRequest
from forerun.inputs import Messages, Prompt
from forerun.llm import LLM

INSTRUCTION = "Which of these labels fits the text best: {labels}? Answer with the label alone."


@dataclass(frozen=True)
class Classified:
    """A text's label and how probable each label is, the best first; the probabilities add up to 1."""

    label: str
    probs: dict[str, float]
    mass: float  # the probability that the model, asked without a grammar, answers with one of the labels


def label_question(text: str, labels: Sequence[str], instruction: str = INSTRUCTION) -> Messages:
    """A question as a conversation; what all texts of a task share comes first."""
    asked = instruction.replace("{labels}", ", ".join(labels))
    return [{"role": "user", "content": f"{asked}\n\nText: {text}"}]


def check_labels(labels: Sequence[str]) -> None:
    if isinstance(labels, str) or len(labels) < 2 or not all(isinstance(label, str) and label for label in labels):
        raise BadRequest(f"labels are {labels!r:.80}", "give at least two different texts")
    if len(set(labels)) < len(labels):
        raise BadRequest(f"labels are {list(labels)!r:.80}: some are the same", "give at least two different texts")


def classify(llm: LLM, prompt: Prompt | Messages, labels: Sequence[str]) -> Classified:
    """The label that the model's answer most probably is, given that it is one of them. Labels that follow a prompt of
    plain text often need a space in front."""
    check_labels(labels)
    trie = TokenTrie.build([llm.tokenizer.encode(label) for label in labels], labels)
    found = llm.topk(prompt, trie, len(labels), end=True)
    scores = np.array([ranked.score for ranked in found.items])
    total = float(np.logaddexp.reduce(scores))
    probs = {ranked.name: float(np.exp(ranked.score - total)) for ranked in found.items}
    return Classified(found.items[0].name, probs, float(np.exp(total)))
