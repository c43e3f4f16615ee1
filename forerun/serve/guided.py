"""Grammars under the names that vLLM has for them: `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`.

Knows no parser: a grammar that cannot be compiled is refused where it is.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import Field

from forerun.errors import BadRequest
from forerun.params import Grammar
from forerun.serve.derived import LenientModel

_NAMES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_REGEX_SPECIAL = re.compile(r"[.^$*+?()\[\]{}|\\/&~#-]")


class GuidedFields(LenientModel):
    guided_json: str | dict[str, Any] | bool | None = Field(
        default=None, description="A JSON schema that the answer fits."
    )
    guided_regex: str | None = Field(default=None, description="A regex that the answer matches as a whole.")
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=10_000)] | None = Field(
        default=None, description="Texts, one of which is the answer."
    )
    guided_grammar: str | None = Field(default=None, description="A grammar in Lark's notation, or in GBNF.")

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
            text = self.guided_json
            return Grammar("json_schema", text if isinstance(text, str) else json.dumps(text))
        if self.guided_regex is not None:
            return Grammar("regex", self.guided_regex)
        if self.guided_choice is not None:
            return Grammar("regex", "|".join(_REGEX_SPECIAL.sub(r"\\\g<0>", text) for text in self.guided_choice))
        if self.guided_grammar is not None:
            return Grammar("lark", _lark(self.guided_grammar))
        return other


def _lark(text: str) -> str:
    """llama.cpp's notation has `::=` where Lark has a colon."""
    if "::=" not in text:
        return text
    from llguidance import gbnf_to_lark

    try:
        return str(gbnf_to_lark.any_to_lark(text))
    except Exception as error:
        raise BadRequest(f"guided_grammar is no GBNF: {error!s:.200}", "write it in Lark's notation") from None
