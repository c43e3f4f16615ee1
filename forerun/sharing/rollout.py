"""Rollout trees: many answers to one prompt that share their common prefixes.

A few answers start from the stem; then, round after round, every promising node gets one more branch, at a step or
where entropy is high. Branches are compared and scored while they run.

A round's cost is bounded before it starts, so the token budget holds as long as the pool has room for the tree: where
pages were evicted, a round also costs what it takes to compute them again. A branch costs its own tokens and at most
one page of its prefix: the prefix tree shares whole pages. Which branches a round starts depends on the tokens so far
and the seed, not on timing.
"""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from forerun.errors import BadRequest
from forerun.llm import LLM, Messages, Prompt
from forerun.outputs import Choice
from forerun.params import MAX_LOGPROBS
from forerun.sharing.branches import Branch, checked_score, gather_or_cancel, run_branch
from forerun.sharing.branching import Brancher, BranchPoint, step_starts
from forerun.sharing.diversity import SiblingGroup
from forerun.sharing.rollout_config import RolloutConfig, answer_seed
from forerun.sharing.tree import BranchStatus, Cost, RolloutNode, RolloutTree

MIN_TOP_LOGPROBS = 8  # recorded at every position: the tokens that a branch may start with
NO_SHARING = 1 << 40  # tokens of a page where no prefix is cached: no prompt fills one
MAX_COMPARED_TOKENS = 1024  # first tokens of finished siblings that a branch is compared with


async def arollout(llm: LLM, prompt: Prompt | Messages, config: RolloutConfig) -> RolloutTree:
    """`LLM.rollout` for asyncio."""
    return await Rollout(llm, llm.encode(prompt), config).run()


@dataclass(eq=False)
class NewBranch:
    """A branch of the current round: its place in the tree, its prompt, and how much it may cost."""

    node: RolloutNode
    prompt_ids: list[int]
    max_tokens: int
    full_length: bool  # whether `max_tokens` is the limit of an answer, not of the budget
    reserved: int  # tokens of the budget that it takes at most
    group: SiblingGroup
    branch: Branch | None = None
    status: BranchStatus | None = None  # why it was stopped
    scored_steps: int = 0  # steps it had when it was scored last


class Rollout:
    """Grows one tree."""

    def __init__(self, llm: LLM, stem: list[int], config: RolloutConfig) -> None:
        self.llm, self.config = llm, config
        self.page_size = llm.engine.pool.page_size if llm.engine.config.enable_prefix_caching else NO_SHARING
        if config.token_budget <= len(stem):
            hint = "raise token_budget to the stem's length and what the answers may take, or shorten the prompt"
            raise BadRequest(f"the token budget is {config.token_budget}, the stem alone has {len(stem)} tokens", hint)
        logprobs = min(MAX_LOGPROBS, max(MIN_TOP_LOGPROBS, config.params.logprobs or 0))
        self.params = replace(config.params, logprobs=logprobs)
        llm.engine.intake.check(stem, self.params)
        self.tree = RolloutTree(stem, llm.tokenizer, config.token_budget)
        eos = llm.config.eos_ids
        self.brancher = Brancher(config.branch_on, llm.tokenizer, config.separator, config.min_prob, config.width, eos)
        self.rng = random.Random(config.tree_seed)
        self._stem_recorded = False
        self._running: dict[int, NewBranch] = {}
        self._scorer = ThreadPoolExecutor(1, "forerun-score")  # one at a time: score functions need not be thread-safe

    async def run(self) -> RolloutTree:
        try:
            while starts := self._plan_round():
                await gather_or_cancel(self._run(start) for start in starts)
                self._record_costs(starts)
        finally:
            self._scorer.shutdown(wait=False, cancel_futures=True)
        return self.tree

    # -- planning a round ----------------------------------------------------------------------------------------------

    @property
    def left(self) -> int:
        """Tokens of the budget that are not used. A stem that was cached before counts, too: the same call gives the
        same tree whatever was cached."""
        return self.config.token_budget - self.tree.cost.computed - self.tree.root.cost.shared

    def _prefill(self, length: int) -> int:
        """Tokens of a prompt of this length that run though all of it was computed before: the page with the last token
        is not shared."""
        return length - (length - 1) // self.page_size * self.page_size

    def _plan_round(self) -> list[NewBranch]:
        """Answers from the stem until there are `width` of them, then one more branch for every promising node: as many
        as the budget holds even where all reach the longest length, so that none is cut short."""
        starts = self._new_answers()
        left = self.left - sum(start.reserved for start in starts)
        for point in self._branch_points():
            reserved = self._prefill(len(self.tree.prefix(point.node, point.at)) + 1) + max(0, self._longest(point))
            if reserved <= left:
                left -= reserved
                starts.append(self._start(point, reserved))
        return starts

    def _new_answers(self) -> list[NewBranch]:
        root = self.tree.root
        longest, again = self._limit() - len(root.token_ids), self._prefill(len(root.token_ids))
        begun = [child.first_tokens(MAX_COMPARED_TOKENS) for child in root.children]
        group = SiblingGroup(self.config.min_distance, begun)
        starts: list[NewBranch] = []
        left, missing = self.left, self.config.width - len(root.children)
        while len(starts) < missing:
            first = not root.children
            prefill = len(root.token_ids) if first else again
            if prefill + longest > left and not first:
                break
            max_tokens = min(longest, left - prefill)  # a budget too small for one whole answer gives part of one
            node, reserved = self.tree.add(root, 1), prefill + max_tokens
            full_length = max_tokens == longest
            starts.append(NewBranch(node, list(root.token_ids), max_tokens, full_length, reserved, group))
            left -= reserved
        return starts

    def _limit(self) -> int:
        """Tokens that stem and answer may have together."""
        return min(len(self.tree.root.token_ids) + self.params.max_tokens, self.llm.engine.max_length)

    def _longest(self, point: BranchPoint) -> int:
        """Tokens that may follow a branch's first one."""
        return self._limit() - len(self.tree.prefix(point.node, point.at)) - 1

    def _branch_points(self) -> list[BranchPoint]:
        nodes = [node for node in self.tree.nodes if self._may_branch(node)]
        if self.config.score is not None:
            values = {node.id: value for node in nodes if (value := self.tree.value(node)) is not None}
            nodes = sorted((n for n in nodes if n.id in values), key=lambda n: -values[n.id])
            nodes = nodes[: max(1, round(self.config.keep * len(nodes)))]
        points = []
        for node in nodes:
            try:
                point = self.brancher.best(node, self.rng)
            except BadRequest as error:  # the caller's function failed: this node stays as it is
                node.error = error
                continue
            if point is not None:
                points.append(point)
        if self.config.score is None:
            points.sort(key=lambda point: -point.entropy)
        return _one_per_position(points)

    def _may_branch(self, node: RolloutNode) -> bool:
        if node is self.tree.root or node.generation >= self.config.depth or node.error is not None:
            return False
        return any(leaf.status == "finished" for leaf in node.leaves())

    def _start(self, point: BranchPoint, reserved: int) -> NewBranch:
        node, parent = point.node, point.node.parent
        assert parent is not None
        prompt, max_tokens = [*self.tree.prefix(node, point.at), point.token.token_id], self._longest(point)
        if point.at > 0:
            parent = self.tree.split(node, point.at)
        siblings = [child.first_tokens(MAX_COMPARED_TOKENS) for child in parent.children]
        new = self.tree.add(parent, node.generation + 1)
        new.forced, new.token_ids, new.logprobs = True, [point.token.token_id], [point.token]
        return NewBranch(new, prompt, max_tokens, True, reserved, SiblingGroup(self.config.min_distance, siblings))

    # -- running a round--------------------------------------------------------------------------------------------

    async def _run(self, start: NewBranch) -> None:
        node = start.node
        if start.max_tokens < 1:  # its first token is the last that an answer may have
            node.status, node.finish_reason = "finished", "length"
            await self._score(node)
            return
        seed = answer_seed(self.config.tree_seed, node.id)
        params = replace(self.params, max_tokens=start.max_tokens, seed=seed)
        start.branch = branch = Branch(start.prompt_ids, params, Choice("", node.token_ids, None, node.logprobs))
        self._running[node.id] = start
        start.group.add(node.id, node.token_ids)
        await run_branch(self.llm, branch, lambda _: self._check_progress(start))
        del self._running[node.id]
        self._stop(start.group.remove(node.id), "alike")
        node.finish_reason = branch.answer.finish_reason
        cut = node.finish_reason == "length" and not start.full_length
        node.status = start.status or ("truncated" if cut else "finished")
        if node.status == "finished":
            await self._score(node)

    async def _check_progress(self, start: NewBranch) -> None:
        """A branch has new tokens: stop it where its group is too similar, or where its score is too low."""
        self._stop(start.group.find_duplicates(), "alike")
        if self.config.prune_below is None or start.status is not None:
            return
        steps = len(step_starts(start.node.token_ids, self.llm.tokenizer, self.config.separator))
        if steps > start.scored_steps:
            start.scored_steps = steps
            value = await self._score(start.node)
            if start.status is None and (value is None or value < self.config.prune_below):
                self._stop([start.node.id], "pruned" if value is not None else "failed")

    def _stop(self, node_ids: list[int], status: BranchStatus) -> None:
        for node_id in node_ids:
            start = self._running[node_id]
            assert start.branch is not None
            start.status = start.status or status  # the first reason counts
            start.branch.stop(self.llm)

    async def _score(self, node: RolloutNode) -> float | None:
        """Score a trajectory while others run; None where that failed, which does not affect the others."""
        score = self.config.score
        if score is None:
            return None
        subject, what = self.tree.trajectory(node), f"the trajectory that ends in node {node.id}"
        loop = asyncio.get_running_loop()
        try:
            node.score = await loop.run_in_executor(self._scorer, checked_score, score, subject, what)
        except BadRequest as error:
            node.status, node.error, node.score = "failed", error, None
        return node.score

    def _record_costs(self, starts: list[NewBranch]) -> None:
        """Record what the round's branches cost. The first one computed the stem: that cost is the root's."""
        for start in starts:
            if start.branch is None:
                continue
            usage, prefill = start.branch.usage, start.branch.usage.computed_tokens
            if not self._stem_recorded:
                again = self._prefill(len(start.prompt_ids))
                own = min(prefill, again)
                self.tree.root.cost = Cost(prefill - own, 0, len(start.prompt_ids) - again - (prefill - own))
                self._stem_recorded, prefill = True, own
            start.node.cost = Cost(prefill, usage.completion_tokens, usage.cached_tokens)


def _one_per_position(points: list[BranchPoint]) -> list[BranchPoint]:
    """Of siblings that would branch at their common start, only the first one does."""
    kept: dict[tuple[int, int], BranchPoint] = {}
    for point in points:
        parent = point.node.parent
        assert parent is not None
        kept.setdefault((point.node.id, point.at) if point.at else (parent.id, 0), point)
    return list(kept.values())
