"""The dashboard's read-only pages. Any client that reaches them may read them; other sites may
not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.dashboard.site import Site
from psrpc.core.errors import PsError
from psrpc.metrics.http_head import known_host

Handler = Callable[[Request], Awaitable[Response]]

WEB = Path(__file__).parent / "web"

HTML = "text/html; charset=utf-8"

PAGES = {
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/lanes.js": ("lanes.js", "text/javascript; charset=utf-8"),
    "/tables.js": ("tables.js", "text/javascript; charset=utf-8"),
    "/study.css": ("study.css", "text/css; charset=utf-8"),
    "/study.js": ("study.js", "text/javascript; charset=utf-8"),
    "/study_charts.js": ("study_charts.js", "text/javascript; charset=utf-8"),
    "/words.js": ("words.js", "text/javascript; charset=utf-8"),
    "/vendor/uPlot.js": ("vendor/uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/vendor/uPlot.css": ("vendor/uPlot.min.css", "text/css; charset=utf-8"),
}
"""All served files by URL path, but for the page at the root."""

HEADERS = {
    # No foreign and no inline scripts: a name that got into a page as HTML could not run scripts.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def make_app(site: Site, names: Iterable[str] = ()) -> ASGIApp:
    """Returns the application that serves the pages.

    Args:
        names: host names that requests may use besides localhost and any IP address.
    """

    pages = {"/": (site.front, HTML), **PAGES}
    contents = {path: (WEB / name).read_bytes() for path, (name, _) in pages.items()}
    edition = hashlib.sha256(b"".join(contents.values())).hexdigest()[:16]

    def answer(source: Callable[[], Any]) -> Handler:
        async def respond(_request: Request) -> Response:
            try:
                text = json.dumps(source(), separators=(",", ":"), allow_nan=False)
            except PsError as error:
                return PlainTextResponse(error.coded, 503)
            # A page of another version reloads itself when the edition differs.
            return Response(text, headers={"x-edition": edition}, media_type="application/json")

        return respond

    def page(path: str, kind: str) -> Handler:
        async def respond(_request: Request) -> Response:
            return Response(contents[path], media_type=kind)

        return respond

    routes = [Route(path, page(path, kind), methods=["GET"]) for path, (_, kind) in pages.items()]
    routes += [Route(path, answer(one), methods=["GET"]) for path, one in site.answers.items()]
    return _Guard(Starlette(routes=routes), names)


class _Guard:
    """Admits only known hosts and reading methods, and adds the headers to every answer."""

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app = app
        self._names = frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # Only HTTP is served; a websocket is refused if it is not accepted.
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        hosts = Headers(scope=scope).getlist("host")
        app = self._app
        if scope["method"] not in ("GET", "HEAD"):
            app = PlainTextResponse(
                "This page only shows; it takes GET and HEAD.\n", 405, {"allow": "GET, HEAD"}
            )
        elif len(hosts) != 1 or not known_host(hosts[0], self._names):
            app = PlainTextResponse(
                "Ask for this page by its IP address, localhost or the name in --dashboard.\n",
                421,
            )
        await app(scope, receive, send_guarded)
