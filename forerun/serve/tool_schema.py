"""Tools as requests describe them, and the calls in messages, in OpenAI's form. Knows no template and no model."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from forerun.errors import BadRequest
from forerun.serve.derived import LenientModel

MAX_TOOLS = 128
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_-]+$")]


class Function(LenientModel):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # arguments fit `parameters` in every call, not only where `tool_choice` forces one

    @property
    def schema_(self) -> dict[str, Any]:
        """The schema of its arguments, which are always an object."""
        if self.parameters is None:
            return NO_PARAMETERS
        if self.parameters.get("type", "object") != "object":
            kind = self.parameters["type"]
            raise BadRequest(f"the parameters of {self.name} are of type {kind!r:.40}", "describe an object")
        return {"type": "object"} | self.parameters


class Tool(LenientModel):
    type: Literal["function"]
    function: Function


class NamedFunction(LenientModel):
    name: str


class NamedTool(LenientModel):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(LenientModel):
    name: str
    arguments: str

    @property
    def values(self) -> Any:
        """The arguments as templates expect them; unparsed where a model wrote invalid JSON."""
        try:
            return json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments


class ToolCall(LenientModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # sent by clients that assembled it from a stream


def call_object(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A call as messages have it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chosen(tools: list[Tool] | None, choice: ToolChoice | None) -> tuple[list[Tool], bool]:
    """The tools that the model may call, and whether it must."""
    if not tools:
        if isinstance(choice, NamedTool) or choice == "required":
            raise BadRequest("tool_choice asks for a call, and there are no tools", "give tools, or leave it out")
        return [], False
    names = [tool.function.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadRequest(f"tools has {twice[0]} twice", "give each function a name of its own")
    if not isinstance(choice, NamedTool):
        return ([] if choice == "none" else tools), choice == "required"
    if choice.function.name not in names:
        raise BadRequest(f"tool_choice names {choice.function.name!r:.80}", f"there is {', '.join(names)}"[:200])
    return [tool for tool in tools if tool.function.name == choice.function.name], True
