"""Drafted steps that a device runs one after the other: which sequences can, whether it pays, what came of each.

Beside `Speculator`, whose drafters and controller it uses: there the host builds every draft. While a step is on its
way free drafters run on what is known, and where they would give more the host drafts again. Knows no pages but those
of a task, no scheduler and no device's memory.
"""

from __future__ import annotations

from forerun.core import Tally
from forerun.core.drafted import MAX_DRAFTED_SEQUENCES, DraftedDevice, DraftedTokens, rows_of
from forerun.decode.control.controller import PaidPlan
from forerun.decode.drafter_pool import DraftTask, SpeculationState, drafted_batch, mean_context
from forerun.decode.drafters.parallel import ParallelDrafter
from forerun.decode.speculator import Speculator

PAUSE_TOKENS = 16  # of an answer, after there was no room for a step


class DeviceDrafting:
    def __init__(self, speculator: Speculator) -> None:
        self._speculator, self._controller = speculator, speculator.controller

    @property
    def drafter(self) -> ParallelDrafter | None:
        """What drafts so, where the models and the device allow it."""
        found = self._speculator.drafter_pool.made(ParallelDrafter.name)
        return found if isinstance(found, ParallelDrafter) and found.steps is not None else None

    @property
    def device(self) -> DraftedDevice | None:
        return None if self.drafter is None else self.drafter.steps

    @property
    def depth(self) -> int:
        """Positions that a step drafts: rows of a launch cost the same, used or not."""
        return 0 if self.drafter is None else self.drafter.tokens_per_round

    def can(self, state: SpeculationState) -> bool:
        """Whether steps of this sequence need nothing of the host: the likeliest tokens, verified without loss."""
        params = state.context.params
        paid = [name for name in state.drafter_names if name in self._controller.drafters]
        return (
            params.greedy
            and paid == [ParallelDrafter.name]
            and state.verifier.lossless
            and not state.fixed_depth
            and self.device is not None
        )

    def mark(self, tasks: list[DraftTask]) -> list[DraftTask]:
        """The same tasks, which know by how many rows of a launch each can draft so."""
        able = 0 < len(tasks) <= MAX_DRAFTED_SEQUENCES and all(t.max_nodes and self.can(t.spec_state) for t in tasks)
        for task in tasks:
            task.device_rows = rows_of(len(tasks)) if able else 0
        return tasks

    def goes_on(self, tasks: list[DraftTask]) -> PaidPlan | None:
        """The plan for the steps behind the one on its way; None: the host is to decide again."""
        stats = [task.spec_state.stats for task in tasks]
        self._controller.idle_s(stats, mean_context(tasks))
        self._speculator.draft_beside(self.mark(tasks))
        return self._speculator.plan_on_device(tasks, 0.0)

    def read_up(self, tasks: list[DraftTask], plan: PaidPlan) -> list[list[int]] | None:
        """The draft model reads what it has not; of each sequence the last tokens that are left for the first step.
        None: a long prompt needs another step."""
        drafter, left = self.drafter, list[list[int] | None]()
        assert drafter is not None
        self._controller.record_plan(plan)
        for task in tasks:
            try:
                left.append(drafter.read_up(task.request(drafter.tokens_per_round), rows_of(len(tasks)) // 2))
            except Exception as error:  # it drafts for this sequence no longer
                self._speculator.drafter_pool.drop(drafter.name, task, f"{type(error).__name__}: {error}")
                left.append(None)
        return None if any(tokens is None for tokens in left) else [tokens for tokens in left if tokens is not None]

    def pause(self, tasks: list[DraftTask]) -> None:
        """There was no room for a step of these."""
        for stats in (task.spec_state.stats for task in tasks):
            stats.own[ParallelDrafter.name].skip_until = stats.tokens + PAUSE_TOKENS

    def observe(self, tasks: list[DraftTask], plan: PaidPlan, seconds: float, first: bool) -> None:
        """What a step of these took; `first` of several."""
        stats = [task.spec_state.stats for task in tasks]
        context, foreseen_s = mean_context(tasks), sum(plan.start_s) if first else 0.0
        if foreseen_s:
            batch = drafted_batch(self.mark(tasks), context, 0.0, rows_of(len(tasks)))
            step_s = self._controller.on_device_s(plan.drafter, batch)
            self._controller.observe_start(plan.drafter, foreseen_s, max(0.0, seconds - step_s))
        self._controller.observe_on_device(stats, plan, context, seconds, first)
        self._speculator.totals.steps += len(tasks)
        self._speculator.totals.verify_s += seconds

    def record(self, state: SpeculationState, result: DraftedTokens, emitted: list[int]) -> None:
        """What a step gave one sequence, of which so much became part of the answer."""
        drafter, accepted = self.drafter, min(len(result.tokens) - 1, len(emitted))
        assert drafter is not None
        before = len(state.context.tokens) - len(emitted)
        drafter.ran(state.seq_id, before)
        self._controller.record_tokens(state.stats, len(emitted))
        self._controller.record_on_device(state.stats, drafter.name, result.depth, accepted, len(emitted))
        self._speculator.resolve_beside(state, len(emitted))
        usage = state.usage
        state.count_step(accepted, self._controller.last_why)
        usage.verifier, usage.lossless, usage.distance = state.verifier.name, True, state.verifier.spent
        for counted in (usage, self._speculator.totals):
            counted.drafted += result.nodes
            counted.accepted += accepted
            tally = counted.drafters.setdefault(drafter.name, Tally())
            tally.drafted += result.nodes
            tally.accepted += accepted
