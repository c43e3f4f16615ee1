"""Plans of steps that draft on a device: all sequences together, at one cost, and only where reading is won back."""

from forerun.decode.control.cost import CostCurve
from forerun.decode.control.depth import DepthPlan, StepPlan
from forerun.decode.control.selection import Selection

AHEAD = [0.9] * 8


def step_plan(sequences: int, step_s: float) -> StepPlan:
    target, rounds = CostCurve({1: 1e-3, 32: 1.4e-3}), CostCurve({1: 6e-4, 32: 9e-4})
    rounds.tokens_per_round = 12
    free = Selection([[] for _ in range(sequences)], [[]] * sequences, [1.0] * sequences, 1e-3)
    return StepPlan(DepthPlan(target, rounds, 100, free, 0.0), step_s, 16 if sequences <= 2 else 8)


def best(plan: StepPlan, start_s: list[float], remaining: list[float], limit: int = 15) -> dict[int, int]:
    n = len(start_s)
    return plan.best([AHEAD] * n, [[]] * n, [limit] * n, start_s, remaining).rounds


def test_steps_pay_by_all_their_tokens_over_what_they_take() -> None:
    assert best(step_plan(1, 2e-3), [0.0], [100])[0] == 8
    assert not best(step_plan(1, 7e-3), [0.0], [100])  # 6.1 tokens take 6.1 ms plainly
    assert set(best(step_plan(4, 2e-3), [0.0] * 4, [100] * 4).values()) == {5}  # rows of four sequences


def test_reading_is_won_back_by_the_tokens_to_come() -> None:
    plan = step_plan(1, 2e-3)  # a token saves 0.67 ms
    assert best(plan, [1e-2], [20]) and not best(plan, [1.5e-2], [20])


def test_none_draft_where_one_of_them_may_not_read_yet_or_ends() -> None:
    plan = step_plan(2, 2e-3)
    assert best(plan, [1e-3, 1e-3], [100, 100])
    assert not best(plan, [1e-3, 1e-3], [100, 0])
    assert best(plan, [1e-3, 0.0], [100, 0])  # it has read
    assert not best(plan, [0.0, 0.0], [100, 100], limit=0)


def test_a_token_of_such_steps_takes_its_part_of_one() -> None:
    assert step_plan(1, 2e-3).token_s(AHEAD) == 2e-3 / (1.0 + sum(0.9**depth for depth in range(1, 9)))
    assert step_plan(4, 2e-3).token_s(AHEAD) > step_plan(1, 2e-3).token_s(AHEAD)  # fewer rows for each
