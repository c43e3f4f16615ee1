"""The figures of docs/vllm.md: a real model inside vLLM, plain and with the plugin, and our own engine beside it.

python -m forerun_research.scripts.vllm_figures FOLDER --profile PROFILE [--draft-model NAME] [--parts exact ...]

To be run where vLLM is (`make test-vllm` makes .venv-vllm). FOLDER is what `forerun models export` writes. Prompts are
pieces of Python's standard library that profiles are not calibrated on. Each part prints one line of JSON:
exact (K/V computed by the plugin against plain vLLM), agreement (drafted against plain, in vLLM and in our engine),
first_token (seconds, plain and drafted in turn), mixed (requests of all kinds at once), leak (the same prompts after
drafted ones), fallback (checks that nothing passes). A part that promises more than a figure ends in an error where
the promise is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from forerun import LLM, SamplingParams
from forerun.loading import opened
from forerun.prefill.open_profile import draft_for_profile, open_profile, read_profile
from forerun.vllm.settings import CONNECTOR_MODULE, KEY
from forerun_research.studies.intervals import bootstrap, wilson
from forerun_research.studies.prefill_texts import STDLIB, StudyTexts

Options = dict[str, Any] | None  # of a request: what it asks of the plugin; None: nothing
EXACT: Options = {"mode": "exact"}
DRAFTED: Options = {}
SAME_ROWS = ("exact", "accepted", "recomputed", "rounds", "token_layers")  # of a label, where two engines agree
LABEL_FIELDS = (*SAME_ROWS, "cost", "fell_back")


@dataclass(frozen=True)
class VllmAnswer:
    tokens: list[int]
    label: dict[str, Any] | None
    cached: int  # tokens of the prompt that were not computed
    seconds: float = 0.0


class VllmSubject:
    def __init__(self, args: argparse.Namespace, profile: Path | None) -> None:
        from vllm import LLM as VllmLLM

        self.args = args
        extra = {"profile": None if profile is None else str(profile), "draft_model": args.draft_model}
        extra["min_prompt_tokens"] = args.shortest
        self.llm = VllmLLM(
            str(args.folder),
            dtype=args.dtype,
            enforce_eager=not args.compiled,
            max_model_len=args.context,
            max_num_batched_tokens=args.context,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            kv_transfer_config={
                "kv_connector": "ForerunConnector",
                "kv_connector_module_path": CONNECTOR_MODULE,
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {name: value for name, value in extra.items() if value is not None},
            },
        )

    def ask(
        self, prompts: Sequence[list[int]], options: Sequence[Options], tokens: int, salt: str | None = None
    ) -> list[VllmAnswer]:
        """All at once."""
        from vllm import SamplingParams as VllmParams

        given = [{"prompt_token_ids": ids} | ({} if salt is None else {"cache_salt": salt}) for ids in prompts]
        params = []
        for own in options:
            extra = None if own is None else {"kv_transfer_params": {KEY: own}}
            params.append(VllmParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, extra_args=extra))
        begun = time.perf_counter()
        found = self.llm.generate(given, params, use_tqdm=False)
        taken = time.perf_counter() - begun
        return [
            VllmAnswer(
                list(o.outputs[0].token_ids), (o.kv_transfer_params or {}).get(KEY), o.num_cached_tokens or 0, taken
            )
            for o in found
        ]

    def one(self, ids: list[int], options: Options, tokens: int, salt: str | None = None) -> VllmAnswer:
        return self.ask([ids], [options], tokens, salt)[0]


@contextmanager
def open_subject(args: argparse.Namespace, profile: Path | None) -> Iterator[VllmSubject]:
    subject = VllmSubject(args, profile)
    try:
        yield subject
    finally:
        subject.llm.llm_engine.engine_core.shutdown()


def share(hits: Sequence[bool]) -> dict[str, Any]:
    low, high = wilson(sum(hits), len(hits))
    return {"hits": sum(hits), "of": len(hits), "interval": [round(low, 3), round(high, 3)]}


def exact(vllm: VllmSubject, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """One after the other, so that both compute the same batches."""
    plain = [vllm.one(ids, None, args.tokens, "plain") for ids in prompts]
    injected = [vllm.one(ids, EXACT, args.tokens) for ids in prompts]
    assert all(a.cached > 0 and a.label is not None for a in injected)
    equal = [a.tokens == b.tokens for a, b in zip(injected, plain, strict=True)]
    return {"equal": share(equal), "tokens": args.tokens, "unequal": [i for i, same in enumerate(equal) if not same]}


def agreement(vllm: VllmSubject, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Drafted prompts in both engines against plain vLLM, their answers and the rows recomputed against each other.
    Those that `--save` has are not asked again, and counted."""
    rows = [] if args.save is None or not args.save.exists() else list(map(json.loads, args.save.open()))
    known = {row["prompt"] for row in rows}
    new = {args.first + i: ids for i, ids in enumerate(prompts) if args.first + i not in known}
    if new:
        found = list(_asked_of_both(vllm, new, args))
        rows += found
        if args.save is not None:
            with args.save.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)
    plain = [row["plain"] for row in rows if row["plain"] is not None]
    answers = {name: [row[name] for row in rows] for name in ("vllm", "ours")}
    labels, equal = [row["labels"] for row in rows], [row["vllm"] == row["ours"] for row in rows]
    beside_plain = answers if len(plain) == len(rows) else {}
    return {name: _agreement(plain, own) for name, own in beside_plain.items()} | {
        "beside_ours": _agreement(answers["ours"], answers["vllm"]),
        "drafted_equal": share(equal),
        "equal_where_both_drafted": share([same for same, pair in zip(equal, labels, strict=True) if _drafted(*pair)]),
        "rows_equal": share([all(a[n] == b[n] for n in SAME_ROWS) for a, b in labels]),
        "cost": [median(a["cost"] for a, _ in labels), median(b["cost"] for _, b in labels)],
        "recomputed": [sum(a["recomputed"] for a, _ in labels), sum(b["recomputed"] for _, b in labels)],
        "fell_back": [sum(bool(a["fell_back"]) for a, _ in labels), sum(bool(b["fell_back"]) for _, b in labels)],
        "reasons": sorted({str(own["fell_back"]) for pair in labels for own in pair if own["fell_back"]}),
    }


def _asked_of_both(
    vllm: VllmSubject, prompts: dict[int, list[int]], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row of each prompt, by its number."""
    theirs = {number: vllm.one(ids, DRAFTED, args.tokens) for number, ids in prompts.items()}
    plain = {} if args.without_plain else {number: vllm.one(ids, None, args.tokens) for number, ids in prompts.items()}
    with LLM(
        str(args.folder),
        dtype=args.dtype,
        prefill_profile=str(args.profile),
        draft_model=args.draft_model,
        max_model_len=args.context,
        quiet=True,
    ) as llm:
        first = next(iter(prompts.values()))
        llm.generate(first, SamplingParams(max_tokens=1))  # exact prefill is timed: else the third is for that
        for number, ids in prompts.items():
            tokens, own = _own(llm, ids, args.tokens)
            labels = [{n: label[n] for n in LABEL_FIELDS} for label in (theirs[number].label or {}, own)]
            row = {"prompt": number, "vllm": theirs[number].tokens, "ours": tokens, "labels": labels}
            yield row | {"plain": plain[number].tokens if number in plain else None}


def _drafted(*labels: dict[str, Any]) -> bool:
    """By all of them: our engine also weighs seconds, and vLLM's worker does not know what exact prefill takes."""
    return not any(label["fell_back"] for label in labels)


def _own(llm: LLM, ids: list[int], tokens: int) -> tuple[list[int], dict[str, Any]]:
    llm.clear_cache()
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, prefill="speculative", speculation="off")
    answer = llm.generate(ids, params)[0]
    return list(answer.token_ids), {} if answer.usage.prefill is None else vars(answer.usage.prefill)


def _agreement(plain: Sequence[list[int]], drafted: Sequence[list[int]]) -> dict[str, Any]:
    pairs = list(zip(plain, drafted, strict=True))
    same = [float(sum(x == y for x, y in zip(a, b, strict=True))) / len(a) for a, b in pairs]
    low, high = bootstrap([same])
    tokens = {"mean": sum(same) / len(same), "interval": [round(low, 3), round(high, 3)]}
    return {"first_token": share([a[0] == b[0] for a, b in pairs]), "tokens": tokens}


def first_token(vllm: VllmSubject, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Each prompt plain and drafted, in changing order; the first one beside those of a warm process."""
    rows, stages = [], []
    for number, ids in enumerate(prompts):
        order = [("plain", None), ("drafted", DRAFTED)]
        found = {name: vllm.one(ids, own, 1, f"{name} {number}") for name, own in order[:: -1 if number % 2 else 1]}
        assert found["plain"].cached == 0 and (found["drafted"].label or {})["approximate"], found["drafted"].label
        rows.append([found["plain"].seconds, found["drafted"].seconds])
        stages.append([(found["drafted"].label or {})[name] for name in ("read_s", "recompute_s", "check_s", "cost")])
        about = "reading {:.2f}, recomputing {:.2f}, checks {:.2f} s; cost {:.3f}".format(*stages[-1])
        print(f"{number}: plain {rows[-1][0]:.2f} s, drafted {rows[-1][1]:.2f} s ({about})", flush=True)
        if time.perf_counter() > args.deadline:
            break
    warm = rows[1:] or rows
    ratios = [plain / drafted for plain, drafted in warm]
    return {
        "first": [round(s, 3) for s in rows[0]],
        "plain_s": [median(p for p, _ in warm), min(p for p, _ in warm), max(p for p, _ in warm)],
        "drafted_s": [median(d for _, d in warm), min(d for _, d in warm), max(d for _, d in warm)],
        "sooner": [median(ratios), min(ratios), max(ratios)],
        "read_recompute_check_cost": [median(column) for column in zip(*(stages[1:] or stages), strict=True)],
        "count": len(warm),
        "tokens": len(prompts[0]),
    }


def mixed(vllm: VllmSubject, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Drafted, plain, and too short to be drafted. vLLM's own answers may depend on what else is in the batch, so the
    same requests are also asked together without any drafted one: what changes then, vLLM changes."""
    asked: list[Options] = [(None, DRAFTED)[i % 2] for i in range(len(prompts))]
    given = [ids[: 200 + 7 * i] if i % 4 == 3 else ids for i, ids in enumerate(prompts)]
    alone = [vllm.one(ids, None, args.tokens, "alone").tokens for ids in given]
    all_plain = vllm.ask(given, [None] * len(given), args.tokens, "all plain")
    answers = vllm.ask(given, asked, args.tokens)
    assert len(answers) == len(given) and all(len(a.tokens) == args.tokens for a in answers), "an answer is lost"
    plain = [i for i, options in enumerate(asked) if options is None]
    labels = [a.label or {} for a, options in zip(answers, asked, strict=True) if options is not None]
    back = [a.tokens == own for a, own in zip(answers, alone, strict=True) if a.label and a.label["fell_back"]]
    return {
        "requests": len(given),
        "plain_unchanged": share([answers[i].tokens == alone[i] for i in plain]),
        "changed": [i for i in plain if answers[i].tokens != alone[i]],
        "plain_unchanged_all_plain": share([all_plain[i].tokens == alone[i] for i in plain]),
        "changed_all_plain": [i for i in plain if all_plain[i].tokens != alone[i]],
        "drafted": sum(label["approximate"] for label in labels),
        "fell_back_unchanged": share(back),
        "reasons": sorted({label["fell_back"] for label in labels if label["fell_back"]})[:4],
    }


def leak(vllm: VllmSubject, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Plain answers to prompts that were drafted just before, without a salt and under the same one."""
    found = []
    for number, ids in enumerate(own[1:] for own in prompts):  # plain answers of other parts have cached the prompts
        salt = f"tenant {number}" if number % 2 else None
        drafted = vllm.one(ids, DRAFTED, args.tokens, salt)
        assert drafted.label is not None and drafted.label["approximate"], drafted.label
        after = vllm.one(ids, None, args.tokens, salt)
        assert after.cached == 0, f"{after.cached} tokens came from a drafted prompt"
        found.append(after.tokens == vllm.one(ids, None, args.tokens, f"other {number}").tokens)
    return {"unchanged": share(found), "read_from_drafted": 0}


def fallback(vllm: VllmSubject, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """With thresholds that nothing passes."""
    back = [vllm.one(ids, DRAFTED, args.tokens) for ids in prompts]
    assert all(a.label is not None and not a.label["approximate"] and a.label["fell_back"] for a in back)
    plain = [vllm.one(ids, None, args.tokens, "plain").tokens for ids in prompts]
    return {
        "unchanged": share([a.tokens == own for a, own in zip(back, plain, strict=True)]),
        "reasons": sorted({(a.label or {})["fell_back"] for a in back}),
    }


PARTS: dict[str, tuple[Callable[..., dict[str, Any]], int, int]] = {  # with its prompts and their tokens
    "exact": (exact, 100, 256),
    "agreement": (agreement, 40, 1664),
    "first_token": (first_token, 12, 2048),
    "mixed": (mixed, 50, 1664),
    "leak": (leak, 6, 1664),
    "fallback": (fallback, 4, 1664),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--draft-model", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--count", type=int, default=None, help="prompts of each part; default: what docs/vllm.md has")
    parser.add_argument("--first", type=int, default=0, help="prompts that are left out, to measure in several runs")
    parser.add_argument(
        "--without-plain", action="store_true", help="agreement of drafted answers with drafted ones only"
    )
    parser.add_argument(
        "--save", type=Path, default=None, help="rows of agreement: those that it has are not asked again"
    )
    parser.add_argument("--shortest", type=int, default=None, help="the plugin's min_prompt_tokens")
    parser.add_argument("--length", type=int, default=None, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--context", type=int, default=2304)
    parser.add_argument("--seconds", type=float, default=3600.0, help="no new prompt of first_token after that time")
    parser.add_argument("--compiled", action="store_true", help="vLLM with compiled graphs")
    args = parser.parse_args()
    args.deadline = time.perf_counter() + args.seconds
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    texts = StudyTexts(None, opened(args.folder).tokenizer())
    with TemporaryDirectory() as made:
        strict = Path(made) / "strict"
        if "fallback" in args.parts:
            draft = None if args.draft_model is None else opened(args.draft_model)
            if draft is not None:
                draft = draft_for_profile(read_profile(args.profile), draft)
            profile = open_profile(args.profile, opened(args.folder), draft)
            assert profile is not None
            layers = opened(args.folder).config.num_layers
            replace(profile, thresholds={"key": [0.0] * layers}).save(strict)
        for path, wanted in ((args.profile, set(args.parts) - {"fallback"}), (strict, set(args.parts) & {"fallback"})):
            if wanted:
                with open_subject(args, path) as vllm:
                    _measure(vllm, [part for part in args.parts if part in wanted], texts, args)


def _measure(vllm: VllmSubject, parts: list[str], texts: StudyTexts, args: argparse.Namespace) -> None:
    vllm.one(texts.pieces(STDLIB, 256)[0], None, 1, "warm")
    for part in parts:
        measure, count, length = PARTS[part]
        count, length = args.count or count, args.length or length
        prompts = [ids for _, ids in texts.mixed([STDLIB], length, args.first + count)][args.first :]
        begun = time.perf_counter()
        found = measure(vllm, prompts, args)
        about = {"part": part, "model": args.folder.name, "dtype": args.dtype, "compiled": args.compiled}
        print(json.dumps(about | {"took_s": round(time.perf_counter() - begun, 1)} | found), flush=True)


if __name__ == "__main__":
    main()
