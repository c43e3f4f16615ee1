"""Options that several subcommands share, in groups, and the objects made from them.

A command takes a group as one parameter and is wrapped in `@grouped`, which shows typer one option for each of the
group's fields. Knows no engine until one is asked for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from forerun.commands.tier_options import TierOptions
from forerun.errors import BadRequest
from forerun.params import Grammar, Prefill, SamplingParams, Speculation

if TYPE_CHECKING:
    from forerun import LLM

DEFAULT_MODEL = "smollm2-135m-instruct"

_sampling = functools.partial(typer.Option, rich_help_panel="Choosing tokens")
_guessing = functools.partial(typer.Option, rich_help_panel="SpeculationState ahead")
_prompting = functools.partial(typer.Option, rich_help_panel="Reading the prompt")
_shaping = functools.partial(typer.Option, rich_help_panel="Shape of the answer")

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="A known name, a folder, a .gguf file, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct."
    ),
]
Draft = Annotated[
    str | None,
    typer.Option("--draft", "-d", help="A smaller model that guesses ahead, named as --model is."),
]
Weights = Annotated[
    str,
    typer.Option("--weights", "-w", help="auto, float32, fp16, bf16 or int8. auto: int8 for quantised files on CPU."),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; default: one for each core.")]
KvCacheTokens = Annotated[
    int | None, typer.Option("--kv-cache-tokens", min=16, help="Tokens the KV cache holds; default: by free memory.")
]
BatchInvariant = Annotated[
    bool,
    typer.Option(help="The same bits in any batch (int8 on CPU); without, branches of a long prompt are faster."),
]
MaxModelLen = Annotated[int | None, typer.Option("--max-model-len", min=16, help="Longest prompt and answer together.")]

MaxTokens = Annotated[int, _sampling("--max-tokens", "-n", help="Longest answer in tokens.")]
Temperature = Annotated[float, _sampling("--temperature", "-t", help="0: greedy. 0.7: usual for chat.")]
TopK = Annotated[int, _sampling("--top-k", help="Keep the k likeliest tokens; 0: all.")]
TopP = Annotated[float, _sampling("--top-p", help="Keep the likeliest tokens up to this total probability.")]
MinP = Annotated[float, _sampling("--min-p", help="Drop tokens below this share of the likeliest one.")]
Repetition = Annotated[float, _sampling("--repetition-penalty", help="Above 1: repeat less, prompt included.")]
Presence = Annotated[float, _sampling("--presence-penalty", help="-2 to 2: against tokens already in the answer.")]
Frequency = Annotated[float, _sampling("--frequency-penalty", help="-2 to 2: the same, for each time they came.")]
Stop = Annotated[list[str] | None, _sampling("--stop", help="End the answer before this text; may be repeated.")]
Seed = Annotated[int | None, _sampling("--seed", help="Same seed, same answer.")]

Speculate = Annotated[
    str,
    _guessing(
        "--speculate",
        help="auto: whatever pays; off; or a drafter such as model, lookup, suffix, copy; several joined by +.",
    ),
]
Verify = Annotated[
    str,
    _guessing(
        "--verify",
        help="How guesses are accepted: auto, match, rejection, block, traversal, transport; lossy: typical, bounded.",
    ),
]
Bound = Annotated[float, _guessing("--bound", help="How far a lossy --verify may stray from the model.")]

Profile = Annotated[
    str | None,
    _prompting("--profile", help="What `forerun calibrate` made for these models; the default model brings its own."),
]
PrefillMode = Annotated[
    str,
    _prompting(
        "--prefill",
        help="exact; speculative: from drafted K/V, checked; provisional: such an answer at once, the exact one after.",
    ),
]
Budget = Annotated[
    float | None, _prompting("--budget", help="Most work, as a share of exact prefill's; failed checks add.")
]
Quality = Annotated[
    float | None, _prompting("--quality", help="With --prefill: least agreement with exact prefill, such as 0.95.")
]
PrefillSource = Annotated[
    str, _prompting("--prefill-source", help="Who drafts the prompt's K/V: auto, draft, self or chunk.")
]
Chooser = Annotated[
    str, _prompting("--chooser", help="Who says what is recomputed: auto, draft, tail, cross, start or random.")
]
AllowExact = Annotated[
    bool, _prompting("--allow-exact", help="Where the prompt cannot be drafted, compute it instead of giving up.")
]

JsonSchema = Annotated[
    str | None, _shaping("--json-schema", help="Answer with JSON that fits this schema: a file, or the schema itself.")
]
JsonObject = Annotated[bool, _shaping("--json-object", help="Answer with a JSON object.")]
Regex = Annotated[str | None, _shaping("--regex", help="Answer with text that this pattern matches as a whole.")]
Lark = Annotated[str | None, _shaping("--lark", help="Answer in this Lark grammar: a file, or the grammar itself.")]

System = Annotated[str | None, typer.Option("--system", help="A system message to start the conversation with.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print what the answer cost on stderr.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Data = Annotated[Path | None, typer.Option("--data", help="Prompts of your own: a .jsonl file, or any text file.")]


@dataclass(frozen=True)
class ModelOptions(TierOptions):
    """Which model runs, where, and what it keeps."""

    model: Model = DEFAULT_MODEL
    draft: Draft = None
    weights: Weights = "auto"
    device: Device = "auto"
    threads: Threads = None
    kv_cache_tokens: KvCacheTokens = None
    max_model_len: MaxModelLen = None
    profile: Profile = None
    batch_invariant: BatchInvariant = True

    def open(self, **more: Any) -> LLM:
        names = ("draft", "kv_cache_tokens", "max_model_len", "profile", "batch_invariant")
        own = {name: getattr(self, name) for name in names}
        return open_llm(self.model, self.weights, self.device, self.threads, **(own | self.tiers() | more))


@dataclass(frozen=True)
class AnswerOptions:
    """How an answer is chosen, guessed and shaped."""

    max_tokens: MaxTokens = 256
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repetition_penalty: Repetition = 1.0
    presence_penalty: Presence = 0.0
    frequency_penalty: Frequency = 0.0
    stop: Stop = None
    seed: Seed = None
    speculate: Speculate = "auto"
    verify: Verify = "auto"
    bound: Bound = 0.0
    prefill: PrefillMode = "exact"
    budget: Budget = None
    quality: Quality = None
    prefill_source: PrefillSource = "auto"
    chooser: Chooser = "auto"
    allow_exact: AllowExact = False
    json_schema: JsonSchema = None
    json_object: JsonObject = False
    regex: Regex = None
    lark: Lark = None

    def params(self, **more: Any) -> SamplingParams:
        """`more`: values that only some commands have."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            max_tokens=self.max_tokens,
            stop=stop_strings(self.stop),
            seed=self.seed,
            grammar=self.grammar(),
            speculate=Speculation(self.speculate, verify=self.verify, bound=self.bound),
            prefill=self.prefilling(),
            **more,
        )

    def prefilling(self) -> Prefill:
        given = (self.budget, self.quality, self.prefill_source, self.chooser, self.allow_exact)
        if self.prefill == "exact" and given != (None, None, "auto", "auto", False):
            raise BadRequest(
                "--budget, --quality, --prefill-source, --chooser and --allow-exact are about drafted prompts",
                "add --prefill speculative or --prefill provisional",
            )
        return Prefill(self.prefill, *given)

    def grammar(self) -> Grammar | None:
        given = {
            "--json-schema": self.json_schema is not None,
            "--json-object": self.json_object,
            "--regex": self.regex is not None,
            "--lark": self.lark is not None,
        }
        named = [name for name, there in given.items() if there]
        if len(named) > 1:
            raise BadRequest(f"{' and '.join(named)} cannot go together", "give one shape for the answer")
        if self.json_schema is not None:
            return Grammar("json_schema", _file_or_text(self.json_schema, "--json-schema", text_starts="{"))
        if self.json_object:
            return Grammar("json_object")
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.lark is not None:
            return Grammar("lark", _file_or_text(self.lark, "--lark", text_has=":"))
        return None


@dataclass(frozen=True)
class ChatAnswerOptions(AnswerOptions):
    """The same with what suits a conversation."""

    max_tokens: MaxTokens = 512
    temperature: Temperature = 0.7
    top_p: TopP = 0.95


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Turn each parameter that is a group of options (a dataclass) into one parameter for each of its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    flat: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            flat.append(parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY))
            continue
        kinds = get_type_hints(groups[parameter.name], include_extras=True)
        for entry in fields(groups[parameter.name]):
            flat.append(
                inspect.Parameter(
                    entry.name, parameter.KEYWORD_ONLY, default=entry.default, annotation=kinds[entry.name]
                )
            )

    @functools.wraps(command)
    def run(**values: Any) -> None:
        made = {
            name: kind(**{entry.name: values.pop(entry.name) for entry in fields(kind)})
            for name, kind in groups.items()
        }
        command(**made, **values)

    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def open_llm(model: str, weights: str, device: str, threads: int | None = None, **more: Any) -> LLM:
    from forerun import LLM

    return LLM(model, weights=weights, device=device, threads=threads, **more)


def stop_strings(given: list[str] | None) -> tuple[str, ...]:
    """A shell passes a backslash and an n; people mean a line break."""
    return tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in given or ())


def _file_or_text(given: str, option: str, text_starts: str = "", text_has: str = "") -> str:
    """What is written in a file of that name; text that cannot be a name is taken as it is."""
    if (text_starts and given.lstrip().startswith(text_starts)) or (text_has and text_has in given):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadRequest(
            f"{option} {given!r:.80} is neither a file that can be read nor what it should be ({error})",
            "give the path of a UTF-8 file, or the text itself",
        ) from None
