"""Whole answers on a simulated clock, with costs like one H200's and like two cores': never far below plain decoding,
near the best single drafter, from the first request on."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from forerun.core import Draft, Verdict
from forerun.decode.control.controller import EXPLORE_FREE_SHARE, EXPLORE_PAID_SHARE, FIRST_TOKENS, Controller
from forerun.decode.control.cost import CostCurve
from forerun.decode.control.decision import DraftedBatch
from forerun.decode.drafter_pool import DraftTask
from forerun.decode.drafters.base import MAX_CATCH_UP_TOKENS
from forerun.decode.speculator import Speculator
from tests.decode.simulator import (
    AUTO,
    CATEGORIES,
    CORES,
    FAST_CORES,
    H200,
    H200_HOST,
    Category,
    Machine,
    Text,
    World,
    plain_s,
    single_s,
)

MACHINES = {"h200": H200, "h200, its host": H200_HOST, "cores": CORES, "fast cores": FAST_CORES}
SEEDS = range(5)

# Of the best single drafter, where the goal of 0.95 is missed in the first request of a process. Edits on the H200: the
# host is one token behind where it runs ahead (a draft made beside a step has one token less), stretches that are
# copied begin and end a dozen times, and the draft model has read the prompt before the first of them, for a tenth of
# so short a time. Chat: one unlucky draft ends it, and reading the prompt waits until an answer of a kind that is often
# short has lasted. Maths: the same where reading takes a tenth of the answer's time; without a trained drafter its
# acceptance is a guess.
MISSED = {
    ("h200", "code"): 0.93,
    ("h200", "edits"): 0.73,
    ("h200, its host", "code"): 0.94,
    ("h200, its host", "edits"): 0.78,
    ("h200", "maths"): 0.88,
    ("h200, its host", "maths"): 0.92,
    ("h200", "chat"): 0.94,
    ("cores", "code"): 0.93,
    ("fast cores", "code"): 0.92,
    ("fast cores", "maths"): 0.92,
    ("fast cores", "chat"): 0.9,
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("drafters", [AUTO, ("lookup", "model")], ids=["trained", "draft model"])
def test_a_first_request_is_never_below_plain_and_near_the_best_drafter(drafters: tuple[str, ...], machine: str):
    costs = MACHINES[machine]
    gained, possible = [], []
    for name, category in CATEGORIES.items():
        texts = [Text(category, seed) for seed in SEEDS]
        plain = sum(plain_s(costs, texts))
        auto = sum(World(costs, drafters).answer([text])[0] for text in texts)  # a fresh start each
        oracle = min(plain, *single_s(costs, texts, drafters).values())
        assert auto <= plain / 0.98, name
        assert auto <= oracle / MISSED.get((machine, name), 0.95), name
        gained.append(plain / auto)
        possible.append(plain / oracle)
    least = 1.2 if machine == "h200, its host" else 1.25  # an untrained draft model gains nothing there
    assert fmean(possible) >= least  # what there is to gain here
    assert fmean(gained) >= least
    assert fmean(gained) >= (0.92 if machine.startswith("h200") else 0.94) * fmean(possible)  # edits, as above


@pytest.mark.parametrize("machine", MACHINES)
def test_what_was_learnt_makes_later_requests_faster_and_never_slower(machine: str):
    for name, category in CATEGORIES.items():
        world = World(MACHINES[machine], AUTO)
        for seed in range(3):
            world.answer([Text(category, 100 + seed)])
        texts = [Text(category, 200 + seed) for seed in range(4)]
        assert sum(plain_s(MACHINES[machine], texts)) / sum(world.answer([t])[0] for t in texts) >= 0.98, name


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("size", [4, 16, 64])
@pytest.mark.parametrize("name", ["mixed", "code", "chat", "edits"])
def test_batches_are_never_slower_and_no_sequence_pays_for_the_others(name: str, size: int, machine: str):
    mixed = list(CATEGORIES.values()) if name == "mixed" else [CATEGORIES[name]]
    texts = [Text(mixed[i % len(mixed)], i, num=96 if size == 4 else 64) for i in range(size)]
    plain = World(MACHINES[machine], ("lookup",)).answer(texts, plain=True)
    auto = World(MACHINES[machine], AUTO).answer(texts)
    # 0.97, but for four mixed ones on the H200, where one that ends sooner costs the others 3.6%
    assert max(plain) / max(auto) >= (0.96 if (name, size, machine) == ("mixed", 4, "h200") else 0.97)
    assert min(before / after for before, after in zip(plain, auto, strict=True)) >= 0.95


def test_one_sequence_that_is_never_drafted_for_does_not_wait_for_the_others():
    hopeless = Category("text", 0.0, 0.0, (0.01, 0.0, 4))
    texts = [Text(CATEGORIES["edits"], 1, num=96), *[Text(hopeless, seed, num=96) for seed in range(3)]]
    plain = World(CORES, ("lookup",)).answer(texts, plain=True)
    auto = World(CORES, AUTO).answer(texts)
    assert all(after <= before / 0.95 for before, after in zip(plain[1:], auto[1:], strict=True))


# -- exploring ---------------------------------------------------------------------------------------------------------


def slow_lookup(machine: Machine, factor: float) -> Machine:
    return replace(machine, run_s=factor * machine.run_s)


def test_drafters_that_never_help_cost_a_known_share():
    useless = Category("text", 0.0, 0.0, (0.01, 0.0, 4), tokens=400)
    for machine in (H200, CORES, slow_lookup(H200, 10.0)):
        world = World(machine, AUTO)
        world.answer([Text(useless, 1)])  # learns that
        spent = sum(plain_s(machine, [Text(useless, 2)])) * (EXPLORE_PAID_SHARE + EXPLORE_FREE_SHARE)
        state_s = world.answer([Text(useless, 2)])[0]
        assert state_s <= sum(plain_s(machine, [Text(useless, 2)])) + 1.6 * spent  # the host's time for it included


def test_nothing_is_explored_in_an_answers_first_tokens():
    """Drafters whose lower bound does not pay run only later, unless they paid for this kind of prompt before."""
    machine = replace(
        slow_lookup(H200, 20.0), ahead=False
    )  # a run costs most of a step: more than the lower bound promises
    category = Category("text", 0.3, 0.3, (0.9, 0.9, 6))
    world = World(machine, ("lookup",))
    runs: list[int] = []
    drafter = world.spec.drafter_pool._drafters["lookup"]
    propose = drafter.propose
    drafter.propose = lambda requests: (  # type: ignore[method-assign]
        runs.extend(len(r.tokens) - r.context.num_prompt for r in requests),  # type: ignore[func-returns-value]
        propose(requests),
    )[1]
    world.answer([Text(category, 1)])
    assert [at for at in runs if at < FIRST_TOKENS] == runs[:2]  # the first reads, the second shows what a run takes
    assert len(runs) > 2
    assert not world.controller.acceptance.records["lookup"].has_paid("numbers")
    assert world.controller.acceptance.records["lookup"].has_paid("text")  # then the budget is all that limits it


def test_a_draft_model_is_not_woken_for_answers_that_will_be_over():
    for tokens, wakes in ((16, False), (128, True)):
        text = Text(Category("code", 0.95, 0.85, (0.01, 0.0, 4), prompt=100, tokens=tokens), 1)
        world = World(FAST_CORES, AUTO)
        world.answer([text])
        assert bool(world.read) == wakes
    short = Category("code", 0.95, 0.85, (0.01, 0.0, 4), prompt=100, tokens=20)
    world = World(FAST_CORES, AUTO)
    for seed in range(12):  # answers of this kind turn out to be short, though they may be long
        text = Text(short, seed)
        with_limit = world.open
        world.open = lambda text, open=with_limit: _unlimited(open(text))  # type: ignore[assignment,misc]
        world.answer([text])
        world.open = with_limit  # type: ignore[method-assign]
    world.read.clear()
    world.answer([Text(short, 50)])
    assert not world.read


def _unlimited(state):
    state.stats.max_tokens = 4096
    return state


# -- costs -------------------------------------------------------------------------------------------------------------


def test_rounds_that_take_longer_than_was_timed_are_noticed():
    slow = replace(CORES, rounds={n: 6.0 * s for n, s in CORES.rounds.items()})
    wrong = Controller(CostCurve(CORES.target), {"model": CostCurve(CORES.rounds), "parallel": CostCurve(CORES.rounds)})
    world = World(slow, AUTO, wrong)
    for seed in range(4):
        world.answer([Text(CATEGORIES["code"], seed)])
    text = Text(CATEGORIES["code"], 9)
    assert world.answer([text])[0] <= sum(plain_s(slow, [text])) / 0.97


def test_a_prompt_that_is_read_in_parts_is_as_dear_as_before(monkeypatch: pytest.MonkeyPatch):
    """Of a prompt of four parts each step reads one, and is compared with what one was expected to take."""
    observe, factors = Controller.observe_start, list[float]()

    def observed(controller: Controller, drafter: str, foreseen_s: float, seconds: float) -> None:
        observe(controller, drafter, foreseen_s, seconds)
        factors.append(controller.drafters[drafter].start_factor)

    monkeypatch.setattr(Controller, "observe_start", observed)
    world = World(H200, AUTO)
    for seed in SEEDS:
        world.answer([Text(replace(CATEGORIES["code"], prompt=2048, tokens=1500), seed)])
    start_s, token_s = H200.read_s
    part_s = world.controller.drafters["parallel"].seconds(MAX_CATCH_UP_TOKENS)
    assert len(factors) >= 4 * len(SEEDS)
    assert min(factors) > 0.8 * (start_s + token_s * MAX_CATCH_UP_TOKENS) / part_s


def test_a_host_that_is_slow_with_drafts_is_noticed():
    slow = replace(H200, draft_host_s=6e-3)
    world = World(slow, AUTO)
    world.answer([Text(CATEGORIES["code"], 1)])
    text = Text(CATEGORIES["code"], 2)
    assert world.answer([text])[0] <= sum(plain_s(slow, [text])) / 0.97


def test_every_step_is_explained():
    world = World(H200, AUTO)
    world.answer([Text(CATEGORIES["code"], 1)])
    decisions = world.controller.stats()["decisions"]
    assert decisions and all(d["why"] and d["plain_s"] > 0.0 and d["seconds"] > 0.0 for d in decisions)
    drafted = [d for d in decisions if d["drafters"]]
    assert any("parallel" in d["drafters"] and d["depth"] > 1 and d["rows"] > 1 for d in drafted)
    assert all(d["rows"] == d["sequences"] for d in decisions if not d["drafters"])


def test_an_answers_usage_explains_its_steps():
    world = World(H200, AUTO)
    text = Text(CATEGORIES["code"], 1)
    opened = []
    open_one = world.open
    world.open = lambda text: opened.append(open_one(text)) or opened[-1]  # type: ignore[assignment,func-returns-value]
    taken_s = world.answer([text])[0]
    usage = opened[0].usage
    assert sum(usage.decisions.values()) == len(usage.lengths)
    assert usage.decisions["parallel pays by lower bound"] > 5
    assert usage.plain_s == pytest.approx(sum(plain_s(H200, [text])), rel=0.15)
    assert usage.plain_s > 1.5 * taken_s


def test_a_drafter_that_pays_is_planned_for_where_the_host_never_waits() -> None:
    """It was asked only in time that the host would have waited: on a host as slow as the device, never."""
    machine = replace(H200, host_s=(1.3e-3, 30e-6))
    texts = [Text(CATEGORIES["code"], seed) for seed in range(6)]
    world = World(machine, AUTO)
    assert sum(plain_s(machine, texts)) > 1.05 * sum(world.answer([text])[0] for text in texts)


def test_what_was_drafted_beside_a_step_is_not_drafted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that comes decides: what follows it is verified, and where another came the next step is plain."""
    run, left, used = Speculator._run_free, list[int](), list[int]()

    def counted(spec: Speculator, tasks: list[DraftTask], beside: bool = False) -> None:
        if spec._left and not beside:  # the step that was not launched for the sake of a draft
            left.append(len(tasks))
        run(spec, tasks, beside)

    monkeypatch.setattr(Speculator, "_run_free", counted)
    world = World(H200, ("lookup",))
    select = world.controller.select
    world.controller.select = lambda batch: used.append(1) or select(batch)  # type: ignore[func-returns-value,method-assign]
    world.answer([Text(CATEGORIES["summary"], 3)])
    assert left and not any(left)
    assert used


def test_a_drafter_that_gives_less_than_was_planned_is_left_alone_unless_it_is_named() -> None:
    """A sum of measured parts may be too high all the same: what came in the time that steps took decides."""
    world = World(H200_HOST, ("parallel",))
    state = world.open(Text(CATEGORIES["code"], 1))
    controller, batch = world.controller, DraftedBatch([state.stats], [Draft()], [10], 0)
    assert controller.plan_rounds(batch, "parallel", [0.0]) is not None
    for _ in range(60):
        controller.acceptance.paid_gains.add(state.stats.kind, 2.0, 5.0)
    state.stats.explored_paid_s = 1.0  # nothing is left for exploring
    assert controller.plan_rounds(batch, "parallel", [0.0]) is None
    state.stats.named = True
    assert controller.plan_rounds(batch, "parallel", [0.0]) is not None


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("accepted", [0.15, 0.45])
def test_a_file_whose_acceptance_is_wrong_for_a_text_is_found_out(accepted: float, machine: str) -> None:
    """The file has 0.8 for code: a first answer pays for reading and some drafts, and the ones after it for less."""
    wrong = Category("code", accepted, accepted, (0.01, 0.0, 4), tokens=256)
    world, costs = World(MACHINES[machine], AUTO), MACHINES[machine]
    ratios = [sum(plain_s(costs, [Text(wrong, n)])) / world.answer([Text(wrong, n)])[0] for n in range(6)]
    assert min(ratios) >= 0.935 and ratios[-1] >= 0.95


def test_what_a_model_drafted_too_is_no_gain_of_a_free_drafter() -> None:
    world = World(H200_HOST, ("lookup", "parallel"))
    state = world.open(Text(CATEGORIES["code"], 1))
    chain = Draft.chain([7, 8, 9], [0.9] * 3, "parallel")
    for models, gained in (([], 2.0), ([chain], 0.0)):
        state.stats.own.clear()
        state.drafts = [*models, Draft.chain([7, 8], [0.9] * 2, "lookup")]
        state.free_run_s = {"lookup": 1e-4}
        world.spec.record_outcome(state, chain, Verdict([0, 1, 2], 10), [7, 8, 9, 10])
        assert state.stats.own["lookup"].run_tokens == gained


def test_where_the_host_never_waits_a_batch_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(H200, AUTO)
    states = [world.open(Text(CATEGORIES["edits"], seed)) for seed in range(4)]
    ran: list[bool] = []
    monkeypatch.setattr(Speculator, "_run_free", lambda spec, tasks, beside=False: ran.append(beside))
    monkeypatch.setattr(world.controller.host, "idle", lambda sequences: 0.0)
    assert not world.spec.should_leave(world._tasks(states, 2)) and not ran
    assert "no time" in world.controller.last_why


def test_a_plan_holds_for_some_steps_of_one_sequence() -> None:
    """Planning takes the host as long as a drafter's run, and what it goes by changes slowly."""
    world, planned, drafted = World(H200_HOST, ("parallel",)), list[int](), list[int]()
    plan, propose = world.controller.plan_rounds, world.spec.drafter_pool.propose
    world.controller.plan_rounds = lambda *given: planned.append(1) or plan(*given)  # type: ignore[func-returns-value,method-assign]
    world.spec.drafter_pool.propose = lambda *given: drafted.append(1) or propose(*given)  # type: ignore[func-returns-value,method-assign]
    world.answer([Text(CATEGORIES["code"], 3)])
    assert len(drafted) > 12 and len(planned) < 0.7 * len(drafted)
