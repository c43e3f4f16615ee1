"""Which draft model, how deep, in which precision: profiles of this machine, and a choice for goodput, cost and bytes.

Measured: the target's answers, seconds of its forwards by rows, seconds of a round of each draft model in each
precision, and which tokens of the answers the draft model has as its most probable ones. For greedy answers that is all
there is to know: a chain is accepted as far as these follow each other, so every depth is counted on the same answers,
and a round trip only adds time. A draft model runs here behind a stated round trip, or on a draft server
(`remote:HOST:PORT`), whose rounds and way are measured; what frames take is counted from their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from forerun import LLM, SamplingParams, data
from forerun.core.progress import track
from forerun.decode.remote.protocol import DIGEST_BYTES, DraftOrder, Hello, Tree, encode, vocabulary_digest
from forerun.errors import BadRequest
from forerun_research.bench import common
from forerun_research.bench.draft_server_profile import REMOTE, profile_server

WEBSOCKET_BYTES = 8  # of two small messages: a header of 2, and of 6 towards the server
ORDINARY, PARALLEL = "ordinary", "parallel"
TIMED_CONTEXT = 128  # tokens before a forward that is timed


@dataclass(frozen=True)
class ConfigBench:
    """What is profiled. Prices are those of an hour of each machine, in any currency."""

    model: str
    drafts: tuple[str, ...]
    precisions: tuple[str, ...] = ("auto",)
    depths: tuple[int, ...] = (1, 2, 4, 8)
    prob_bits: tuple[int, ...] = (8, 16)
    rtt_ms: float = 0.0
    prompts: int = 8
    tokens: int = 64
    target_price: float = 1.0
    draft_price: float = 0.2
    threads: int | None = None


@dataclass(frozen=True)
class TargetProfile:
    forward_s: tuple[float, ...]  # by rows, from 1
    answers: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # prompt, answer
    vocab_size: int
    digest: bytes = bytes(DIGEST_BYTES)  # of the vocabulary


@dataclass(frozen=True)
class DraftProfile:
    draft: str
    precision: str  # of a draft server: its model
    round_s: float
    matches: tuple[tuple[bool, ...], ...]  # by answer and token: whether it was the most probable one
    network_s: float | None = None  # of a draft server; None: the stated round trip


@dataclass(frozen=True)
class ConfigRow:
    """What one configuration comes to."""

    draft: str
    precision: str
    depth: int  # 0: plain decoding
    prob_bits: int
    mode: str
    goodput: float  # tokens a second
    accepted_a_step: float
    cost: float  # of a million tokens
    bytes_per_accepted: float


def run(plan: ConfigBench) -> dict[str, Any]:
    if not plan.drafts:
        raise BadRequest("there is no draft model to profile", "name some: --draft-model NAME")
    target = profile_target(plan)
    profiles = list(profile_drafts(plan, target))
    rows = [plain_row(plan, target), *rows_of(plan, target, profiles)]
    return {
        "bench": "config",
        "model": plan.model,
        "rtt_ms": plan.rtt_ms,
        "prices": {"target": plan.target_price, "draft": plan.draft_price},
        "target_s": target.forward_s,
        "round_s": {f"{p.draft} {p.precision}": p.round_s for p in profiles},
        "network_s": {p.draft: p.network_s for p in profiles if p.network_s is not None},
        "rows": [asdict(row) for row in rows],
        "choice": {goal: asdict(row) for goal, row in choices(rows).items()},
        "hardware": common.hardware(plan.threads or 0),
    }


def profile_target(plan: ConfigBench) -> TargetProfile:
    with LLM(plan.model, threads=plan.threads, quiet=True) as llm:
        params = SamplingParams(max_tokens=plan.tokens, speculation="off")
        texts = [prompt.text for prompt in data.read_prompts()]
        chosen = texts[:: max(1, len(texts) // plan.prompts)][: plan.prompts]
        ask = llm.tokenizer.has_chat_template
        prompts = [
            llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])
            if ask
            else llm.tokenizer.encode(text)
            for text in chosen
        ]
        found = [llm.generate([ids], params)[0] for ids in track(prompts, "answers")]
        forwards = tuple(time_forward(llm, rows) for rows in range(1, max(plan.depths) + 2))
        answers = tuple((tuple(a.prompt_ids), tuple(a.token_ids)) for a in found if a.token_ids)
        return TargetProfile(forwards, answers, llm.config.vocab_size, vocabulary_digest(llm.engine.tokenizer))


def profile_drafts(plan: ConfigBench, target: TargetProfile) -> Iterator[DraftProfile]:
    for draft in plan.drafts:
        if draft.startswith(REMOTE):
            answers = track(target.answers, draft)
            found = profile_server(draft, Hello(target.vocab_size, target.digest), answers)
            yield DraftProfile(draft, found.model, found.round_s, found.matches, found.network_s)
            continue
        for precision in plan.precisions:
            with LLM(draft, dtype=precision, threads=plan.threads, quiet=True) as llm:
                matches = []
                for prompt, answer in track(target.answers, f"{draft} {precision}"):
                    logits = llm.engine.score([*prompt, *answer])[len(prompt) - 1 : -1]
                    best = logits[:, : target.vocab_size].argmax(-1).tolist()
                    matches.append(tuple(a == b for a, b in zip(best, answer, strict=True)))
                yield DraftProfile(draft, precision, time_forward(llm, 1), tuple(matches))


def time_forward(llm: LLM, rows: int) -> float:
    """Now: what the engine knows of its costs may be of another day, when the machine was busy."""
    with llm.driver.exclusive() as engine:
        return engine.time_forward(rows, TIMED_CONTEXT)


def plain_row(plan: ConfigBench, target: TargetProfile) -> ConfigRow:
    token_s = target.forward_s[0]
    return ConfigRow("none", "", 0, 0, "plain", 1.0 / token_s, 0.0, _price(plan, token_s, 0.0), 0.0)


def rows_of(plan: ConfigBench, target: TargetProfile, profiles: Sequence[DraftProfile]) -> Iterator[ConfigRow]:
    for profile in profiles:
        rtt_s = plan.rtt_ms / 1000.0 if profile.network_s is None else profile.network_s
        for depth in plan.depths:
            for mode in (ORDINARY, PARALLEL):
                tokens, accepted, steps, wall_s, draft_s = simulate(profile, target, depth, rtt_s, mode)
                for bits in plan.prob_bits:
                    moved = steps * cycle_bytes(depth, accepted / steps, bits, target.vocab_size)
                    yield ConfigRow(
                        profile.draft,
                        profile.precision,
                        depth,
                        bits,
                        mode,
                        tokens / wall_s,
                        accepted / steps,
                        _price(plan, wall_s / tokens, draft_s / tokens),
                        moved / max(1, accepted),
                    )


def _price(plan: ConfigBench, target_s: float, draft_s: float) -> float:
    return 1e6 * (target_s * plan.target_price + draft_s * plan.draft_price) / 3600.0


def simulate(
    profile: DraftProfile, target: TargetProfile, depth: int, rtt_s: float, mode: str
) -> tuple[int, int, int, float, float]:
    """Tokens, accepted ones, steps, seconds, and seconds that the draft model was busy: chains of one depth along the
    answers. In parallel mode the next chain is drafted after the whole of this one while it is verified."""
    tokens = accepted = steps = 0
    draft_s = depth * profile.round_s
    verify_s = target.forward_s[depth]
    wall_s = busy_s = 0.0
    for matches in profile.matches:
        at, ready = 0, False
        while at < len(matches):
            wall_s += max(0.0, rtt_s + draft_s - verify_s) if ready else rtt_s + draft_s
            busy_s += draft_s
            run = 0
            while run < depth and at + run < len(matches) and matches[at + run]:
                run += 1
            wall_s += verify_s
            steps, accepted = steps + 1, accepted + run
            at += run + 1
            ready = mode == PARALLEL and run == depth and at <= len(matches) and matches[at - 1]
            if mode == PARALLEL and not ready:
                busy_s += min(draft_s, verify_s)  # what was drafted for another outcome
        tokens += len(matches)
    return tokens, accepted, steps, wall_s, busy_s


def cycle_bytes(depth: int, accepted: float, bits: int, vocab_size: int) -> int:
    """On the wire for one draft of a chain: the order with the tokens that are new, the tree, and message headers."""
    order = DraftOrder(1, 1, 1, 0, [0] * (round(accepted) + 1), prob_bits=bits)
    tree = Tree(1, 1, 0, 0, list(range(depth)), list(range(-1, depth - 1)), [0.5] * depth, prob_bits=bits)
    return len(encode(order, vocab_size)) + len(encode(tree, vocab_size)) + WEBSOCKET_BYTES


def choices(rows: Sequence[ConfigRow]) -> dict[str, ConfigRow]:
    """For goodput and cost plain decoding is a choice, too; for bytes the best of those that are faster than it."""
    plain = rows[0]
    drafting = [row for row in rows if row.depth and row.goodput > plain.goodput and row.accepted_a_step]
    return {
        "goodput": max(rows, key=lambda row: row.goodput),
        "cost": min(rows, key=lambda row: row.cost),
        "bytes": min(drafting, key=lambda row: row.bytes_per_accepted, default=plain),
    }


def table(result: dict[str, Any]) -> Table:
    """The fastest mode of each draft model, precision and depth, and what was chosen; the JSON line has all rows."""
    made = Table("draft", "precision", "depth", "bits", "mode", "tokens/s", "accepted", "cost/M", "bytes", "best for")
    ways = [f"{name} {1000 * seconds:.1f} ms (measured)" for name, seconds in result["network_s"].items()]
    made.title = f"{result['model']}, round trip {', '.join([*ways, format(result['rtt_ms'], 'g') + ' ms'])}"
    made.title_justify = "left"
    chosen: dict[str, list[str]] = {}
    for goal, row in result["choice"].items():
        chosen.setdefault(str(row), []).append(goal)
    fastest: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in result["rows"]:
        key = row["draft"], row["precision"], row["depth"]
        if key not in fastest or row["goodput"] > fastest[key]["goodput"]:
            fastest[key] = row
    for row in result["rows"]:
        goals = chosen.get(str(row), [])
        if not goals and row not in fastest.values():
            continue
        figures = (f"{row['goodput']:.1f}", f"{row['accepted_a_step']:.2f}", f"{row['cost']:.2f}")
        moved = f"{row['bytes_per_accepted']:.1f}" if row["bytes_per_accepted"] else ""
        names = (row["draft"], row["precision"], str(row["depth"] or ""), str(row["prob_bits"] or ""), row["mode"])
        made.add_row(*names, *figures, moved, ", ".join(goals), style="bold" if goals else None)
    return made
