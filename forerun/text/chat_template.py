"""Renders a model's Jinja chat template so that messages cannot smuggle control tokens in.

Control-token text inside messages is swapped for private stand-in characters before rendering and swapped back after
the result was cut at the template's own control tokens. So a template may trim, split or test contents as it likes,
and a conversation without such text renders exactly as the template's authors meant. Does not know token ids.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from forerun.errors import BadRequest, CorruptModel

_STAND_INS = range(0xF0000, 0xFFFFD)  # a private-use plane: no template or tokenizer gives these a meaning

_LOOP_OVER_PARTS = re.compile(r"\bfor \w+ in [\w.\[\]'\"]*content\b")
ROLES = ("system", "user", "assistant", "tool")

Piece = tuple[str, bool]  # text, and whether control tokens in it count


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks answers for training; for rendering its body is all there is."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template (or several by name: `tool_use` is used when there are tools)."""

    def __init__(
        self, template: str | dict[str, str], tokens: dict[str, str], specials: Iterable[str], source: str
    ) -> None:
        self._texts = {"default": template} if isinstance(template, str) else template
        self._tokens, self._source = tokens, source
        self._specials = sorted(filter(None, specials), key=len, reverse=True)
        self._compiled: dict[str, jinja2.Template] = {}
        # A control token's beginning at the end of a string could be completed by what the template puts after it
        self._starts = {special[:n] for special in self._specials for n in range(1, len(special))}
        self._search: re.Pattern[str] | None = None
        self._loops = any(_LOOP_OVER_PARTS.search(text) for text in self._texts.values())

    @property
    def tool_text(self) -> str:
        """The template that conversations with tools go through, as its authors wrote it."""
        return self._texts.get("tool_use") or self._texts.get("default", "")

    def folder_settings(self) -> dict[str, Any]:
        """As tokenizer_config.json has it."""
        template: Any = [{"name": name, "template": text} for name, text in self._texts.items()]
        return self._tokens | {"chat_template": template if len(template) > 1 else template[0]["template"]}

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, prompt: bool
    ) -> list[Piece]:
        """The conversation as pieces of text; usually one, trusted, because no message holds control-token text."""
        if not messages:
            raise BadRequest("the conversation has no messages", "pass at least one message")
        guard = _Guard(self._starts, self._pattern())
        text = self._run(guard.clean(self.plain(messages)), guard.clean(list(tools)) if tools else None, prompt)
        if not guard.hidden:
            return [(text, True)]
        cut = self._pattern().split(text)  # plain, control, plain, control, ...
        return [(guard.restore(piece), i % 2 == 1) for i, piece in enumerate(cut) if piece]

    def plain(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages, checked, with the parts of their contents (`[{"type": "text", "text": ...}]`) joined for
        templates that do not go through parts themselves."""
        made = []
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                hint = "pass {'role': ..., 'content': ...}"
                raise BadRequest(f"a message must have a role, got {message!r:.80}", hint)
            if message["role"] not in ROLES and not self._names(message["role"]):
                raise BadRequest(f"a message has the role {message['role']!r:.80}", f"known are {', '.join(ROLES)}")
            content = message.get("content")
            text = "".join(map(_part_text, content)) if isinstance(content, (list, tuple)) else content
            made.append(message | {"content": text} if text is not content and not self._loops else dict(message))
        return made

    def _names(self, role: str) -> bool:
        """Whether the template itself compares roles with this one: some models have roles of their own."""
        return any(f"{quote}{role}{quote}" in text for text in self._texts.values() for quote in "'\"")

    def _pattern(self) -> re.Pattern[str]:
        if self._search is None:
            self._search = re.compile("(" + ("|".join(map(re.escape, self._specials)) or r"(?!)") + ")")
        return self._search

    def _run(self, messages: Any, tools: Any, prompt: bool) -> str:
        template = self._template("tool_use" if tools and "tool_use" in self._texts else "default")
        try:
            return template.render(messages=messages, tools=tools, add_generation_prompt=prompt, **self._tokens)
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise BadRequest(
                f"the chat template of {self._source} refuses these messages: {kind}{error}",
                "give each message a role and text content, in an order that this model was trained for",
            ) from error

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            if name not in self._texts:
                raise CorruptModel(f"{self._source} has no {name!r} chat template", f"it has {', '.join(self._texts)}")
            try:
                self._compiled[name] = _environment().from_string(self._texts[name])
            except jinja2.TemplateSyntaxError as error:
                hint = "fetch it again"
                raise CorruptModel(f"{self._source}: its chat template is damaged ({error})", hint) from error
        return self._compiled[name]


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise BadRequest(f"a part of a message is {part!r:.80}", 'parts are {"type": "text", "text": ...}: text only')
    return text


class _Guard:
    """Swaps control-token text in any nested value for stand-ins, and stand-ins for the text."""

    def __init__(self, starts: set[str], pattern: re.Pattern[str]) -> None:
        self._pattern, self._starts = pattern, starts
        self._longest = max(map(len, starts), default=0)
        self._stand_ins: dict[str, str] = {}  # text: stand-in
        self.hidden: dict[str, str] = {}  # stand-in: text

    def clean(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._clean_text(value)
        if isinstance(value, dict):
            return {self.clean(key): self.clean(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.clean(item) for item in value]
        return value

    def _clean_text(self, text: str) -> str:
        text = re.sub(r"[\U000F0000-\U000FFFFD]", lambda found: self._hide(found[0]), text)
        text = self._pattern.sub(lambda found: self._hide(found[0]), text)
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._starts:
                return text[:-length] + self._hide(text[-length:])
        return text

    def _hide(self, text: str) -> str:
        stand_in = self._stand_ins.get(text)
        if stand_in is None:
            if len(self.hidden) == len(_STAND_INS):
                raise BadRequest(f"the messages hold more than {len(_STAND_INS)} private-use characters", "remove them")
            stand_in = self._stand_ins[text] = chr(_STAND_INS[len(self.hidden)])
            self.hidden[stand_in] = text
        return stand_in

    def restore(self, text: str) -> str:
        return re.sub(r"[\U000F0000-\U000FFFFD]", lambda found: self.hidden.get(found[0], found[0]), text)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it: their whitespace rules, plain JSON, and two functions they call."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment
