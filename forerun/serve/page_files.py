"""The page at `/`: its files as the package has them, served from memory under a strict Content-Security-Policy.

Only files of the package are served, and the page loads nothing from other origins. Knows no
engine: what the page shows comes through the same paths as for every other client, and through `page_api.py`.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import FastAPI, Request
from fastapi.responses import Response

from forerun.serve.errors import ApiError

FOLDER = "/page/"
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # cached, but revalidated: a new version is shown at once
}


def is_page(path: str) -> bool:
    """Whether a path is one of the page's files, which need no API key."""
    return path == "/" or path.startswith(FOLDER)


def add_page_files(app: FastAPI) -> None:
    files = {file.name: _PageFile(file) for file in resources.files("forerun.serve").joinpath("page").iterdir()}

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return files["index.html"].response(request)

    @app.api_route(FOLDER + "{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def part(name: str, request: Request) -> Response:
        if name not in files:
            raise ApiError(404, f"the page has no file {name!r:.80}")
        return files[name].response(request)


class _PageFile:
    """One file of the page."""

    def __init__(self, file: Traversable) -> None:
        self._bytes = file.read_bytes()
        self._type = _TYPES[file.name.rpartition(".")[2]]
        self._tag = f'"{hashlib.sha256(self._bytes).hexdigest()[:16]}"'

    def response(self, request: Request) -> Response:
        headers = _HEADERS | {"etag": self._tag}
        if request.headers.get("if-none-match") == self._tag:
            return Response(status_code=304, headers=headers)
        return Response(self._bytes, media_type=self._type, headers=headers)
