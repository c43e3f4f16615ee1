"""What is asked: how to choose tokens (`SamplingParams`), what shape the answer has (`Grammar`), how to speculate
(`Speculation`), how the prompt's K/V comes about (`Prefill`). Every value is checked on creation; nothing here knows a
model, a tokenizer or which drafters exist.

Each option is defined here once, with its help and its limits (`forerun.options`); command line, HTTP schema and docs
derive from these classes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from forerun.errors import BadRequest
from forerun.options import Converted, check_fields, check_number, option
from forerun.renamed import SAMPLING_ARGUMENTS, accepts_old_fields

DEFAULT_TEMPERATURE = 0.0  # of the library, the command line and the server
MAX_LOGPROBS = 20
MAX_TOKENS = 10_000_000  # of an answer; its context ends sooner
MAX_NODES = 512  # of a draft
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 100.0

RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # by generation_config.json
GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "lark", "trie", "edit")
GRAMMAR_SAMPLING = ("masked", "conditional")
PREFILL_MODES = ("exact", "speculative", "provisional")
PREFILL_SOURCES = ("auto", "draft", "self", "chunk")
PREFILL_CHOOSERS = ("auto", "draft", "lower", "deviation", "tail", "cross", "start", "random")
DRAFTERS = (
    *("auto", "off", "model", "parallel", "block", "heads", "eagle3"),
    *("lookup", "suffix", "copy", "grammar", "self", "cross"),
)
VERIFIERS = ("auto", "match", "rejection", "block", "traversal", "transport", "typical", "bounded", "bounded_kl")


_REGEX_SPECIAL = re.compile(r"[.^$*+?()\[\]{}|\\/&~#-]")
GrammarSampling = Literal["masked", "conditional"]


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like. Compiled when a request comes in, because only then a tokenizer is at hand.

    `Grammar.json({"type": "object", ...})`, `Grammar.json(MyPydanticModel)`, `Grammar.json()` for any JSON object,
    `Grammar.regex("[0-9]+")`, `Grammar.lark("start: ...")`, `Grammar.trie("items.trie")`, `Grammar.choice(["a", "b"])`.
    """

    kind: Literal["json_schema", "json_object", "regex", "lark", "trie", "edit"] = option(
        help="What `source` is.", choices=GRAMMAR_KINDS, closed=True
    )
    source: Converted[str, Any] = option(
        "",
        help="The schema (JSON text, a dict or a pydantic model), the pattern, the Lark grammar, the path of a file "
        "of `forerun trie build`, or the text that a program edits.",
    )
    sampling: GrammarSampling = option(
        "masked",
        help="masked: token by token among those that fit. conditional: from the model's own answers, given that they "
        "fit; costs a look ahead (docs/structured.md).",
        choices=GRAMMAR_SAMPLING,
        closed=True,
    )

    def __post_init__(self) -> None:
        check_fields(self, "grammar: ")
        source: Any = self.source
        if self.kind == "json_schema" and not isinstance(source, str):
            object.__setattr__(self, "source", _schema_text(source))
        elif not isinstance(source, str):
            raise BadRequest(f"the source of a {self.kind} grammar is text, got {source!r:.80}", "pass a str")
        if self.kind == "edit" and self.sampling == "conditional":
            raise BadRequest("an edit program with sampling 'conditional'", "use sampling='masked'")

    @classmethod
    def json(cls, schema: Any = None, sampling: GrammarSampling = "masked") -> Grammar:
        """JSON that fits `schema` (a dict, a pydantic model or JSON text); without one, any JSON object."""
        return cls("json_object", "", sampling) if schema is None else cls("json_schema", schema, sampling)

    @classmethod
    def regex(cls, pattern: str, sampling: GrammarSampling = "masked") -> Grammar:
        """Text that the pattern matches as a whole."""
        return cls("regex", pattern, sampling)

    @classmethod
    def lark(cls, grammar: str, sampling: GrammarSampling = "masked") -> Grammar:
        """Text of a grammar in Lark's notation."""
        return cls("lark", grammar, sampling)

    @classmethod
    def trie(cls, path: str | Path, sampling: GrammarSampling = "masked") -> Grammar:
        """An item of a file that `forerun trie build` wrote."""
        return cls("trie", str(path), sampling)

    @classmethod
    def edit(cls, text: str) -> Grammar:
        """A program that edits this text: copies of its lines, and new lines (docs/edits.md)."""
        return cls("edit", text)

    @classmethod
    def choice(cls, texts: Iterable[str], sampling: GrammarSampling = "masked") -> Grammar:
        """One of these texts."""
        found = list(texts)
        if isinstance(texts, str) or not found or not all(isinstance(text, str) and text for text in found):
            raise BadRequest(f"the texts of a choice are {texts!r:.80}", "give a list of texts that are not empty")
        return cls("regex", any_of(found), sampling)


def any_of(texts: Iterable[str]) -> str:
    """A regex that matches these texts and no others."""
    return "|".join(_REGEX_SPECIAL.sub(r"\\\g<0>", text) for text in texts)


_GRAMMARS = "pass Grammar.json(schema), Grammar.regex(pattern) or Grammar.lark(text)"


def _schema_text(schema: Any) -> str:
    """A JSON schema as text: of a pydantic model (class or instance) its own, of a dict the dict."""
    if callable(made := getattr(schema, "model_json_schema", None)):
        schema = made()
    if isinstance(schema, (dict, bool)):
        try:
            return json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"the JSON schema cannot be written as JSON: {error}", "use plain values") from None
    hint = 'pass e.g. {"type": "object"}'
    raise BadRequest(f"a JSON schema is a dict, a pydantic model or JSON text, got {schema!r:.80}", hint)


@dataclass(frozen=True)
class Speculation:
    """How drafts of the answer are made and verified. The defaults never change what is answered."""

    drafter: str = option(
        "auto", help="auto: whatever pays; off; or a drafter's name; several joined by +.", choices=DRAFTERS
    )
    nodes: int = option(64, help="Most tokens drafted in a step; 0: off.", low=0, high=MAX_NODES, whole=True)
    depth: int = option(
        0,
        help="Longest drafted path; 0: as long as it pays; else exactly so, whatever it costs (for studies).",
        low=0,
        high=MAX_NODES,
        whole=True,
    )
    verify: str = option(
        "auto", help="The rule that accepts drafts; typical, bounded and bounded_kl are lossy.", choices=VERIFIERS
    )
    bound: float = option(
        0.0, help="How far a lossy rule may stray from the model, in its own terms.", low=0.0, high=100.0
    )

    def __post_init__(self) -> None:
        check_fields(self, "speculation: ")

    @property
    def off(self) -> bool:
        """Whether nothing is drafted."""
        return self.drafter == "off" or self.nodes == 0


@dataclass(frozen=True)
class Prefill:
    """How a prompt's K/V comes about. `exact` computes it; the other modes draft it and must be asked for.

    `speculative` answers from drafted K/V that was checked and recomputed where it was wrong; `provisional` shows such
    an answer at once and replaces it by the exact one as soon as that is known.
    """

    mode: str = option(
        "exact",
        help="exact; speculative: from drafted K/V, checked; provisional: such an answer at once, the exact one after.",
        choices=PREFILL_MODES,
        closed=True,
    )
    budget: float | None = option(
        None,
        help="Most work, as a share of exact prefill's, as long as checks pass; default: the profile's.",
        low=0.0,
        high=1.0,
        open_low=True,
    )
    quality: float | None = option(
        None,
        help="Least agreement with exact prefill, as the profile measured it, such as 0.95; default: the profile's.",
        low=0.0,
        high=1.0,
        open_low=True,
    )
    source: str = option(
        "auto", help="What drafts the prompt's K/V; auto: the profile's, or text met before.", choices=PREFILL_SOURCES
    )
    chooser: str = option("auto", help="What chooses the tokens that are recomputed.", choices=PREFILL_CHOOSERS)
    allow_exact: bool = option(False, help="Where the prompt cannot be drafted, compute it instead of an error.")

    def __post_init__(self) -> None:
        check_fields(self, "prefill: ")
        if self.budget is not None and self.quality is not None:
            hint = "give one of them: the other follows from the profile's curve"
            raise BadRequest(f"prefill has a budget of {self.budget} and a quality of {self.quality}", hint)
        given = [entry.name for entry in fields(self)[1:] if getattr(self, entry.name) != entry.default]
        if self.exact and given:
            named = ", ".join(f"{name} {getattr(self, name)!r}" for name in given)
            hint = f"ask for the mode speculative or provisional, or leave {' and '.join(given)} out"
            raise BadRequest(f"prefill is 'exact', and {named} is about drafted prompts", hint)

    @property
    def exact(self) -> bool:
        """Whether the prompt is computed and nothing of it drafted."""
        return self.mode == "exact"


@accepts_old_fields(SAMPLING_ARGUMENTS)
@dataclass(frozen=True)
class SamplingParams:
    """How to choose the next token, and everything else that is asked of one request.

    The default is greedy (temperature 0) in the library, on the command line and over HTTP: the same prompt then gives
    the same answer, answers can be compared with plain decoding token for token, and speculation accepts most. Models
    that recommend other settings ship them: `llm.get_default_sampling_params()`, or `--sampling model`. As in vLLM,
    `max_tokens=None` goes on until the context ends, and a `top_k` of -1 is off.
    """

    temperature: float = option(
        DEFAULT_TEMPERATURE, help="0: greedy; 0.7 is usual for chat that may vary.", low=0.0, high=100.0
    )
    top_k: int = option(0, help="Keep the k likeliest tokens; 0 or -1: all.", low=-1, high=1_000_000, whole=True)
    top_p: float = option(
        1.0, help="Keep the likeliest tokens up to this total probability.", low=0.0, high=1.0, open_low=True
    )
    min_p: float = option(0.0, help="Drop tokens below this share of the likeliest one.", low=0.0, high=1.0)
    repetition_penalty: float = option(
        1.0,
        help="Above 1: repeat less, over prompt and answer, multiplicative.",
        low=0.01,  # logits stay far from float32's end
        high=10.0,
    )
    presence_penalty: float = option(0.0, help="Against tokens already in the answer.", low=-2.0, high=2.0)
    frequency_penalty: float = option(0.0, help="The same, for each time they came.", low=-2.0, high=2.0)
    max_tokens: Converted[int, int | None] = option(
        256, help="Longest answer in tokens.", low=1, high=MAX_TOKENS, whole=True
    )
    stop: Converted[tuple[str, ...], str | Iterable[str]] = option(
        (), help="End the answer before this text, or any of these texts."
    )
    stop_token_ids: Converted[tuple[int, ...], Iterable[int]] = option(
        (), help="End the answer before any of these tokens."
    )
    seed: int | None = option(
        None, help="Same seed, same answer; default: drawn once per request.", low=-(2**63), high=2**64, whole=True
    )
    logprobs: int | None = option(
        None,
        help="Log-probabilities of the chosen token and of this many likeliest ones; default: none.",
        low=0,
        high=MAX_LOGPROBS,
        whole=True,
    )
    n: int = option(1, help="Answers to draw; at temperature 0 all are the same.", low=1, high=256, whole=True)
    ignore_eos: bool = option(False, help="Go on after the model's end-of-text token.")
    logit_bias: Converted[dict[int, float], Mapping[int, float]] = option(
        factory=dict, help=f"Added to the logits of these token ids, from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}."
    )
    grammar: Grammar | None = option(None, help="What the answer must look like.")
    speculation: Converted[Speculation, Speculation | str] = option(
        Speculation(), help="How drafts are made and verified; a drafter's name is enough."
    )
    prefill: Converted[Prefill, Prefill | str] = option(
        Prefill(), help="How the prompt's K/V comes about; a mode's name is enough."
    )
    cache: bool = option(True, help="False: reads no K/V of other requests, and leaves none for them.")
    prediction: Converted[tuple[int, ...], str | Iterable[int]] = option(
        (), help="What the answer may well be, as text or token ids: drafted from, never more than that."
    )
    timeline: bool = option(False, help="`Usage.timeline` lists every step.")

    def __post_init__(self) -> None:
        self._convert("speculation", Speculation, "use auto or off")
        self._convert("prefill", Prefill, "use exact or speculative")
        self._tuple("stop", "text or a list of texts")
        self._tuple("stop_token_ids", "a list of token ids")
        if not isinstance(self.prediction, str):  # text is encoded by the LLM that gets it
            self._tuple("prediction", "text or a list of token ids")
        for name, off, value in (("max_tokens", None, MAX_TOKENS), ("top_k", -1, 0)):  # as vLLM has them
            if type(getattr(self, name)) is type(off) and getattr(self, name) == off:
                object.__setattr__(self, name, value)
        check_fields(self)
        self._check_values()

    def _convert(self, name: str, kind: type[Speculation] | type[Prefill], hint: str) -> None:
        value = getattr(self, name)
        if isinstance(value, str):
            object.__setattr__(self, name, kind(value))
        elif not isinstance(value, kind):
            raise BadRequest(f"{name} must be a name or a {kind.__name__}, got {value!r:.80}", hint)

    def _tuple(self, name: str, expected: str) -> None:
        value = getattr(self, name)
        if isinstance(value, str):
            object.__setattr__(self, name, (value,))
        elif isinstance(value, (tuple, list, set, frozenset)):
            object.__setattr__(self, name, tuple(value))
        else:
            raise BadRequest(f"{name} must be {expected}, got {value!r:.80}", "leave it out for none")

    def _check_values(self) -> None:
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise BadRequest(f"grammar must be a Grammar, got {self.grammar!r:.80}", _GRAMMARS)
        if self.conditional:
            self._check_conditional()
        if self.grammar is not None and self.grammar.kind == "edit" and self.prefill.mode == "provisional":
            raise BadRequest("prefill is 'provisional' beside an edit program", "use prefill='exact'")
        if not isinstance(self.prediction, str) and any(type(token) is not int for token in self.prediction):
            raise BadRequest(f"prediction must be text or token ids, got {self.prediction!r:.80}", "leave it out")
        if not self.cache and self.prefill.source == "chunk":
            hint = "leave cache as it is, or take another source"
            raise BadRequest("prefill: the source 'chunk' reads what others left, and cache is false", hint)
        for name, most in (("stop", MAX_STOP_STRINGS), ("stop_token_ids", MAX_STOP_TOKEN_IDS)):
            if len(getattr(self, name)) > most:
                many = f"{name} has {len(getattr(self, name))} entries, the limit is {most}"
                raise BadRequest(many, "keep the few that matter")
        for token in self.stop_token_ids:
            if type(token) is not int or token < 0:
                raise BadRequest(f"stop_token_ids has {token!r:.80}", "give token ids: ints of at least 0")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise BadRequest(f"stop strings must be non-empty text, got {text!r:.80}", "remove it from `stop`")
        if not isinstance(self.logit_bias, dict):
            raise BadRequest(f"logit_bias must map token ids to numbers, got {self.logit_bias!r:.80}", "leave it out")
        for token, bias in self.logit_bias.items():
            if type(token) is not int or token < 0:
                raise BadRequest(f"logit_bias has the key {token!r:.80}, keys are token ids", "give ints of at least 0")
            check_number(f"logit_bias[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)

    def _check_conditional(self) -> None:
        """Conditional sampling is defined by the model's own distribution of whole answers."""
        cut = {"top_k": self.top_k != 0, "top_p": self.top_p < 1.0, "min_p": self.min_p > 0.0}
        given = [f"{name} {getattr(self, name)}" for name, there in cut.items() if there]
        if given:
            raise BadRequest(
                f"{' and '.join(given)} beside a grammar with sampling 'conditional': they would cut whole answers off",
                "leave them out, or use sampling='masked'",
            )
        if not self.prefill.exact:
            hint = "use prefill='exact', or sampling='masked'"
            raise BadRequest(f"prefill is {self.prefill.mode!r} beside a grammar with sampling 'conditional'", hint)

    @classmethod
    def from_generation_config(cls, settings: Mapping[str, Any]) -> SamplingParams:
        """What a model's generation_config.json recommends; `do_sample: false` is greedy, whatever else it has."""
        if not settings.get("do_sample", False):
            return cls(repetition_penalty=settings.get("repetition_penalty") or 1.0)
        given = {name: settings[name] for name in RECOMMENDED if settings.get(name) is not None}
        return cls(**({"temperature": 1.0} | given))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without a draw."""
        return self.temperature == 0.0

    @property
    def conditional(self) -> bool:
        """Whether the answer is drawn from the model conditioned on its grammar, which takes a look ahead."""
        return self.grammar is not None and self.grammar.sampling == "conditional"

    @property
    def penalised(self) -> bool:
        """Whether penalties or biases change the logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.logit_bias)


class SamplingOptions(TypedDict, total=False):
    """Fields of `SamplingParams` as keyword arguments of one call, for the type checker; a test compares them."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int | None
    stop: str | Iterable[str]
    stop_token_ids: Iterable[int]
    seed: int | None
    logprobs: int | None
    n: int
    ignore_eos: bool
    logit_bias: Mapping[int, float]
    grammar: Grammar | None
    speculation: Speculation | str
    prefill: Prefill | str
    cache: bool
    prediction: str | Iterable[int]
    timeline: bool
