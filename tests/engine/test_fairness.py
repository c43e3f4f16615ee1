"""Which prompt runs next: shares of clients by weight, short prompts first, and no prompt that starves."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from forerun.core import SamplingParams
from forerun.engine.fairness import OLDEST_SHARE, FairShares, PromptLine, portion
from forerun.engine.sequence import Client, Phase, Request, Sequence


def sequence(tokens: int, client: Client | None = None, arrived: float = 0.0) -> Sequence:
    request = Request([1] * tokens, SamplingParams(), sink=lambda event: None, client=client or Client())
    request.arrived = arrived
    return Sequence(request, 0, 1)


def serve(shares: FairShares, prompts: list[Sequence], portions: int, size: int = 16) -> Counter[Sequence]:
    """Give out so many portions; sequences leave when their prompt is complete."""
    given: Counter[Sequence] = Counter()
    for _ in range(portions):
        shares.begin_step(prompts)
        line = PromptLine(shares, prompts)
        seq = line.next()
        count = min(size, seq.remaining)
        seq.computed += count
        given[seq] += count
        line.give(seq, count)
        if not seq.remaining:
            prompts.remove(seq)
        if not prompts:
            break
    return given


def test_a_short_prompt_passes_a_long_one():
    long, short = sequence(6000), sequence(30, arrived=1.0)
    given = serve(FairShares(), [long, short], 3)
    assert given[short] == 30


def test_the_oldest_prompt_has_a_quarter_however_many_short_ones_come():
    long, prompts = sequence(6000), list[Sequence]()
    shares, given = FairShares(), Counter[Sequence]()
    prompts.append(long)
    for number in range(400):
        prompts.append(sequence(16, arrived=1.0 + number))
        given += serve(shares, prompts, 1)
    assert given[long] == pytest.approx(400 * 16 * OLDEST_SHARE, rel=0.05)


def test_a_short_prompt_waits_for_at_most_one_portion_of_the_oldest():
    shares, long = FairShares(), sequence(100_000)
    for number in range(50):
        short, prompts = sequence(16, arrived=1.0 + number), [long]
        prompts.append(short)
        assert serve(shares, prompts, 2)[short] == 16


def test_clients_have_shares_by_weight():
    heavy, light = Client("heavy", 3.0), Client("light", 1.0)
    prompts = [sequence(100_000, heavy), *(sequence(1000, light) for _ in range(50))]
    given = serve(FairShares(), prompts, 400)
    by_client = Counter({c: sum(n for seq, n in given.items() if seq.request.client == c) for c in (heavy, light)})
    assert by_client[heavy] == pytest.approx(3 * by_client[light], rel=0.02)


def test_a_flood_of_one_client_does_not_delay_another():
    flood, other = Client("flood"), Client("other")
    prompts = [sequence(2000, flood, arrived=number) for number in range(200)]
    shares = FairShares()
    serve(shares, prompts, 100)
    late = sequence(160, other, arrived=1000.0)
    prompts.append(late)
    assert serve(shares, prompts, 20)[late] == 160  # every second portion at least


def test_idling_earns_nothing():
    busy, back = Client("busy"), Client("back")
    shares, prompts = FairShares(), [sequence(100_000, busy)]
    serve(shares, [sequence(16, back)], 1)
    serve(shares, prompts, 500)
    prompts.append(sequence(100_000, back))
    given = serve(shares, prompts, 100)
    assert sorted(given.values()) == [800, 800]


def test_answers_count_too():
    talker, reader = Client("talker"), Client("reader")
    shares, prompts = FairShares(), [sequence(10_000, talker), sequence(10_000, reader)]
    shares.begin_step(prompts)
    shares.charge(talker, 320)  # tokens of its streams
    given = serve(shares, prompts, 20)
    assert given[prompts[0]] == 0 and given[prompts[1]] == 320


def test_a_preempted_answer_goes_on_before_new_prompts():
    preempted, new = sequence(500), sequence(20)
    preempted.tokens.append(7)
    assert PromptLine(FairShares(), [new, preempted]).next() is preempted


def test_what_is_cached_does_not_count_while_a_sequence_waits():
    known, unknown = sequence(5000), sequence(300)
    known.expected_cached = 4990
    assert known.phase is Phase.WAITING and known.prompt_left == 10
    assert PromptLine(FairShares(), [unknown, known]).next() is known
    known.enter(Phase.PREFILLING)
    assert known.prompt_left == 5000  # from now on what was computed counts


def test_a_line_in_which_prompts_come_and_go():
    """Against the least of all that are left, portion by portion."""
    draw, shares = random.Random(3), FairShares()
    prompts = [sequence(draw.randrange(20, 60), arrived=draw.random()) for _ in range(40)]
    for seq in prompts:
        seq.expected_cached = draw.choice([0, 16])
    line, left = PromptLine(shares, prompts), list(prompts)
    while line:
        owed = shares.account(Client()).owed >= 16
        seq = line.next()
        assert seq is min(left, key=lambda s: s.request.arrived if owed else (s.prompt_left, s.request.arrived))
        if seq.phase is Phase.WAITING:
            seq.enter(Phase.PREFILLING)  # more is left than it seemed where something was expected to be cached
            line.admitted(seq)
        line.give(seq, 16)
        if draw.random() < 0.5:
            line.leave(seq)
            left.remove(seq)
        if draw.random() < 0.1:
            gone = set(draw.sample(left, len(left) // 8))
            for seq in [s for s in line if s in gone]:
                line.leave(seq)
            left = [s for s in left if s not in gone]
    assert not left


def test_portions():
    assert [portion(budget) for budget in (4, 64, 128, 512, 8192)] == [16, 16, 16, 64, 1024]
