"""The service over HTTP: paths, limits, errors, metrics, and the page. Made by `make_app`, run by `cli/serve.py`.

What the application refuses has {"error": {"type", "message"}}. What a request holds is checked before it waits; what
waits is bounded; who went away is not answered.
"""

import asyncio
import base64
import contextlib
import hmac
import importlib.resources
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import numpy as np
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from realm_jax.errors import UserError
from realm_jax.inference.answers import NEAREST, Answer, Nearest
from realm_jax.inference.inspection import Inspection
from realm_jax.serving.batching import Batcher, Full
from realm_jax.serving.schemas import (
    Embedding,
    Embeddings,
    EmbeddingsRequest,
    Endpoint,
    InspectRequest,
    ModelFacts,
    QuestionRequest,
    openapi,
)
from realm_jax.serving.service import Service

logger = logging.getLogger(__name__)

BODY, BODY_SECONDS = 1 << 20, 10  # bytes of a request at most, and the time that it may take to come
ANSWERING = (400, 401, 408, 413, 415, 422, 429, 503, 504)  # how a request for the devices can fail
HEADERS = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self' data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
}
GONE = 499  # nobody reads it; metrics do
T = TypeVar("T")


class Limits(NamedTuple):
    """most: texts of a batch; waiting: texts that may wait; seconds: for an answer; every: seconds between two looks
    for a newer checkpoint or corpus, 0 for none."""

    most: int = 8
    waiting: int = 256
    seconds: float = 60.0
    every: float = 10.0


class Fault(Exception):
    """A request that ends with a status and one line."""

    def __init__(self, status: int, kind: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.headers = status, kind, headers


def make_app(
    service: Service,
    limits: Limits,
    token: str | None = None,
    hosts: Collection[str] = (),
    give_up: Callable[[], None] = lambda: None,
) -> Starlette:
    """The application. token: what requests must carry, if any; hosts: names it may be called by (none: by any);
    give_up: called where not even an example can be answered."""
    handlers = _Handlers(service, limits, give_up)
    endpoints = handlers.endpoints()
    description = openapi(endpoints, secured=token is not None)
    routes = [Route(one.path, one.handler, methods=["GET" if one.takes is None else "POST"]) for one in endpoints]
    routes += [
        Route("/health", lambda request: JSONResponse({"alive": True})),
        Route("/ready", handlers.ready),
        Route("/metrics", handlers.metrics),
        Route("/openapi.json", lambda request: JSONResponse(description)),
    ]
    page = _page_routes()
    app = Starlette(
        routes=routes + page,
        lifespan=handlers.lifespan,
        middleware=[
            Middleware(_Observed, handlers=handlers, paths={route.path for route in routes}),
            Middleware(_Guard, token=token, hosts=hosts, free={"/health", "/ready"} | {route.path for route in page}),
        ],
        exception_handlers={Fault: _fault_reply, HTTPException: _http_reply, Exception: _defect_reply},
    )
    app.router.redirect_slashes = False
    return app


def _page_routes() -> list[Route]:
    """A path for each file of the page; `/` is index.html."""
    with importlib.resources.as_file(importlib.resources.files("realm_jax.serving") / "page") as folder:
        files = sorted(path for path in folder.iterdir() if path.is_file())
    return [Route("/" if path.name == "index.html" else f"/{path.name}", _sender(path)) for path in files]


def _sender(path: Path) -> Callable[[Request], Response]:
    return lambda request: FileResponse(path)


class _Handlers:
    """The paths, and what they share."""

    def __init__(self, service: Service, limits: Limits, give_up: Callable[[], None]) -> None:
        self._service, self._limits, self._give_up, self._stop = service, limits, give_up, threading.Event()
        self.registry = CollectorRegistry()
        self.requests = Counter("realm_requests", "Requests", ["path", "status"], registry=self.registry)
        self.seconds = Histogram("realm_request_seconds", "Time of a request", ["path"], registry=self.registry)
        batches = Histogram(
            "realm_batch_size", "Texts of a batch", registry=self.registry, buckets=[1, 2, 4, 8, 16, 32, 64]
        )
        self.batcher = Batcher(service.work, limits.most, limits.waiting, batches.observe)
        gauges = {
            "realm_waiting": ("Texts that wait", lambda: self.batcher.waiting),
            "realm_ready": ("Whether examples of all requests were answered", lambda: service.ready),
            "realm_step": ("Step of the parameters", lambda: service.model.step),
            "realm_passages": ("Passages of the corpus", lambda: service.model.passages),
            "realm_models_taken_up": ("Newer models that were taken up", lambda: service.renewed),
            "realm_models_failed": ("Newer models that could not be opened", lambda: service.failed),
        }
        for name, (meaning, value) in gauges.items():
            Gauge(name, meaning, registry=self.registry).set_function(value)

    def endpoints(self) -> list[Endpoint]:
        """What OpenAPI describes."""
        answers, passages = Answer | list[Answer], Nearest | list[Nearest]
        computed = [
            Endpoint("/ask", self.ask, QuestionRequest, answers, "Answer questions from passages"),
            Endpoint("/search", self.search, QuestionRequest, passages, "Find the nearest passages"),
            Endpoint("/inspect", self.inspect, InspectRequest, Inspection, "How passages affect a prediction"),
            Endpoint("/v1/embeddings", self.embeddings, EmbeddingsRequest, Embeddings, "Embed texts"),
        ]
        return [
            *(endpoint._replace(fails=ANSWERING) for endpoint in computed),
            Endpoint("/v1/models", self.models, None, dict[str, Any], "The towers, as OpenAI's clients list", (401,)),
            Endpoint("/model", self.model, None, ModelFacts, "The model that answers", (401,)),
        ]

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """The batcher, and a thread that compiles, and then takes up newer models."""
        thread = threading.Thread(target=self._keep_up_to_date, name="renewal")
        async with self.batcher:
            thread.start()
            try:
                yield
            finally:
                self._stop.set()
                await asyncio.to_thread(thread.join)

    def _keep_up_to_date(self) -> None:
        try:
            self._service.warm_up(self._stop)
        except Exception:
            logger.exception("an example cannot be answered; the service ends")
            self._give_up()
            return
        while self._limits.every and not self._stop.wait(self._limits.every):
            self._service.renew(self._stop)

    # --- what needs the devices

    async def ask(self, request: Request) -> Response:
        """POST /ask."""
        asked = await _parsed(request, QuestionRequest)
        found: list[Answer] = await self._computed(request, "ask", asked.questions)
        cut = [{**one, "candidates": one["candidates"][: asked.top]} for one in found]
        return JSONResponse(cut[0] if isinstance(asked.question, str) else cut)

    async def search(self, request: Request) -> Response:
        """POST /search."""
        asked = await _parsed(request, QuestionRequest)
        found: list[Nearest] = await self._computed(request, "search", asked.questions)
        cut = [{**one, "candidates": one["candidates"][: asked.top or NEAREST]} for one in found]
        return JSONResponse(cut[0] if isinstance(asked.question, str) else cut)

    async def inspect(self, request: Request) -> Response:
        """POST /inspect."""
        asked = await _parsed(request, InspectRequest)
        (found,) = await self._computed(request, "inspect", [asked.model_dump()])
        return JSONResponse(found)

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        asked = await _parsed(request, EmbeddingsRequest)
        vectors = await self._computed(request, asked.model, asked.texts)
        data = [
            Embedding(object="embedding", index=place, embedding=_encoded(vector, asked.encoding_format))
            for place, vector in enumerate(vectors)
        ]
        tokens = await asyncio.to_thread(self._service.tokens, asked.model, asked.texts)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": asked.model, "usage": usage})

    async def _computed(self, request: Request, kind: str, payloads: list[Any]) -> list[Any]:
        """What the devices give for each payload, unless it takes too long, or nobody waits for it any more."""
        if len(payloads) > self._limits.waiting:
            raise Fault(422, "body", f"{len(payloads)} texts; send at most {self._limits.waiting} at a time")
        try:
            return await _while_connected(request, self.batcher.submit(kind, payloads), self._limits.seconds)
        except Full:
            raise Fault(429, "busy", "too many texts wait already; come again", **{"retry-after": "1"}) from None
        except UserError as fault:
            raise Fault(400, "text", str(fault)) from None

    # --- what does not

    async def ready(self, request: Request) -> Response:
        """GET /ready: 503 until examples of all requests were answered, in all batch sizes."""
        return JSONResponse({"ready": self._service.ready}, 200 if self._service.ready else 503)

    async def model(self, request: Request) -> Response:
        """GET /model."""
        return JSONResponse(self._service.facts())

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        towers = [{"id": name, "object": "model", "created": 0, "owned_by": "realm"} for name in ("query", "document")]
        return JSONResponse({"object": "list", "data": towers})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


async def _parsed(request: Request, schema: type[T]) -> T:
    """The body, checked. Raises Fault."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Fault(415, "body", "send JSON, with the header content-type: application/json")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await _body(request)
    except ClientDisconnect:
        raise Fault(GONE, "gone", "the client went away") from None
    except TimeoutError:
        raise Fault(408, "body", f"the body did not come within {BODY_SECONDS} seconds") from None
    try:
        return schema.model_validate_json(body)  # type: ignore[attr-defined]
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        # Of a text or a list of texts: what is wrong with the one that was given, not that it is not the other.
        first = next((one for one in found if one["type"] not in ("string_type", "list_type")), found[0])
        place = ".".join(str(part) for number, part in enumerate(first["loc"]) if number == 0 or isinstance(part, int))
        raise Fault(422, "body", f"{place}: {first['msg']}" if place else first["msg"]) from None


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY:
            raise Fault(413, "body", f"the body is larger than {BODY:,} bytes")
    return bytes(body)


async def _while_connected(request: Request, work: Coroutine[Any, Any, T], seconds: float) -> T:
    """What the work gives. Raises Fault where it takes too long, or where the client goes away first."""
    job, gone = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({job, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
        if gone.done():
            raise Fault(GONE, "gone", "the client went away")
        raise Fault(504, "slow", f"no answer within {seconds:g} seconds")
    finally:
        for task in (job, gone):
            task.cancel()
        await asyncio.gather(job, gone, return_exceptions=True)


def _encoded(vector: Any, how: str) -> list[float] | str:
    if how == "base64":
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
    return [float(value) for value in vector.tolist()]


# --- replies that are no results --------------------------------------------------------------------------------------


def _reply(status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"type": kind, "message": message}}, status, headers)


async def _fault_reply(_: Request, fault: Exception) -> Response:
    assert isinstance(fault, Fault)
    return _reply(fault.status, fault.kind, str(fault), fault.headers)


async def _http_reply(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _reply(error.status_code, "http", error.detail, dict(error.headers or {}))


async def _defect_reply(_: Request, error: Exception) -> Response:
    return _reply(500, "defect", "an error of the server; its log has the reason")


# --- around every request ---------------------------------------------------------------------------------------------


class _Observed:
    """Counts and times requests, and adds the headers of every reply."""

    def __init__(self, app: ASGIApp, handlers: _Handlers, paths: set[str]) -> None:
        self._app, self._handlers, self._paths = app, handlers, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, began = scope["path"] if scope["path"] in self._paths else "page", time.monotonic()
        status = 500

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = {name for name, _ in message["headers"]}
                message["headers"] += [pair for pair in HEADERS.items() if pair[0] not in named]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            self._handlers.requests.labels(path, status).inc()
            self._handlers.seconds.labels(path).observe(time.monotonic() - began)


class _Guard:
    """Refuses requests to other names than the service's, and those without the token, where there is one. The page
    itself holds nothing of the run, and needs none."""

    def __init__(self, app: ASGIApp, token: str | None, hosts: Collection[str], free: Collection[str]) -> None:
        """free: paths that need no token."""
        self._app, self._token, self._hosts, self._free = app, token, hosts, free

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = dict(scope["headers"])
        if self._hosts and _host_of(headers.get(b"host", b"")) not in self._hosts:
            return _reply(400, "host", "this service is not known by that name; ask localhost")
        if self._token is None or scope["path"] in self._free:
            return None
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(given, self._token.encode()):
            return None
        return _reply(401, "token", "send the token: authorization: Bearer …", {"www-authenticate": "Bearer"})


def _host_of(header: bytes) -> str | None:
    """The name in a host header, in lower case and without its port; None for what is none."""
    try:
        return urlsplit(f"//{header.decode('latin-1')}").hostname
    except ValueError:
        return None
