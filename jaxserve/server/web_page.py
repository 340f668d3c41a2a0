"""The page at `/`: a chat and live charts, in plain HTML, CSS and JavaScript from the package; nothing from elsewhere."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_FILES = {
    "/": "index.html",
    **{f"/web/{name}": name for name in ("page.css", "page.js", "api.js", "chat.js", "live.js")},
}
WEB_PATHS = frozenset(_FILES)  # open to everyone: what they hold is no secret, and the page asks for the key itself

# The page may load nothing from elsewhere, talk to nobody else, and be framed by no other page.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def web_routes() -> list[Route]:
    """One route for each file; they are no part of the API's description."""
    return [_route(path, name) for path, name in _FILES.items()]


def _route(path: str, name: str) -> Route:
    content = resources.files("jaxserve.server").joinpath("web", name).read_bytes()
    headers = {**_HEADERS, "content-type": _TYPES[name.rpartition(".")[2]]}

    async def send(request: Request) -> Response:
        del request
        return Response(content, headers=headers)

    return Route(path, send, methods=["GET"], include_in_schema=False)
