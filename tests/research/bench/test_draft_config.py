"""`forerun bench config`: the simulation against hand-counted steps, bytes, choices, and a run on tiny models."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forerun import LLM, BadRequest
from forerun_research.bench import draft_config as bench
from forerun_research.bench.delay_proxy import DelayProxy
from forerun_research.commands.bench import app
from tests.serve.test_draft_server import running

TARGET = bench.TargetProfile((1.0, 1.1, 1.2, 1.3), (((1,), (2, 3, 4, 5)),), 512)
DRAFT = bench.DraftProfile("small", "auto", 0.1, ((True, True, False, True),))


def test_a_simulated_answer_takes_the_steps_that_were_counted_by_hand() -> None:
    """Depth 2: two accepted and the wrong third, then one accepted and the answer's end."""
    tokens, accepted, steps, wall_s, busy_s = bench.simulate(DRAFT, TARGET, 2, 0.5, bench.ORDINARY)
    assert (tokens, accepted, steps) == (4, 3, 2)
    assert wall_s == pytest.approx(2 * (0.5 + 0.2 + 1.2)) and busy_s == pytest.approx(0.4)


def test_in_parallel_mode_a_hit_hides_the_round_trip() -> None:
    sure = replace(DRAFT, matches=((True,) * 6,))
    ordinary = bench.simulate(sure, TARGET, 2, 0.5, bench.ORDINARY)
    parallel = bench.simulate(sure, TARGET, 2, 0.5, bench.PARALLEL)
    assert parallel[:3] == ordinary[:3] == (6, 4, 2)
    assert ordinary[3] - parallel[3] == pytest.approx(0.7)  # the second draft was here when the first was verified


def test_bytes_are_those_of_real_frames() -> None:
    one, two = (bench.cycle_bytes(depth, 0.0, 8, 512) for depth in (1, 2))
    assert two - one == 4  # a token of two bytes, a parent, a probability
    assert bench.cycle_bytes(1, 0.0, 16, 512) == one + 1
    assert bench.cycle_bytes(1, 3.0, 8, 200_000) == one + 1 + 1 + 3 * 3


def test_plain_decoding_is_chosen_where_no_draft_pays() -> None:
    plan = bench.ConfigBench("target", ("small",), depths=(2,), rtt_ms=60_000.0)
    rows = [bench.plain_row(plan, TARGET), *bench.rows_of(plan, TARGET, [DRAFT])]
    assert {row.depth for row in bench.choices(rows).values()} == {0}
    near = replace(plan, rtt_ms=0.0)
    found = bench.choices([bench.plain_row(near, TARGET), *bench.rows_of(near, TARGET, [DRAFT])])
    assert found["goodput"].depth == 2 and found["bytes"].prob_bits == 8


def test_a_draft_server_is_profiled_where_it_runs(tiny_folder: Callable[[str], Path]) -> None:
    """Behind 30 ms, on the same model as the target's: every token is right."""
    folder = str(tiny_folder("llama"))
    with (
        LLM(folder, quiet=True, max_model_len=1024) as llm,
        running(llm) as (server, port),
        DelayProxy(port, 0.03) as proxy,
    ):
        drafts = (f"remote:127.0.0.1:{proxy.port}",)
        plan = bench.ConfigBench(folder, drafts, depths=(2,), prompts=2, tokens=6, rtt_ms=900.0)
        result = bench.run(plan)
        while server.worker.num_sequences:  # each is closed, or its connection
            threading.Event().wait(0.01)
        with pytest.raises(BadRequest, match="no drafts from"):
            bench.run(replace(plan, drafts=("remote:127.0.0.1:1",)))
    assert 0.03 <= result["network_s"][drafts[0]] < 0.3  # not the stated round trip
    rows = [row for row in result["rows"] if row["depth"]]
    assert rows and all(row["accepted_a_step"] > 1.0 and row["bytes_per_accepted"] for row in rows)


def test_the_command_profiles_tiny_models(tiny_folder: Callable[[str], Path]) -> None:
    folder = str(tiny_folder("llama"))
    given = [
        "-m",
        folder,
        "-d",
        folder,
        "-w",
        "float32",
        "--prompts",
        "2",
        "--tokens",
        "6",
        "--depth",
        "3",
        "--threads",
        "1",
    ]
    done = CliRunner().invoke(app, ["config", *given, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert {row["accepted_a_step"] for row in result["rows"] if row["depth"]} != {0.0}
    assert set(result["choice"]) == {"goodput", "cost", "bytes"} and len(result["rows"]) == 5
    drawn = CliRunner().invoke(app, ["config", *given])
    assert drawn.exit_code == 0 and "round trip 0 ms" in drawn.stdout
