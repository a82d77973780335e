"""Serve a trained run over HTTP. `make_app` makes the application, and `cli/serve.py` runs it.

A reply with another status than 200 holds {"error": {"type", "message"}}. We check a body before its texts wait for the
devices, bound the queue, and compute nothing for clients that went away.
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
from typing import Annotated, Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException as RoutingError
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import TypedDict

from realm_jax.errors import UserError
from realm_jax.inference.answers import NEAREST, Answer, Nearest
from realm_jax.inference.inspection import Inspection
from realm_jax.serving.batching import Batcher, Full
from realm_jax.serving.service import DEPTH, ModelFacts, Service
from realm_jax.version import __version__

logger = logging.getLogger(__name__)

BODY, BODY_SECONDS = 1 << 20, 10  # limits of a body: bytes, and seconds until it has arrived
MAX_CHARACTERS = 20_000  # of a text; a text that is too long for the run is rejected, or truncated if it is embedded
MAX_TEXTS = 256  # of a request
GONE = 499  # the status of a client that went away: nobody reads it, but metrics do
HEADERS = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self' data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
}
# Status → meaning, for OpenAPI; a request without a body only fails with 401.
ERRORS = {
    400: "the text cannot be answered; the message says why",
    401: "the token is missing or wrong",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is not declared as application/json",
    422: "the body does not match the schema",
    429: "too many texts are waiting; try again later",
    503: "the model is not ready, or is stopping",
    504: "the answer took too long",
}
T = TypeVar("T")
Schema = TypeVar("Schema", bound=BaseModel)

# --- requests and replies; the types of answers, passages and explanations are in `realm_jax/inference` ---------------

Text = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
# JSON has one kind of number, so 2.0 is an integer. Limits come before the validator and apply to the number, because
# pydantic leaves them out of OpenAPI otherwise.
Integer = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Top = Annotated[
    Annotated[int, Field(ge=1, le=DEPTH), Integer] | None, Field(description="number of passages to return")
]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class QuestionRequest(_Request):
    """A question or a list of them; the reply to a list is a list."""

    question: Text | Texts
    top: Top = None


class InspectRequest(_Request):
    """A sentence with one blank, `___` or `[the words]`, or a question.

    Attributes:
        text: the sentence or question.
        answer: to inspect for a question (default: the most probable).
        pieces: tokens of a blank `___`.
    """

    text: Text
    answer: Text | None = None
    pieces: Annotated[int, Field(ge=1, le=16), Integer] = 1


class EmbeddingsRequest(_Request):
    """The request of OpenAI's clients.

    Attributes:
        input: a text or a list of texts.
        model: 'query' for the query encoder, 'document' for the passage encoder.
        encoding_format: encoding format of the vectors.
        user: ignored.
    """

    input: Text | Texts
    model: Literal["query", "document"] = "query"
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None


class Embedding(TypedDict):
    """A vector: numbers, or base64 of float32, little-endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(TypedDict):
    """Number of tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    """The reply that OpenAI's clients read."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class ErrorBody(TypedDict):
    """The kind of an error, and one line that explains it."""

    type: str
    message: str


class ErrorReply(TypedDict):
    """The body of every reply that is not 200."""

    error: ErrorBody


class RequestError(HTTPException):
    """End a request with a status and one line."""

    def __init__(self, status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, message, headers)
        self.kind = kind


class Limits(NamedTuple):
    """Limits of the service.

    Attributes:
        most: texts of a batch.
        waiting: texts that may wait.
        seconds: time for an answer.
        every: seconds between two checks for a newer model or corpus; 0 for no checks.
    """

    most: int = 8
    waiting: int = 256
    seconds: float = 60.0
    every: float = 10.0


# --- the application --------------------------------------------------------------------------------------------------


def make_app(
    service: Service,
    limits: Limits,
    token: str | None = None,
    hosts: Collection[str] = (),
    give_up: Callable[[], None] = lambda: None,
) -> FastAPI:
    """Make the application.

    Args:
        service: the model that answers.
        limits: bounds of batches, of the queue and of times.
        token: secret that requests must carry; None for none.
        hosts: names that clients may call the service by; empty for any.
        give_up: called if not even an example can be answered.
    """
    # --- metrics and the queue
    registry = CollectorRegistry()
    batch_sizes = Histogram("realm_batch_size", "Texts of a batch", registry=registry, buckets=[1, 2, 4, 8, 16, 32, 64])
    batcher = Batcher(service.work, limits.most, limits.waiting, batch_sizes.observe)
    gauges: dict[str, tuple[str, Callable[[], float]]] = {
        "realm_waiting": ("Texts that wait", lambda: batcher.waiting),
        "realm_ready": ("1 if an example of every request was answered, else 0", lambda: service.ready),
        "realm_step": ("Step of the parameters", lambda: service.model.step),
        "realm_passages": ("Passages of the corpus", lambda: service.model.passages),
        "realm_models_taken_up": ("Newer models that were loaded", lambda: service.renewed),
        "realm_models_failed": ("Newer models that could not be opened", lambda: service.failed),
    }
    for name, (meaning, value) in gauges.items():
        Gauge(name, meaning, registry=registry).set_function(value)

    # --- a thread that compiles, and then takes up newer models
    stop = threading.Event()

    def keep_up_to_date() -> None:
        try:
            service.warm_up(stop)
        except Exception:
            logger.exception("an example cannot be answered; the service ends")
            give_up()
            return
        while limits.every and not stop.wait(limits.every):
            service.renew(stop)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        thread = threading.Thread(target=keep_up_to_date, name="renewal")
        async with batcher:
            thread.start()
            try:
                yield
            finally:
                stop.set()
                await asyncio.to_thread(thread.join)

    # --- replies to requests that fail

    async def http_error(_: Request, error: Any) -> Response:
        return _error_reply(error.status_code, getattr(error, "kind", "http"), error.detail, error.headers)

    async def defect(*_: Any) -> Response:
        return _error_reply(500, "defect", "an error of the server; its log has the reason")

    # --- paths outside of OpenAPI: the page, probes and metrics

    def ready(_: Request) -> Response:
        return JSONResponse({"ready": service.ready}, 200 if service.ready else 503)

    with importlib.resources.as_file(importlib.resources.files("realm_jax.serving") / "page") as folder:
        files = {"/" if file.name == "index.html" else f"/{file.name}": file for file in sorted(folder.iterdir())}
    page = [Route(path, lambda _, file=file: FileResponse(file)) for path, file in files.items() if file.is_file()]
    probes = [
        Route("/health", lambda _: JSONResponse({"alive": True})),
        Route("/ready", ready),
        Route("/metrics", lambda _: Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)),
    ]
    open_paths = {"/health", "/ready", *(route.path for route in page)}  # the page itself holds nothing of the run
    app = FastAPI(
        title="REALM",
        version=__version__,
        summary="Answers with their passages",
        docs_url=None,  # they would load scripts from other hosts, which HEADERS forbid
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.path.strip("/"),
        routes=[*page, *probes],
        lifespan=lifespan,
        exception_handlers={RoutingError: http_error, Exception: defect},
    )

    # --- paths that need the devices

    async def computed(request: Request, kind: str, payloads: list[Any]) -> list[Any]:
        """Return the results of payloads. Raises RequestError if that takes too long or the client goes away."""
        if len(payloads) > limits.waiting:
            raise RequestError(422, "body", f"{len(payloads)} texts; send at most {limits.waiting} at a time")
        try:
            return await _while_connected(request, batcher.submit(kind, payloads), limits.seconds)
        except Full:
            raise RequestError(
                429, "busy", "too many texts are waiting; try again later", {"retry-after": "1"}
            ) from None
        except UserError as error:
            raise RequestError(400, "text", str(error)) from None

    async def answered(request: Request, kind: str, default_top: int | None) -> Response:
        """Return the reply to questions, with as many passages as the client requests."""
        body = await _parsed(request, QuestionRequest)
        replies = await computed(request, kind, _as_list(body.question))
        top = body.top or default_top
        replies = [{**reply, "candidates": reply["candidates"][:top]} for reply in replies]
        return JSONResponse(replies[0] if isinstance(body.question, str) else replies)

    @app.post("/ask", summary="Answer questions from passages", **_described(Answer | list[Answer], QuestionRequest))
    async def ask(request: Request) -> Response:
        return await answered(request, "ask", None)

    @app.post("/search", summary="Find the nearest passages", **_described(Nearest | list[Nearest], QuestionRequest))
    async def search(request: Request) -> Response:
        return await answered(request, "search", NEAREST)

    @app.post("/inspect", summary="How passages affect a prediction", **_described(Inspection, InspectRequest))
    async def inspect(request: Request) -> Response:
        body = await _parsed(request, InspectRequest)
        (inspection,) = await computed(request, "inspect", [body.model_dump()])
        return JSONResponse(inspection)

    @app.post("/v1/embeddings", summary="Embed texts", **_described(Embeddings, EmbeddingsRequest))
    async def embeddings(request: Request) -> Response:
        body = await _parsed(request, EmbeddingsRequest)
        texts, data = _as_list(body.input), []
        for index, vector in enumerate(await computed(request, body.model, texts)):
            embedding: list[float] | str = vector.tolist()
            if body.encoding_format == "base64":
                embedding = base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
            data.append(Embedding(object="embedding", index=index, embedding=embedding))
        tokens = await asyncio.to_thread(service.tokens, body.model, texts)
        usage = Usage(prompt_tokens=tokens, total_tokens=tokens)
        return JSONResponse(Embeddings(object="list", data=data, model=body.model, usage=usage))

    # --- paths that do not

    @app.get("/v1/models", summary="List the encoders as OpenAI's models", **_described(dict[str, Any]))
    async def models() -> Response:
        facts = {"object": "model", "created": 0, "owned_by": "realm"}
        return JSONResponse({"object": "list", "data": [{"id": kind} | facts for kind in ("query", "document")]})

    @app.get("/model", summary="The model that answers", **_described(ModelFacts))
    async def model() -> Response:
        return JSONResponse(service.facts())

    description = app.openapi()  # FastAPI keeps the object, and /openapi.json gives it
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods == {"GET"}:
            route.methods = {"GET", "HEAD"}  # HEAD, as Starlette's routes answer it; the description leaves it out
    if token is not None:
        description["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        description["security"] = [{"token": []}]

    # --- around every request: who may ask, metrics, and headers
    requests = Counter("realm_requests", "Requests", ["path", "status"], registry=registry)
    seconds = Histogram("realm_request_seconds", "Time of a request", ["path"], registry=registry)
    paths = {path for route in app.routes if (path := getattr(route, "path", None)) not in files}

    def refusal(scope: Scope) -> Response | None:
        headers = dict(scope["headers"])
        try:
            host = urlsplit(f"//{headers.get(b'host', b'').decode('latin-1')}").hostname  # in lower case, without port
        except ValueError:
            host = None
        if hosts and host not in hosts:
            return _error_reply(400, "host", "unknown host name; use localhost")
        if token is None or scope["path"] in open_paths:
            return None
        scheme, _, sent_token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(sent_token, token.encode()):
            return None
        return _error_reply(401, "token", "send the token: authorization: Bearer …", {"www-authenticate": "Bearer"})

    def around_requests(inner: ASGIApp) -> ASGIApp:
        async def observed(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await inner(scope, receive, send)
                return
            path, began = scope["path"] if scope["path"] in paths else "page", time.monotonic()
            status = 500

            async def send_with_headers(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                    names = {name for name, _ in message["headers"]}
                    message["headers"] += [pair for pair in HEADERS.items() if pair[0] not in names]
                await send(message)

            try:
                await (refusal(scope) or inner)(scope, receive, send_with_headers)
            finally:
                requests.labels(path, status).inc()
                seconds.labels(path).observe(time.monotonic() - began)

        return observed

    app.user_middleware.append(Middleware(around_requests))
    return app


def _described(reply: Any, body: type[BaseModel] | None = None) -> dict[str, Any]:
    """Return OpenAPI's description of a path. We parse bodies ourselves, because FastAPI reads them without limits."""
    responses = {
        status: {"model": ErrorReply, "description": meaning}
        for status, meaning in ERRORS.items()
        if body is not None or status == 401
    }
    described: dict[str, Any] = {"response_model": reply, "responses": responses, "response_description": "done"}
    if body is not None:
        content = {"application/json": {"schema": body.model_json_schema()}}
        described["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return described


async def _parsed(request: Request, schema: type[Schema]) -> Schema:
    """Return the body of a request, validated by its schema. Raises RequestError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(415, "body", "send JSON, with the header content-type: application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY:
                    raise RequestError(413, "body", f"the body is larger than {BODY:,} bytes")
    except ClientDisconnect:
        raise RequestError(GONE, "gone", "the client went away") from None
    except TimeoutError:
        raise RequestError(408, "body", f"the body did not arrive within {BODY_SECONDS} seconds") from None
    try:
        return schema.model_validate_json(bytes(body))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
        # For `str | list[str]` report the error of the matching type, not that it is not the other type.
        first = next((item for item in errors if item["type"] not in ("string_type", "list_type")), errors[0])
        field = ".".join(str(part) for number, part in enumerate(first["loc"]) if number == 0 or isinstance(part, int))
        raise RequestError(422, "body", f"{field}: {first['msg']}" if field else first["msg"]) from None


async def _while_connected(request: Request, work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Await work. Raises RequestError if it takes too long, or if the client goes away first."""
    job, gone = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({job, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
        if gone.done():
            raise RequestError(GONE, "gone", "the client went away")
        raise RequestError(504, "slow", f"no answer within {seconds:g} seconds")
    finally:
        for task in (job, gone):
            task.cancel()
        await asyncio.gather(job, gone, return_exceptions=True)


def _error_reply(status: int, kind: str, message: str, headers: Any = None) -> Response:
    return JSONResponse({"error": {"type": kind, "message": message}}, status, headers)


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
