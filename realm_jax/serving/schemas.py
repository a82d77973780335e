"""What requests hold and what they get back, checked by pydantic; OpenAPI is made from it.

Answers, passages and explanations are the types of `realm_jax/inference`.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

import realm_jax

DEPTH = 100  # passages of a search at most: one compiled program gives that many, and a reply has the first of them
LONGEST = 20_000  # characters of a text; what is longer than a run reads is refused, or cut where it is embedded
MOST = 256  # texts of a request

Text = Annotated[str, Field(min_length=1, max_length=LONGEST)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MOST)]


def _whole(given: Any) -> Any:
    """JSON knows one kind of number: 2.0 is a whole one."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


# Limits stand before the validator and apply to the number alone: elsewhere pydantic leaves them out of OpenAPI.
Amount = Annotated[int, Field(ge=1, le=DEPTH), BeforeValidator(_whole)]
Pieces = Annotated[int, Field(ge=1, le=16), BeforeValidator(_whole)]
Top = Annotated[Amount | None, Field(description="passages to give")]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class QuestionRequest(_Request):
    """A question, or some; the reply to a list is a list."""

    question: Text | Texts
    top: Top = None

    @property
    def questions(self) -> list[str]:
        """The question, or all of them."""
        return [self.question] if isinstance(self.question, str) else self.question


class InspectRequest(_Request):
    """A sentence with one blank, `___` or `[what stands there]`, or a question; answer: of a question, to inspect
    (default: the likeliest); pieces: tokens of a blank that is to be filled."""

    text: Text
    answer: Text | None = None
    pieces: Pieces = 1


class EmbeddingsRequest(_Request):
    """The request of OpenAI's clients. model: 'query' or 'document', the tower that embeds."""

    input: Text | Texts
    model: Literal["query", "document"] = "query"
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None

    @property
    def texts(self) -> list[str]:
        """The text, or all of them."""
        return [self.input] if isinstance(self.input, str) else self.input


class Embedding(TypedDict):
    """A vector: numbers, or base64 of float32, little-endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(TypedDict):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    """The reply that OpenAI's clients read."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class ErrorBody(TypedDict):
    """What is wrong, in one line."""

    type: str
    message: str


class ErrorReply(TypedDict):
    """The body of every reply that is not 200."""

    error: ErrorBody


class ModelFacts(TypedDict):
    """The model that answers: name of its run, task and step of its parameters, and what finds passages.

    answers: whether `/ask` replies, or `/search` alone; reader: what it learnt to point at answers from, None if it did
    not.
    """

    run: str
    task: str
    step: int
    search: str
    passages: int
    vector_size: int
    answers: bool
    reader: Literal["questions", "blanks"] | None
    ready: bool


class Endpoint(NamedTuple):
    """A path with what it takes and gives; takes: None for GET."""

    path: str
    handler: Callable[..., Any]
    takes: type[_Request] | None
    gives: Any
    summary: str
    fails: tuple[int, ...] = ()


FAULTS = {
    400: "the text cannot be answered as it is",
    401: "the token is missing or another one",
    408: "the body did not come in time",
    413: "the body is too large",
    415: "the body is not declared as application/json",
    422: "the body does not have the form that is described",
    429: "too many texts wait already; come again",
    503: "the model is not ready, or stops",
    504: "the answer took too long",
}


def openapi(endpoints: Sequence[Endpoint], secured: bool) -> dict[str, Any]:
    """The description of the endpoints, OpenAPI 3.1."""
    asked = [(one.takes, "validation", TypeAdapter(one.takes)) for one in endpoints if one.takes is not None]
    given = [(one.path, "serialization", TypeAdapter(one.gives)) for one in endpoints]
    known, definitions = TypeAdapter.json_schemas(
        [*asked, *given, ("error", "serialization", TypeAdapter(ErrorReply))],  # type: ignore[list-item]
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for one in endpoints:
        fault = _content(known["error", "serialization"])
        replies = {str(code): {"description": FAULTS[code], **fault} for code in one.fails}
        replies["200"] = {"description": "done", **_content(known[one.path, "serialization"])}
        described: dict[str, Any] = {"summary": one.summary, "operationId": one.path.strip("/"), "responses": replies}
        if one.takes is not None:
            described["requestBody"] = {"required": True, **_content(known[one.takes, "validation"])}
        paths[one.path] = {"get" if one.takes is None else "post": described}
    described = {"title": "REALM", "version": realm_jax.__version__, "summary": "Answers with their passages"}
    components: dict[str, Any] = {"schemas": definitions.get("$defs", {})}
    found: dict[str, Any] = {"openapi": "3.1.0", "info": described, "paths": paths, "components": components}
    if secured:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"token": []}]
    return found


def _content(schema: Any) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}
