"""The acceptance contract: a draft and the target's word on it in, a verdict out.

A verifier knows no drafter, no engine and no model. It is lossless if, whatever was drafted, the tokens of its verdict
(path, then next token) are distributed as the target's own; `forerun check lossless` proves it by enumeration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from forerun.core import Draft, Verdict
from forerun.decode.target import Rng, TargetView


class Verifier(ABC):
    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    draws: ClassVar[bool] = False  # whether it gains from drafts drawn at random (`Draft.proposals`)

    @abstractmethod
    def verify(self, draft: Draft, target: TargetView, rng: Rng) -> Verdict: ...
