"""Grammars under the names that other servers have for them: vLLM's `guided_json`, `guided_regex`, `guided_choice`,
`guided_grammar`, also as `structured_outputs`; llama.cpp's `json_schema` and `grammar`.

Knows no parser: a grammar that cannot be compiled is refused where it is.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from forerun.errors import BadRequest
from forerun.params import Grammar, any_of
from forerun.serve.derived import LenientModel

_NAMES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class StructuredOutputs(LenientModel):
    """vLLM's newer names."""

    json_: str | dict[str, Any] | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=10_000)] | None = None
    grammar: str | None = None


class GuidedFields(LenientModel):
    guided_json: str | dict[str, Any] | bool | None = Field(
        default=None, description="A JSON schema that the answer fits."
    )
    guided_regex: str | None = Field(default=None, description="A regex that the answer matches as a whole.")
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=10_000)] | None = Field(
        default=None, description="Texts, one of which is the answer."
    )
    guided_grammar: str | None = Field(default=None, description="A grammar in Lark's notation, or in GBNF.")

    structured_outputs: StructuredOutputs | None = None
    json_schema: dict[str, Any] | None = Field(default=None, description="llama.cpp's name of guided_json.")
    grammar_: str | None = Field(default=None, alias="grammar", description="llama.cpp's name of guided_grammar.")

    @model_validator(mode="after")
    def _one_name(self) -> GuidedFields:
        """The newer and llama.cpp's names are converted to the older of vLLM."""
        outputs = self.structured_outputs or StructuredOutputs()
        others: dict[str, Any] = {name: getattr(outputs, name.removeprefix("guided_")) for name in _NAMES[1:]}
        others["guided_json"] = outputs.json_ if outputs.json_ is not None else self.json_schema
        others["guided_grammar"] = others["guided_grammar"] or self.grammar_ or None
        for name, value in others.items():
            if value is not None and getattr(self, name) is None:
                setattr(self, name, value)
        return self

    @property
    def is_guided(self) -> bool:
        return any(getattr(self, name) is not None for name in _NAMES)

    def guided(self, other: Grammar | None) -> Grammar | None:
        """The request's grammar; `other`: that of its `response_format`."""
        given = [name for name in _NAMES if getattr(self, name) is not None]
        if len(given) + (other is not None) > 1:
            names = [*given, *(["response_format"] if other is not None else [])]
            raise BadRequest(f"{' and '.join(names)} are in one request", "an answer has one grammar: leave others out")
        if self.guided_json is not None:
            return Grammar.json(self.guided_json)
        if self.guided_regex is not None:
            return Grammar.regex(self.guided_regex)
        if self.guided_choice is not None:
            return Grammar.regex(any_of(self.guided_choice))
        return other if self.guided_grammar is None else Grammar.lark(lark(self.guided_grammar))


def lark(text: str) -> str:
    """A grammar in Lark's notation: llama.cpp's has `::=` where Lark has a colon."""
    if "::=" not in text:
        return text
    from llguidance import gbnf_to_lark

    try:
        return str(gbnf_to_lark.any_to_lark(text))
    except Exception as error:
        raise BadRequest(f"the grammar is no GBNF: {error!s:.200}", "write it in Lark's notation") from None
