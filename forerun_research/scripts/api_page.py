"""docs/api.md out of the docstrings: every public name with its signature, its docstring and its fields.

    python -m forerun_research.scripts.api_page

A test compares the page with what this makes. Knows Markdown and docstrings, nothing of what they describe.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any, ForwardRef

import forerun
from forerun.options import limits
from forerun.renamed import OldLLMNames

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
WIDTH = 100  # of a signature on one line
INTRODUCTION = """# The Python API

Everything here is imported from `forerun` (`from forerun import LLM, SamplingParams`) or from the module that heads its
part. This page is made from the docstrings by `python -m forerun_research.scripts.api_page`, and a test compares them.
"""
PARTS = {
    "The model": ("LLM",),
    "What is asked": ("SamplingParams", "Speculation", "Prefill", "Grammar"),
    "What comes back": ("Completion", "Choice", "Event", "Usage", "PrefillReport", "Stats"),
    "Sessions and tiers": ("Session", "TierConfig"),
    "Errors": (
        "ForerunError",
        "BadRequest",
        "OutOfPages",
        "ModelNotFound",
        "UnsupportedModel",
        "CorruptModel",
        "BadProfile",
        "BadDrafter",
    ),
}
MODULES = ("drafters", "recipes", "sharing")


def page() -> str:
    parts = [INTRODUCTION]
    for title, names in PARTS.items():
        parts.append(f"## {title}\n")
        parts += [_described(name, getattr(forerun, name)) for name in names]
    for module in MODULES:
        package = getattr(forerun, module)
        parts.append(f"## `forerun.{module}`\n\n{_docstring(package)}\n")
        parts += [_described(name, getattr(package, name)) for name in package.__all__]
    return "\n".join(parts)


def _described(name: str, thing: Any) -> str:
    if not callable(thing):
        return f"### `{name}`\n\nA {type(thing).__name__}.\n"
    if not inspect.isclass(thing):
        return f"### `{name}`\n\n{_signature(name, thing)}\n\n{_docstring(thing)}\n"
    bases = ", ".join(base.__name__ for base in thing.__bases__ if base not in (object, OldLLMNames, Exception))
    text = f"### `{name}`" + (f" ({bases})" if bases and issubclass(thing, Exception) else "") + "\n"
    if dataclasses.is_dataclass(thing):
        text += f"\n{_docstring(thing)}\n\n{_fields(thing)}\n"
    elif issubclass(thing, Exception) or _is_protocol(thing) or _docstring(thing).startswith("Made by"):
        text += f"\n{_docstring(thing)}\n"
    else:
        text += f"\n{_signature(name, thing)}\n\n{_docstring(thing)}\n"
    return text + "".join(_members(thing))


def _is_protocol(thing: Any) -> bool:
    return getattr(thing, "_is_protocol", False)


def _members(thing: type) -> list[str]:
    """Public methods and properties of a class, in the order of its source."""
    found = []
    for name, member in vars(thing).items():
        if name.startswith("_") or name in vars(OldLLMNames):
            continue
        if isinstance(member, property):
            kind = _type(inspect.signature(member.fget).return_annotation) if member.fget else ""
            found.append(f"\n- **`{name}`** `{kind}` {_one_paragraph(member)}".rstrip() + "\n")
        elif isinstance(member, classmethod):
            found.append(_method(name, getattr(thing, name)))
        elif inspect.isfunction(member):
            found.append(_method(name, member))
    return found


def _method(name: str, function: Any) -> str:
    body = inspect.cleandoc(function.__doc__ or "")
    text = f"\n#### `{name}`\n\n{_signature(name, function)}\n"
    return text + (f"\n{_markdown(body)}\n" if body else "")


def _signature(name: str, thing: Any) -> str:
    signature = inspect.signature(thing)
    given = [_parameter(p) for p in signature.parameters.values() if p.name != "self"]
    kinds = [p.kind for p in signature.parameters.values() if p.name != "self"]
    first = next((i for i, kind in enumerate(kinds) if kind is inspect.Parameter.KEYWORD_ONLY), None)
    if first is not None:
        given.insert(first, "*")
    result = signature.return_annotation
    arrow = (
        "" if inspect.isclass(thing) or result in (inspect.Signature.empty, None, "None") else f" -> {_type(result)}"
    )
    prefix = "async " if inspect.iscoroutinefunction(thing) else ""
    line = f"{prefix}{name}({', '.join(given)}){arrow}"
    if len(line) > WIDTH:
        line = f"{prefix}{name}(\n" + "".join(f"    {part},\n" for part in given) + f"){arrow}"
    return f"```python\n{line}\n```"


def _parameter(parameter: inspect.Parameter) -> str:
    text = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))  # with its stars
    if parameter.annotation is not parameter.empty:
        text += f": {_type(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += f" = {_value(parameter.default)}"
    return text


def _type(annotation: Any) -> str:
    """As it is written; of a field that is converted, what may be given."""
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    text = re.sub(r"^Unpack\[(.*)\]$", r"\1", text)
    if text.startswith("Converted["):
        depth, inner = 0, text[len("Converted[") : -1]
        for i, letter in enumerate(inner):
            depth += (letter == "[") - (letter == "]")
            if letter == "," and depth == 0:
                return inner[i + 1 :].strip()
    return text


def _value(value: Any) -> str:
    if value is dataclasses.MISSING or str(value) == "<factory>":
        return "..."
    return f"{type(value).__name__}()" if dataclasses.is_dataclass(value) else repr(value)


def _fields(thing: type) -> str:
    """A table: of a field without help of its own, the comment that stands behind it in the source."""
    rows = ["| field | type | default | |", "|---|---|---|---|"]
    comments = _comments(thing)
    for entry in dataclasses.fields(thing):
        if entry.name.startswith("_"):
            continue
        about = entry.metadata.get("help") or comments.get(entry.name, "")
        known, within = ", ".join(map(str, entry.metadata.get("choices", ()))), limits(entry)
        extra = "; ".join(part for part in (known, within) if part)
        about += f" ({extra})" if extra else ""
        made = entry.default_factory is not dataclasses.MISSING
        default = "" if entry.default is dataclasses.MISSING and not made else _default(entry)
        rows.append(f"| `{entry.name}` | `{_type(entry.type)}` | {default} | {about} |".replace(" | `", " | `"))
    return "\n".join(row.replace("||", "|  |") if row.count("`") else row for row in map(_escaped, rows))


def _default(entry: dataclasses.Field[Any]) -> str:
    return "empty" if entry.default is dataclasses.MISSING else f"`{_value(entry.default)}`"


def _escaped(row: str) -> str:
    """A bar inside code would end its cell."""
    return re.sub(r"`[^`]*`", lambda found: found[0].replace("|", "\\|"), row)


def _comments(thing: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for kind in reversed(thing.__mro__):
        if dataclasses.is_dataclass(kind):
            lines = re.findall(r"^    (\w+):[^\n#]*#\s*(.+)$", inspect.getsource(kind), re.MULTILINE)
            found |= dict(lines)
    return found


def _docstring(thing: Any) -> str:
    text = inspect.cleandoc(thing.__doc__ or "")
    return "" if text.startswith(f"{getattr(thing, '__name__', '')}(") else _markdown(text)


def _one_paragraph(thing: Any) -> str:
    return " ".join(_docstring(thing).split())


def _markdown(text: str) -> str:
    """Indented lines of a docstring are code."""
    parts, code = [], False
    for line in text.splitlines():
        indented = line.startswith("    ")
        if indented != code and line.strip():
            parts.append("```python" if indented else "```")
            if not indented:
                parts.append("")
            code = indented
        parts.append(line[4:] if code else line)
    if code:
        parts.append("```")
    text = "\n".join(parts)
    return re.sub(r"\n\n```\n\n", "\n```\n\n", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: {len(page().splitlines()):,} lines")
