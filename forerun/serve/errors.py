"""Errors as OpenAI's clients expect them: a status, and one `error` object with message, type, param and code.

`hint`, the way out, is Forerun's own and is part of the message, too. Knows no engine beyond its errors.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from forerun.decode.grammar import DeadEnd
from forerun.errors import BadProfile, BadRequest, ForerunError, OutOfPages
from forerun.serve.schema import forerun_names

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
_ANTHROPIC_TYPES = _TYPES | {413: "request_too_large", 408: "timeout_error", 503: "overloaded_error"}
_SHOULD = "Input should be "  # pydantic's message where a value has the wrong type
_CODES = {405: "method_not_allowed", 413: "body_too_large", 408: "timeout"}


def described_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What the OpenAPI document has about a path's errors."""
    found: dict[int | str, dict[str, Any]] = dict.fromkeys(statuses, {"description": "An error in OpenAI's form"})
    return found | {422: {"description": "Never sent: a body that does not fit the schema gets 400"}}


class ApiError(Exception):
    """A response other than 2xx."""

    def __init__(
        self,
        status: int,
        message: str,
        hint: str = "",
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.hint = status, message, hint
        self.code, self.param, self.headers = code or _CODES.get(status), param, headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        text = f"{self.message} ({self.hint})" if self.hint else self.message
        error = {"message": text, "type": kind, "param": self.param, "code": self.code, "hint": self.hint}
        return {"error": {name: _encodable(value) for name, value in error.items()}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The same in Anthropic's form: its names of kinds, and a type of its own outside."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": self.body["error"] | {"type": kind}}

    def response(self, path: str) -> JSONResponse:
        """As clients of that path expect it."""
        anthropic = path.startswith("/v1/messages")
        return JSONResponse(self.anthropic_body if anthropic else self.body, self.status, self.headers)

    @classmethod
    def of(cls, error: Exception) -> ApiError:
        """Any error as clients get it; of an unexpected one no message, as it may contain a prompt."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, (BadRequest, OutOfPages, BadProfile, DeadEnd)):
            return cls(400, str(error), error.hint)
        if isinstance(error, ForerunError):
            return cls(500, str(error), error.hint)
        if isinstance(error, TimeoutError):
            return timeout()
        if isinstance(error, RecursionError):  # JSON that could be read, but not written again
            return cls(400, "the request is nested too deeply", "use fewer levels")
        return cls(500, "the server failed to answer this request", "its log has the kind of error")


def timeout() -> ApiError:
    """A second attempt would time out, too: the header tells clients not to retry."""
    hint = "ask for fewer tokens, or have the server's limit raised"
    return ApiError(408, "the request took longer than this server allows", hint, headers={"x-should-retry": "false"})


async def on_api_error(request: Request, error: Exception) -> JSONResponse:
    response = ApiError.of(error).response(request.url.path)
    response.headers["x-request-id"] = request.state.request_id  # an unexpected one is handled outside the middleware
    return response


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Refused by the framework: unknown paths, wrong methods, bodies that cannot be decoded."""
    assert isinstance(error, HTTPException)
    message, hint = str(error.detail), ""
    if error.status_code == 404:
        message, hint = f"there is nothing at {request.url.path}", _meant(request)
    elif error.status_code == 400:
        message = "the body cannot be read as JSON in UTF-8"
    return ApiError(error.status_code, message, hint, headers=dict(error.headers or {})).response(request.url.path)


def _meant(request: Request) -> str:
    """The path of a client whose base URL lacks `/v1`, or has it where the client adds it by itself."""
    paths = {getattr(route, "path", "") for route in request.app.routes}
    path = request.url.path
    return next((f"ask at {near}" for near in (f"/v1{path}", path.removeprefix("/v1")) if near in paths - {path}), "")


async def on_invalid(request: Request, error: Exception) -> JSONResponse:
    """A body that is JSON but not a request, or no JSON: its first mistake."""
    assert isinstance(error, RequestValidationError)
    return _invalid(error).response(request.url.path)


def _invalid(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    parts, errors = _first_mistake(error)
    path = ".".join(map(str, parts))
    if errors[0]["type"] == "extra_forbidden":
        return ApiError(400, f"{path} is not supported here", _suggestion(str(parts[-1])), param=path)
    what = f"{path or 'the body'}: {_expected(errors)}"
    return ApiError(400, what, "send application/json" if not path else "", param=path or None)


def _suggestion(name: str) -> str:
    """Only the `forerun` object refuses names by itself."""
    close = get_close_matches(name, forerun_names(), 1)
    return f"did you mean {close[0]}?" if close else f"it has {', '.join(forerun_names())}"


def _first_mistake(error: RequestValidationError) -> tuple[tuple[Any, ...], list[dict[str, Any]]]:
    """Where the first mistake is, and all errors about that place.

    A value of several allowed types is validated against each: the type that it fits furthest is the intended one.
    """
    found = [(_path(one, error.body), one) for one in error.errors()]
    first = found[0][0]
    within = [place for place, _ in found if place[: len(first)] == first]
    meant = max(within, key=len)  # the first of the longest
    return meant, [one for place, one in found if place == meant]


def _path(one: dict[str, Any], body: Any) -> tuple[Any, ...]:
    """The path to a value in the body, without the type names that pydantic adds for unions."""
    place: list[Any] = []
    for part in one["loc"][1:]:  # after "body"
        inside = range(len(body)) if isinstance(body, list) else body if isinstance(body, dict) else ()
        if part in inside:
            body = body[part]
            place.append(part)
    return (*place, one["loc"][-1]) if one["type"] == "missing" and len(one["loc"]) > 1 else tuple(place)


def _expected(meant: list[dict[str, Any]]) -> str:
    """What a value should have been, in one sentence."""
    ours = [one["msg"].removeprefix("Value error, ") for one in meant]
    close = [text for text in ours if not text.startswith(_SHOULD)]  # of the right type
    if close:
        return close[0]
    wanted = ["an object" if "dictionary" in text else text.removeprefix(_SHOULD) for text in ours]
    return _SHOULD + " or ".join(dict.fromkeys(wanted))


def _encodable(value: str | None) -> str | None:
    """Text that UTF-8 can encode: messages quote values of the request, lone surrogates too."""
    return None if value is None else value.encode("utf-8", "replace").decode()
