"""The options of a rollout: `RolloutConfig`, checked on creation, and the seeds of its answers. Knows no engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from forerun.core import SamplingParams
from forerun.errors import BadRequest
from forerun.options import check_number
from forerun.sharing.branching import BRANCH_NAMES, BranchOn
from forerun.sharing.tree import Trajectory

Score = Callable[[Trajectory], float]

SAMPLING = SamplingParams(temperature=1.0, max_tokens=256)


def group_seed(seed: int | None, params: SamplingParams) -> int:
    """The seed of a group of answers: given beside the parameters or in them, else 0."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise BadRequest(f"seed is {seed!r}, it must be a whole number", "leave it out for 0")
    if seed is not None and params.seed is not None and seed != params.seed:
        raise BadRequest(f"seed is {seed}, params.seed is {params.seed}", "give one of them")
    return next((value for value in (seed, params.seed) if value is not None), 0)


def answer_seed(seed: int, number: int) -> int:
    """The seed of one answer of a group: another one for each number, the same in every run."""
    return random.Random(f"{seed}/{number}").getrandbits(63)


@dataclass(frozen=True)
class RolloutConfig:
    """How a tree grows; every value is checked on creation."""

    width: int  # answers that start from the stem, and the limit of branches of one point
    depth: int  # 1: only those; 2: they branch; 3: branches branch, and so on
    token_budget: int  # limit of computed tokens, including the stem whether it was cached or not
    branch_on: BranchOn = "step"  # or a function from a node to positions in its tokens
    score: Score | None = None  # called in a thread, with one trajectory at a time, while others run
    params: SamplingParams = field(default=SAMPLING)
    separator: str = "\n"  # between steps
    keep: float = 0.5  # with a score: fraction of nodes, best first, that branch in a round
    prune_below: float | None = None  # with a score: answers are also scored at every step, and stopped below this
    min_distance: float = 0.0  # branches of one point stop where their mean pairwise prefix edit distance is less
    min_prob: float = 0.02  # of the token that a branch starts with
    seed: int | None = None  # of everything random; None: that of params, or 0

    def __post_init__(self) -> None:
        for name in ("width", "depth", "token_budget"):
            check_number(name, getattr(self, name), 1, whole=True)
        if self.branch_on not in BRANCH_NAMES and not callable(self.branch_on):
            hint = f"use {', '.join(BRANCH_NAMES)} or a function from node to positions"
            raise BadRequest(f"branch_on is {self.branch_on!r}", hint)
        if self.score is not None and not callable(self.score):
            raise BadRequest(f"score is {self.score!r:.80}", "give a function from a trajectory to a number")
        if self.prune_below is not None and self.score is None:
            raise BadRequest(f"prune_below is {self.prune_below} but there is no score", "give a score function")
        for name in ("keep", "min_distance", "min_prob"):
            check_number(name, getattr(self, name), 0.0, 1.0)
        if not isinstance(self.separator, str) or not self.separator:
            raise BadRequest(f"separator is {self.separator!r}, it must be text", "leave it out for lines")
        self._check_params()
        group_seed(self.seed, self.params)

    @property
    def tree_seed(self) -> int:
        """What everything random in the tree starts from."""
        return group_seed(self.seed, self.params)

    def _check_params(self) -> None:
        p = self.params
        if not isinstance(p, SamplingParams):
            raise BadRequest(f"params must be SamplingParams, got {p!r:.80}", "pass SamplingParams(temperature=1.0)")
        # A branch's prompt contains part of the answer: options that depend on where the answer begins would differ
        refused = {
            "n": p.n != 1,
            "grammar": p.grammar is not None,
            "presence_penalty": p.presence_penalty != 0.0,
            "frequency_penalty": p.frequency_penalty != 0.0,
            "prefill": not p.prefill.exact,
        }
        for name, is_set in refused.items():
            if is_set:
                raise BadRequest(f"a rollout cannot have {name}={getattr(p, name)!r:.80}", f"leave {name} out")
