"""The check itself: sound code passes, and each planted fault is caught by the part that is there for it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from forerun.checks import Finding
from forerun.checks.lossless import sampled as lossless_sampled
from forerun.checks.lossless.exact import check_conditional, check_exact
from forerun.checks.lossless.forced_drafting import registered_drafter
from forerun.checks.lossless.greedy import check_greedy
from forerun.checks.lossless.noise import compare
from forerun.checks.lossless.run import check_lossless
from forerun.checks.lossless.sampled import check_sampled
from forerun.core import ROOT, Draft, Verdict
from forerun.decode.drafters import DraftRequest, registered
from forerun.decode.drafters.model import ChainDrafter
from forerun.decode.sampling import Rng
from forerun.decode.verifiers import LOSSLESS
from forerun.decode.verifiers.base import TargetView, Verifier
from forerun.engine.engine import Engine
from forerun.engine.sequence import ScheduledSequence
from forerun.errors import BadRequest
from forerun.llm import LLM
from forerun.models.execution.runner import Runner, Span
from forerun.params import SamplingParams
from tests import tiny

PROMPTS = [[5, 6, 7, 8] * 5, list(range(20, 60)), [300, 301, 302]]
TOKENS = 20


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORERUN_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def folder(home: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write_folder(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, draft_model=folder, dtype="float32", threads=1, kv_cache_tokens=4096, quiet=True) as opened:
        yield opened


def failed(findings: Iterator[Finding]) -> list[str]:
    return [finding.name for finding in findings if not finding.passed]


# ---- sound code passes ----


def test_conditional_grammars_have_the_law_of_the_definition() -> None:
    finding = check_conditional()
    assert finding.passed and finding.data["finite"] < 1e-12 and finding.data["rejection"] < 1e-12


def test_every_drafter_is_exact_with_every_verifier(home: None) -> None:
    names = [name for name in registered() if name not in ("model", "self")]  # these two take ten seconds
    findings = list(check_exact(drafters=names))
    assert [finding.name for finding in findings] == names
    assert all(finding.verdict == "pass" for finding in findings), findings
    assert all(set(finding.data["differences"]) == set(LOSSLESS) for finding in findings)


def test_a_remote_drafter_is_exact_whatever_its_server_sends(home: None) -> None:
    (finding,) = check_exact(drafters=["remote, lying"])
    assert finding.verdict == "pass" and finding.data["drafts"] > 50, finding
    assert set(finding.data["differences"]) == set(LOSSLESS)


def test_the_whole_check_passes_on_a_sound_engine(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.checks.lossless.run.check_exact", lambda say: check_exact(say, ["lookup"]))
    monkeypatch.setattr(lossless_sampled, "MATCHED_SEEDS", 6)
    said: list[str] = []
    options: dict[str, Any] = {"weights": "float32", "threads": 1, "prompts": 2, "tokens": 12, "samples": 64}
    findings = list(check_lossless(folder, folder, temperature=0.5, on_progress=said.append, **options))
    assert [f for f in findings if not f.passed] == []
    assert {f.part for f in findings} == {"exact", "sampled", "greedy"}
    names = {f.name for f in findings if f.checked}
    assert {"model, match", "sketch, rejection", "sketch, traversal", "model, rejection", "model, batch of 2"} <= names
    assert "right and wrong drafts, one by one" in names and said


def test_a_temperature_of_zero_is_refused(folder: str) -> None:
    with pytest.raises(BadRequest, match="temperature is 0"):
        next(check_lossless(folder, temperature=0.0))


# ---- planted faults: distribution ----


class Wishful(Verifier):
    """Rejection sampling without its residual: what follows a rejection is drawn as if nothing had been tried."""

    name = "wishful"
    uses_proposals = True

    def verify(self, draft: Draft, target: TargetView, rng: Rng) -> Verdict:
        children, node, path = draft.children(), ROOT, list[int]()
        while True:
            child = next(iter(children.get(node, [])), None)
            if child is None:
                return Verdict(path, rng.pick(target.probs(node)))
            token, p, q = draft.tokens[child], target.probs(node), draft.proposals.get(node)
            if not rng.flip(min(1.0, float(p[token]) / (1.0 if q is None else float(q[token])))):
                return Verdict(path, rng.pick(p))
            node = child
            path.append(child)


class Tepid(ChainDrafter):
    """Draws at another temperature than it says."""

    name = "tepid"

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        drafts = super().propose(requests)
        for draft in drafts:
            draft.proposals = {node: torch.softmax(q.log() * 2.0, -1) for node, q in draft.proposals.items()}
        return drafts


def test_acceptance_without_the_residual_is_caught_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSLESS, "wishful", Wishful)
    for finding in check_exact(drafters=["lookup", "model-chain"]):
        worst = {name: max(found.values()) for name, found in finding.data["differences"].items()}
        assert not finding.passed and worst.pop("wishful") > 1e-3
        assert max(worst.values()) < 1e-9 and "with wishful" in finding.detail


def test_a_draft_that_ignores_the_temperature_is_caught_exactly() -> None:
    with registered_drafter(Tepid):
        (finding,) = check_exact(drafters=["tepid"])
    worst = {name: max(found.values()) for name, found in finding.data["differences"].items()}
    assert not finding.passed
    assert worst["match"] < 1e-9  # draws nothing
    assert min(worst[name] for name in ("rejection", "block", "traversal", "transport")) > 1e-3
    assert "tepid" not in registered()


def test_both_are_caught_by_sampling(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossless_sampled, "MATCHED_SEEDS", 4)
    monkeypatch.setitem(LOSSLESS, "wishful", Wishful)
    for name in ("traversal", "block", "transport"):  # seconds each, and no part of this
        monkeypatch.delitem(LOSSLESS, name)
    with registered_drafter(Tepid, llm.engine):
        monkeypatch.setattr(lossless_sampled, "_paid", lambda llm: ["model-chain", "tepid"])
        findings = list(check_sampled(llm, PROMPTS, temperature=0.12, samples=256))
    passed = {finding.name: finding.passed for finding in findings}
    assert not passed.pop("sketch, wishful") and not passed.pop("tepid, rejection")
    assert passed.keys() == {
        *("auto, match", "model-chain, match", "tepid, match"),
        *("sketch, rejection", "model-chain, rejection"),
    }
    assert all(passed.values())


# ---- planted faults: K/V and positions ----


def keep_a_rejected_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its first rejection a sequence counts one K/V entry too many: what follows lies one entry further on."""
    spoiled: set[int] = set()
    original_span, original_append = ScheduledSequence.span.fget, Engine._append
    assert original_span is not None

    def append(self: Engine, seq: Any, output: Any, scheduled: ScheduledSequence) -> None:
        original_append(self, seq, output, scheduled)
        if len(output.verdict.path) < len(scheduled.draft):
            spoiled.add(seq.id)

    def span(scheduled: ScheduledSequence) -> Span:
        made = original_span(scheduled)
        room = len(made.pages) * 16 - made.first - len(made.ids)
        if scheduled.seq.id in spoiled and room > 0:
            made.first, made.tree_first = made.first + 1, made.tree_first + 1
        return made

    monkeypatch.setattr(Engine, "_append", append)
    monkeypatch.setattr(ScheduledSequence, "span", property(span))


def move_one_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last accepted entry of a side branch stays behind, so a rejected one is kept in its place."""
    original = Runner.move

    def move(self: Runner, pages: array[int], source: list[int], target: list[int]) -> None:
        if len(source) > 1:
            original(self, pages, source[:-1], target[:-1])

    monkeypatch.setattr(Runner, "move", move)


def number_nodes_by_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tree nodes get the position of the entry they lie in, not of their depth."""
    monkeypatch.setattr(Span, "positions", lambda self: list(self.entries))


FAULTS = [keep_a_rejected_entry, move_one_too_few, number_nodes_by_entry]


def test_a_sound_engine_passes_greedily(llm: LLM) -> None:
    findings = list(check_greedy(llm, PROMPTS, TOKENS))
    assert failed(iter(findings)) == []
    wrong = next(f for f in findings if f.name == "right and wrong drafts, batch of 3")
    assert 0 < wrong.data["accepted"] < wrong.data["drafted"]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_of_the_engine_are_caught_greedily(
    plant: Callable[[pytest.MonkeyPatch], None], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    findings = {finding.name: finding for finding in check_greedy(llm, PROMPTS, TOKENS)}
    assert findings["plain, batch of 3"].passed
    caught = findings["right and wrong drafts, one by one"]
    assert not caught.passed and caught.verdict == "FAIL"
    assert caught.data["drift"] > 100 * caught.data["noise"]
    for difference in caught.data["differences"]:
        assert difference["verdict"] == "BUG" and difference["plain"] != difference["other"]
    if plant is not move_one_too_few:  # one wrong entry of many need not change a token
        assert caught.data["differences"] and "BUG" in caught.detail


# ---- ties and bugs ----


def test_a_difference_within_the_noise_is_a_tie(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"alone": torch.tensor([10.0, 9.999, 0.0]), "chunked": torch.tensor([10.0, 9.9995, 0.0])}
    monkeypatch.setattr("forerun.checks.lossless.noise.logits_in_all_ways", lambda *about: rows)
    greedy = SamplingParams()
    tie = compare(llm, 0, [[5]], [0], [1], greedy)
    assert tie is not None and tie.verdict == "tie" and tie.gap == pytest.approx(1e-3, rel=0.01)
    bug = compare(llm, 0, [[5]], [0], [2], greedy)
    assert bug is not None and bug.verdict == "BUG"
    rows["chunked"] = rows["alone"]  # a machine without noise has no ties
    exact = compare(llm, 0, [[5]], [0], [1], greedy)
    assert exact is not None and exact.verdict == "BUG" and exact.noise == 0.0


def test_no_noise_explains_a_large_gap(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"alone": torch.tensor([10.0, 8.0, 0.0]), "broken": torch.tensor([10.0, 20.0, 0.0])}
    monkeypatch.setattr("forerun.checks.lossless.noise.logits_in_all_ways", lambda *about: rows)
    found = compare(llm, 0, [[5]], [0], [1], SamplingParams())
    assert found is not None and found.verdict == "BUG"


def test_answers_of_different_length_are_no_tie(llm: LLM) -> None:
    found = compare(llm, 0, [[5]], [3, 4], [3], SamplingParams())
    assert found is not None and found.verdict == "BUG" and found.position == 1 and found.other is None
    assert compare(llm, 0, [[5]], [3, 4], [3, 4], SamplingParams()) is None
