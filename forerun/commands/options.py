"""Options that several subcommands share, in groups, and the objects made from them.

A command takes a group as one parameter and is wrapped in `@grouped`, which shows typer one option for each of the
group's fields. Knows sizes as people write them, and no engine until one is asked for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from forerun.errors import BadRequest
from forerun.models.fetch.store import DEFAULT_MODEL
from forerun.options import field_of, limits, parse_bytes
from forerun.params import RECOMMENDED, Grammar, GrammarSampling, Prefill, SamplingParams, Speculation

if TYPE_CHECKING:
    from forerun import LLM


SAMPLINGS = ("greedy", "model")  # where settings that are not given come from
CHOOSING, DRAFTING, PREFILLING = "Choosing tokens", "Speculative decoding", "Prefill of the prompt"


def derived(kind: type, name: str, *short: str, panel: str, option: str = "", unset: bool = False) -> Any:
    """The command-line option of a field: its help, limits and known values are those of the field. `unset`: the
    command gets None where it is not given."""
    entry = field_of(kind, name)
    known = ", ".join(entry.metadata.get("choices", ()))
    details = "; ".join(part for part in (known, limits(entry)) if part)
    text = entry.metadata["help"] + (f" ({details})" if details else "")
    default = str(entry.default) if unset else True
    return typer.Option(
        option or f"--{name.replace('_', '-')}", *short, help=text, rich_help_panel=panel, show_default=default
    )


_sampling = functools.partial(derived, SamplingParams, panel=CHOOSING)
_recommended = functools.partial(derived, SamplingParams, panel=CHOOSING, unset=True)  # with `--sampling model`
_drafting = functools.partial(derived, Speculation, panel=DRAFTING)
_prefilling = functools.partial(derived, Prefill, panel=PREFILLING)


def shown(default: Any, *flags: str, **details: Any) -> Any:
    """A field of a group and its option, which is called as the field is where there are no flags."""
    return field(default=default, metadata={"option": typer.Option(*flags, **details)})


_shaping = functools.partial(shown, rich_help_panel="Shape of the answer")
_keeping = functools.partial(shown, rich_help_panel="What is kept")

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="A known name, a folder, a .gguf file, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct."
    ),
]
Draft = Annotated[
    str | None,
    typer.Option("--draft-model", "-d", help="A smaller model that drafts, named as --model is; or remote:HOST:PORT."),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", "-w", help="auto, float32, float16, bfloat16 or int8. auto: a quantised file's own blocks on CPU."
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]


def _threads(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is neither auto nor a whole number")
    return int(text)


Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        parser=_threads,
        metavar="<int or auto>",
        help="CPU threads; auto: OMP_NUM_THREADS, or one a core; --stats says why.",
    ),
]
MaxTokens = Annotated[int, _sampling("max_tokens", "-n")]
Choices = Annotated[int, _sampling("n", option="--choices")]
Logprobs = Annotated[int | None, _sampling("logprobs")]
Drafter = Annotated[str, _drafting("drafter", option="--speculation")]

System = Annotated[str | None, typer.Option("--system", help="A system message to start the conversation with.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print what the answer cost on stderr.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Data = Annotated[Path | None, typer.Option("--data", help="Prompts of your own: a .jsonl file, or any text file.")]
SessionName = Annotated[
    str | None,
    typer.Option(
        "--session",
        rich_help_panel="What is kept",
        help="A conversation under this name, kept in --disk: go on with it, or begin it.",
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """Which model runs, where, and what it keeps."""

    model: Model = DEFAULT_MODEL
    draft_model: Draft = None
    dtype: Dtype = "auto"
    quantization: str | None = shown(
        None, "--quantization", "-q", help="auto, file (a GGUF file's own blocks), int8, fp16 or float32."
    )
    memory: str | None = shown(
        None, help="Float weights on a CPU get 16, 8 or 4 bits by importance, to fit into 1.2G for instance."
    )
    weights_quality: float | None = shown(
        None, help="The same for a KL divergence from the float weights, such as 0.01."
    )
    device: Device = "auto"
    threads: Threads = None
    kv_cache_tokens: int | None = shown(None, min=16, help="Tokens the KV cache holds; default: by free memory.")
    gpu_memory_utilization: float | None = shown(
        None, help="CUDA: share of the GPU's memory for weights, KV cache and all else."
    )
    max_model_len: int | None = shown(None, min=16, help="Longest prompt and answer together.")
    max_num_batched_tokens: int | None = shown(None, min=1, help="Most tokens of one step; default: by device.")
    max_gap_ms: float | None = shown(None, help="Longest step beside streams, with prompts; default: three plain ones.")
    enable_prefix_caching: bool = shown(True, help="Requests read the K/V of prefixes that were computed before.")
    prefill_profile: str | None = shown(
        None,
        rich_help_panel=PREFILLING,
        help="What `forerun calibrate` made for these models; the default model brings its own.",
    )
    batch_invariant: bool | None = shown(
        None, help="The same bits in any batch (int8 on CPU, bf16 on CUDA); default: where it costs at most 5%."
    )
    adapt: bool = shown(
        False, "--adapt", help="A drafter of kind block or heads learns from accepted tokens when no request runs."
    )
    disk: Path | None = _keeping(
        None, help="A folder where K/V outlives the process: the same prompt is read from there next time."
    )
    disk_bytes: str | None = _keeping(None, help="Most bytes there, such as 500M; default: 8G.")
    host_bytes: str | None = _keeping(None, help="Main memory for K/V that the pool has no room for, such as 2G.")
    store: str | None = _keeping(None, help="mooncake://HOST:PORT: K/V that several processes share in their memory.")
    store_bytes: str | None = _keeping(None, help="Of this process's memory, for that store; default: 512M.")

    def open(self, **more: Any) -> LLM:
        from forerun import LLM

        return LLM(**(self.llm_options() | more))

    def llm_options(self) -> dict[str, Any]:
        """As keyword arguments of `LLM`."""
        own = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        own["quality"] = own.pop("weights_quality")  # --quality is about drafted prompts
        for name in ("disk_bytes", "host_bytes", "store_bytes"):
            size = own.pop(name)
            if size is not None:
                own[name] = parse_bytes(f"--{name.replace('_', '-')}", size)
        if "disk_bytes" in own and self.disk is None:
            raise BadRequest("--disk-bytes is about a disk tier, and there is none", "add --disk FOLDER")
        if "store_bytes" in own and self.store is None:
            raise BadRequest("--store-bytes is about a store, and there is none", "add --store mooncake://HOST:PORT")
        return own

    def check_session(self, name: str | None) -> None:
        """A session that cannot be continued is a mistake."""
        if name is not None and self.disk is None:
            raise BadRequest(f"session {name!r} would end with this command", "add --disk FOLDER, where it is kept")


@dataclass(frozen=True)
class AnswerOptions:
    """How the tokens of an answer are chosen and drafted, and its shape. Defaults are those of the library."""

    max_tokens: MaxTokens = SamplingParams.max_tokens
    temperature: Annotated[float | None, _recommended("temperature", "-t")] = None
    top_k: Annotated[int | None, _recommended("top_k")] = None
    top_p: Annotated[float | None, _recommended("top_p")] = None
    min_p: Annotated[float | None, _recommended("min_p")] = None
    repetition_penalty: Annotated[float | None, _recommended("repetition_penalty")] = None
    presence_penalty: Annotated[float, _sampling("presence_penalty")] = SamplingParams.presence_penalty
    frequency_penalty: Annotated[float, _sampling("frequency_penalty")] = SamplingParams.frequency_penalty
    stop: Annotated[list[str] | None, _sampling("stop")] = None
    seed: Annotated[int | None, _sampling("seed")] = SamplingParams.seed
    sampling: str = shown(
        "greedy",
        rich_help_panel=CHOOSING,
        help="greedy; or model: the model's own settings for what is not given (temperature, top-k, top-p, min-p, "
        "repetition penalty).",
    )
    speculation: Drafter = Speculation.drafter
    draft_nodes: Annotated[int, _drafting("nodes", option="--draft-nodes")] = Speculation.nodes
    draft_depth: Annotated[int, _drafting("depth", option="--draft-depth")] = Speculation.depth
    verify: Annotated[str, _drafting("verify")] = Speculation.verify
    bound: Annotated[float, _drafting("bound")] = Speculation.bound
    prefill: Annotated[str, _prefilling("mode", option="--prefill")] = Prefill.mode
    budget: Annotated[float | None, _prefilling("budget")] = Prefill.budget
    quality: Annotated[float | None, _prefilling("quality")] = Prefill.quality
    prefill_source: Annotated[str, _prefilling("source", option="--prefill-source")] = Prefill.source
    chooser: Annotated[str, _prefilling("chooser")] = Prefill.chooser
    allow_exact: Annotated[bool, _prefilling("allow_exact")] = Prefill.allow_exact
    json_schema: str | None = _shaping(
        None, help="Answer with JSON that fits this schema: a file, or the schema itself."
    )
    json_object: bool = _shaping(False, "--json-object", help="Answer with a JSON object.")
    regex: str | None = _shaping(None, help="Answer with text that this pattern matches as a whole.")
    lark: str | None = _shaping(None, help="Answer in this Lark grammar: a file, or the grammar itself.")
    trie: str | None = _shaping(None, help="Answer with an item of this file of `trie build`.")
    conditional: bool = _shaping(
        False, "--conditional", help="Draw from the model given the grammar, not token by token under a mask."
    )

    def params(self, **more: Any) -> SamplingParams:
        """`more`: values that only some commands have."""
        if self.sampling not in SAMPLINGS:
            raise BadRequest(f"--sampling is {self.sampling!r:.80}", f"use one of {', '.join(SAMPLINGS)}")
        names = {entry.name for entry in fields(SamplingParams)} & {entry.name for entry in fields(self)}
        own = {name: value for name in names if (value := getattr(self, name)) is not None}
        own |= {"stop": stop_strings(self.stop)}
        drafting = Speculation(self.speculation, self.draft_nodes, self.draft_depth, self.verify, self.bound)
        made = {"speculation": drafting, "prefill": self.prefilling(), "grammar": self.grammar()}
        return SamplingParams(**(own | made | more))

    def params_for(self, llm: LLM, **more: Any) -> SamplingParams:
        """The same; with `--sampling model`, values that were not given are the model's own."""
        params = self.params(**more)
        if self.sampling == "model":
            recommended = llm.get_default_sampling_params()
            free = [name for name in RECOMMENDED if getattr(self, name) is None]
            params = replace(params, **{name: getattr(recommended, name) for name in free})
        check_choices(params)
        return params

    def prefilling(self) -> Prefill:
        given = (self.budget, self.quality, self.prefill_source, self.chooser, self.allow_exact)
        if self.prefill == "exact" and given != (None, None, "auto", "auto", False):
            raise BadRequest(
                "--budget, --quality, --prefill-source, --chooser and --allow-exact are about drafted prompts",
                "add --prefill speculative or --prefill provisional",
            )
        return Prefill(self.prefill, *given)

    def grammar(self) -> Grammar | None:
        names = ("json_schema", "json_object", "regex", "lark", "trie")
        given = {f"--{name.replace('_', '-')}": getattr(self, name) for name in names}
        named = [name for name, value in given.items() if value not in (None, False)]
        if len(named) > 1:
            raise BadRequest(f"{' and '.join(named)} cannot go together", "give one shape for the answer")
        if self.conditional and not named:
            raise BadRequest("--conditional is about a grammar", f"add one: {', '.join(given)}")
        sampling: GrammarSampling = "conditional" if self.conditional else "masked"
        if self.json_schema is not None:
            return Grammar.json(_file_or_text(self.json_schema, "--json-schema", text_starts="{"), sampling)
        if self.json_object:
            return Grammar.json(sampling=sampling)
        if self.regex is not None:
            return Grammar.regex(self.regex, sampling)
        if self.lark is not None:
            return Grammar.lark(_file_or_text(self.lark, "--lark", text_has=":"), sampling)
        return None if self.trie is None else Grammar.trie(self.trie, sampling)


@dataclass(frozen=True)
class ChatAnswerOptions(AnswerOptions):
    """The same, with longer answers."""

    max_tokens: MaxTokens = 512


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
            own, kind = entry.metadata.get("option"), kinds[entry.name]
            made = kind if own is None else Annotated[kind, own]
            flat.append(inspect.Parameter(entry.name, parameter.KEYWORD_ONLY, default=entry.default, annotation=made))

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


def check_choices(params: SamplingParams) -> None:
    if params.n > 1 and params.greedy:
        raise BadRequest(
            f"--choices {params.n} at temperature 0 would give the same answer {params.n} times",
            "add --temperature 0.7",
        )


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
