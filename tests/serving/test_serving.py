"""`realm serve`: what a client gets, how requests share batches, and what happens when the run changes."""

import asyncio
import base64
import contextlib
import json
import logging
import shutil
import socket
import threading
import time

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tiny_run import PEOPLE, question, write_lines

import realm_jax
from realm_jax.cli import main as cli
from realm_jax.serving import app as service_app
from realm_jax.serving.app import BODY, HEADERS, Limits, make_app
from realm_jax.serving.batching import Batcher, Full
from realm_jax.serving.service import Service

QUESTION = question(3)["question"]
STAY = threading.Event()


@pytest.fixture(scope="module")
def service(trained_run):
    made = Service(trained_run.workdir, {}, most=2)
    made.warm_up(STAY)
    return made


@pytest.fixture(scope="module")
def client(service):
    with TestClient(make_app(service, Limits(most=2, every=0)), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def model(trained_run):
    return realm_jax.Model(trained_run.workdir)


# ---- what a client gets


def test_questions_are_answered_as_in_python(client, model):
    assert client.post("/ask", json={"question": QUESTION}).json() == model.ask(QUESTION)
    asked = [question(n)["question"] for n in range(5)]
    found = client.post("/ask", json={"question": asked, "top": 1}).json()
    assert [one["question"] for one in found] == asked and all(len(one["candidates"]) == 1 for one in found)
    found = client.post("/search", json={"question": QUESTION, "top": 3.0}).json()
    alone = model.search(QUESTION, top=3)
    for one, other in zip(found["candidates"], alone["candidates"], strict=True):
        assert one == other | {"score": pytest.approx(other["score"], rel=1e-5)}
    blank = "Ada Almgren was born in ___."
    assert client.post("/inspect", json={"text": blank}).json() == model.inspect(blank)


@pytest.mark.parametrize("tower", ["query", "document"])
def test_vectors_are_those_of_the_towers_in_both_encodings(client, model, tower):
    texts = ["Ada Almgren was born", "who?", "in 1803"]
    reply = client.post("/v1/embeddings", json={"input": texts, "model": tower, "encoding_format": "base64"}).json()
    packed = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in reply["data"]]
    np.testing.assert_array_equal(packed, model.encode(texts, tower, batch_size=2))
    numbers = client.post("/v1/embeddings", json={"input": texts[0], "model": tower}).json()
    np.testing.assert_allclose(numbers["data"][0]["embedding"], packed[0], rtol=1e-6)
    pieces = model.run.sources.tokenizer.encode_batch(texts)
    special = 2 if tower == "query" else 3
    assert reply["usage"]["total_tokens"] == sum(len(one.ids) + special for one in pieces)


def test_replies_are_of_the_form_that_openapi_describes(client):
    described = client.get("/openapi.json").json()
    bodies = {
        "/ask": {"question": [QUESTION]}, "/search": {"question": QUESTION}, "/inspect": {"text": QUESTION},
        "/v1/embeddings": {"input": "a"}, "/model": None, "/v1/models": None,
    }  # fmt: skip
    assert {*described["paths"]} == {*bodies}
    for path, body in bodies.items():
        reply = client.get(path) if body is None else client.post(path, json=body)
        (operation,) = described["paths"][path].values()
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(reply.json(), schema | {"components": described["components"]})
    wrong = client.post("/ask", json={})
    schema = described["paths"]["/ask"]["post"]["responses"]["422"]["content"]["application/json"]["schema"]
    jsonschema.validate(wrong.json(), schema | {"components": described["components"]})


@pytest.mark.parametrize(
    ("path", "field", "most"), [("/ask", "top", 100), ("/search", "top", 100), ("/inspect", "pieces", 16)]
)
def test_openapi_names_the_limits_of_numbers(client, path, field, most):
    described = client.get("/openapi.json").json()
    schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema |= {"components": described["components"]}
    text = {"text": "a"} if path == "/inspect" else {"question": "a"}
    for fits in (1, 1.0, most):
        jsonschema.validate(text | {field: fits}, schema)
    for wrong in (0, most + 1, 1.5, "1"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(text | {field: wrong}, schema)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/ask", {}, 422, "question: Field required"),
        ("/ask", {"question": ""}, 422, "question: "),
        ("/ask", {"question": []}, 422, "question: "),
        ("/ask", {"question": 7}, 422, "question: "),
        ("/ask", {"question": "a", "top": 0}, 422, "top: "),
        ("/ask", {"question": "a", "top": 1.5}, 422, "top: "),
        ("/ask", {"question": "a", "top": "1"}, 422, "top: "),
        ("/ask", {"question": "a", "tops": 1}, 422, "tops: Extra inputs"),
        ("/ask", {"question": "   "}, 400, "the question is empty"),
        ("/ask", {"question": "who " * 40}, 400, "this run reads at most 14"),
        ("/ask", {"question": "w" * 20_001}, 422, "20000 characters"),
        ("/ask", {"question": ["a"] * 257}, 422, "256 items"),
        ("/ask/", {"question": "a"}, 404, "Not Found"),
        ("/search", {"question": "a", "top": 101}, 422, "top: "),
        ("/inspect", {"text": "___ ___"}, 400, "2 blanks"),
        ("/inspect", {"text": "a [b]", "answer": "c"}, 400, "applies to questions only"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, 422, "model: "),
    ],
)
def test_what_is_wrong_is_said_in_one_line(client, path, body, status, said):
    reply = client.post(path, json=body)
    assert reply.status_code == status
    message = reply.json()["error"]["message"]
    assert said in message and "\n" not in message


def test_one_bad_question_of_two_ends_its_own_request_alone(client):
    replies: dict[str, int] = {}

    def ask(text: str) -> None:
        replies[text] = client.post("/ask", json={"question": text}).status_code

    threads = [threading.Thread(target=ask, args=[text]) for text in (QUESTION, "who " * 40) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == {QUESTION: 200, "who " * 40: 400}


def test_bodies_are_json_of_a_bounded_size(client):
    plain = {"content-type": "text/plain"}
    assert client.post("/ask", content=b'{"question": "a"}', headers=plain).status_code == 415
    as_json = {"content-type": "application/json; charset=utf-8"}
    assert client.post("/ask", content=b'{"question": "a" "b"}', headers=as_json).status_code == 422
    assert client.post("/ask", content=b'{"question": "\\ud800"}', headers=as_json).status_code == 422
    assert client.post("/ask", content=b"\xff", headers=as_json).status_code == 422
    assert client.post("/ask", content=b"[" * 100_000, headers=as_json).status_code == 422
    assert client.post("/ask", content=b" " * (BODY + 1), headers=as_json).status_code == 413
    assert client.get("/ask").status_code == 405
    assert client.get("/../../etc/passwd").status_code == client.get("/page/%2e%2e/app.py").status_code == 404


def test_head_is_answered_as_get_and_fastapi_serves_no_pages_of_its_own(client):
    described = client.get("/openapi.json").json()
    for path in ("/model", "/v1/models", "/ready", "/metrics", "/"):
        assert client.head(path).status_code == 200
        assert {*client.delete(path).headers["allow"].split(", ")} == {"GET", "HEAD"}
        assert "head" not in described["paths"].get(path, {})
    assert [client.get(path).status_code for path in ("/docs", "/redoc", "/model/")] == [404] * 3


def test_every_reply_has_the_headers_that_protect_a_page(client):
    for path in ("/", "/model", "/nothing", "/openapi.json"):
        headers = client.get(path).headers
        assert {name: headers[name.decode()].encode() for name in HEADERS} == HEADERS


def test_metrics_count_requests_by_path_and_status(client):
    client.get("/model")
    client.get("/some/other/path")
    text = client.get("/metrics").text
    assert 'realm_requests_total{path="/model",status="200"}' in text and "/some" not in text
    assert "realm_ready 1.0" in text and f"realm_passages {len(PEOPLE)}.0" in text


def test_a_token_is_asked_for_but_by_the_page_and_by_probes(service):
    with TestClient(make_app(service, Limits(most=2, every=0), token="sécret")) as client:
        assert [client.get(path).status_code for path in ("/", "/health", "/ready")] == [200] * 3
        for path in ("/model", "/metrics", "/openapi.json", "/v1/models"):
            assert client.get(path).status_code == 401
        assert client.get("/model", headers={"authorization": "Bearer other"}).status_code == 401
        right = {"authorization": "Bearer sécret".encode()}
        assert client.get("/model", headers=right).status_code == 200
        assert client.get("/openapi.json", headers=right).json()["security"] == [{"token": []}]


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:80", 200), ("LOCALHOST", 200), ("[::1]:9", 200), ("a.example", 400), ("[", 400)]
)
def test_a_name_of_somebody_elses_is_refused(service, host, status):
    app = make_app(service, Limits(most=2, every=0), hosts={"localhost", "::1"})
    with TestClient(app, base_url="http://localhost") as client:
        assert client.get("/model", headers={"host": host}).status_code == status


# ---- batches


def run_with_batcher(work, most, room, scenario):
    sizes = []

    async def main():
        async with Batcher(work, most, room, sizes.append) as batcher:
            return await scenario(batcher)

    return asyncio.run(main()), sizes


def test_what_waits_is_computed_together_kind_by_kind():
    begun, go = threading.Event(), threading.Event()

    def work(kind, payloads):
        begun.set()
        go.wait(10)
        return [f"{kind} {payload}" for payload in payloads]

    async def scenario(batcher):
        first = asyncio.create_task(batcher.submit("a", [0]))
        await asyncio.to_thread(begun.wait)
        others = [asyncio.create_task(batcher.submit(kind, [n, n])) for n, kind in enumerate("abab", 1)]
        await asyncio.sleep(0)
        assert batcher.waiting == 8
        go.set()
        return await asyncio.gather(first, *others)

    found, sizes = run_with_batcher(work, 3, 100, scenario)
    assert found == [["a 0"], ["a 1"] * 2, ["b 2"] * 2, ["a 3"] * 2, ["b 4"] * 2]
    assert sizes == [1, 3, 3, 1, 1]


def test_more_texts_than_may_wait_are_refused_for_good():
    with TestClient(make_app(Slow(), Limits(most=1, waiting=2, every=0))) as client:
        reply = client.post("/ask", json={"question": ["a"] * 3})
    assert reply.status_code == 422 and "send at most 2 at a time" in reply.text


def test_a_full_queue_refuses_and_what_was_given_up_makes_room_and_is_not_computed():
    begun, go, computed = threading.Event(), threading.Event(), []

    def work(kind, payloads):
        begun.set()
        go.wait(10)
        computed.extend(payloads)
        return payloads

    async def scenario(batcher):
        first = asyncio.create_task(batcher.submit("a", [0]))
        await asyncio.to_thread(begun.wait)
        given_up = asyncio.create_task(batcher.submit("a", [1, 2]))
        await asyncio.sleep(0)
        with pytest.raises(Full):
            await batcher.submit("a", [3])
        given_up.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await given_up
        last = asyncio.create_task(batcher.submit("a", [4]))
        await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(first, last)

    assert run_with_batcher(work, 4, 2, scenario)[0] == [[0], [4]]
    assert computed == [0, 4]


def test_a_defect_ends_the_requests_of_its_batch_and_no_others(caplog):
    def work(kind, payloads):
        if kind == "bad":
            raise RuntimeError("defect")
        return payloads

    async def scenario(batcher):
        bad = await asyncio.gather(batcher.submit("bad", [1]), return_exceptions=True)
        return bad, await batcher.submit("good", [2])

    (bad, good), _ = run_with_batcher(work, 2, 9, scenario)
    assert isinstance(bad[0], RuntimeError) and good == [2]
    assert "1 requests (bad) failed" in caplog.text


# ---- requests that take too long, or that nobody waits for


SCOPE = {  # of a POST to /ask, as a server gives it to the application
    "type": "http", "method": "POST", "path": "/ask", "raw_path": b"/ask", "query_string": b"", "root_path": "",
    "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
    "server": ("localhost", 80), "client": ("localhost", 9), "asgi": {"version": "3.0"},
}  # fmt: skip


class Slow:
    """A service that answers when it is told to."""

    def __init__(self):
        self.go, self.begun, self.ready = threading.Event(), threading.Event(), True

    def warm_up(self, stop):
        pass

    def work(self, kind, payloads):
        self.begun.set()
        assert self.go.wait(10)
        return [{"question": payload, "candidates": []} for payload in payloads]


def test_a_late_answer_is_a_504_and_a_full_queue_a_429():
    slow = Slow()
    with TestClient(make_app(slow, Limits(most=1, waiting=1, seconds=0.2, every=0))) as client:
        assert client.post("/ask", json={"question": "a"}).status_code == 504
        replies = []
        threads = [
            threading.Thread(target=lambda: replies.append(client.post("/ask", json={"question": "a"})))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        slow.go.set()
        assert sorted(reply.status_code for reply in replies) == [429, 429, 429, 504]
        busy = next(reply for reply in replies if reply.status_code == 429)
        assert busy.headers["retry-after"] == "1"
        assert client.post("/ask", json={"question": "b"}).json() == {"question": "b", "candidates": []}


def test_a_client_that_went_away_is_not_computed_for():
    slow = Slow()
    app = make_app(slow, Limits(most=1, waiting=9, every=0))
    body = {"type": "http.request", "body": b'{"question": "a"}', "more_body": False}

    async def main():
        sent, messages = [], [{"type": "http.disconnect"}, body]

        async def receive():
            return messages.pop()

        async def send(message):
            sent.append(message)

        async with app.router.lifespan_context(app):
            await app(dict(SCOPE), receive, send)
            slow.go.set()
        return sent[0]["status"]

    assert asyncio.run(main()) == 499


def test_a_body_that_does_not_come_is_a_408_and_one_that_breaks_off_no_defect(monkeypatch, caplog):
    monkeypatch.setattr(service_app, "BODY_SECONDS", 0.1)
    app = make_app(Slow(), Limits(most=1, every=0))

    async def status_of(*messages):
        sent, left = [], list(messages)

        async def receive():
            return left.pop(0) if left else await asyncio.sleep(60)

        async def send(message):
            sent.append(message)

        await app(dict(SCOPE), receive, send)
        return sent[0]["status"]

    async def main():
        part = {"type": "http.request", "body": b'{"quest', "more_body": True}
        async with app.router.lifespan_context(app):
            return await status_of(part), await status_of(part, {"type": "http.disconnect"})

    assert asyncio.run(main()) == (408, 499)
    assert "Traceback" not in caplog.text


def test_a_service_that_cannot_answer_an_example_gives_up(caplog):
    class Broken(Slow):
        def warm_up(self, stop):
            raise RuntimeError("no memory")

    given_up = threading.Event()
    with TestClient(make_app(Broken(), Limits(most=1, every=0), give_up=given_up.set)):
        assert given_up.wait(10)
    assert "an example cannot be answered" in caplog.text


# ---- a run that changes


def test_an_edited_corpus_is_taken_up_between_two_requests(copied_run, tmp_path):
    service = Service(copied_run, {}, most=1)
    assert not service.renew(STAY)
    new = {"id": "new", "title": "Eva Ekman", "text": "Eva Ekman was born in 1899."}
    file = write_lines(tmp_path / "new.jsonl", [new])
    assert cli.main(["corpus", "add", str(file), f"--workdir={copied_run}"]) == 0
    with TestClient(make_app(service, Limits(most=1, every=0.05))) as client:
        deadline = time.monotonic() + 60
        while client.get("/model").json()["passages"] == len(PEOPLE):
            assert client.post("/ask", json={"question": QUESTION}).status_code == 200
            assert time.monotonic() < deadline
            time.sleep(0.05)
        found = client.post("/search", json={"question": QUESTION, "top": 100}).json()["candidates"]
        assert "new" in {one["id"] for one in found}
    assert (service.renewed, service.failed) == (1, 0)
    assert not service.renew(STAY)


def test_what_cannot_be_opened_is_said_once_and_the_model_stays(copied_run, tmp_path, caplog):
    service = Service(copied_run, {}, most=1)
    before = service.model
    (tmp_path / "data/PREPARED.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert not service.renew(STAY) and not service.renew(STAY)
    assert service.model is before and service.failed == 1
    assert caplog.text.count("the current model stays in use") == 1
    shutil.rmtree(copied_run)
    assert not service.renew(STAY) and not service.renew(STAY) and service.failed == 2
    assert service.work("ask", [QUESTION])[0]["answer"]


# ---- the command


def refused(capsys, *arguments: str) -> str:
    assert cli.main(["serve", *arguments]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("realm: error: ")
    return line


def test_other_machines_need_a_token_and_a_port_is_free(trained_run, capsys, monkeypatch):
    monkeypatch.delenv("REALM_TOKEN", raising=False)
    where = f"--workdir={trained_run.workdir}"
    assert "set REALM_TOKEN" in refused(capsys, where, "--host=0.0.0.0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen there" in refused(capsys, where, f"--port={taken.getsockname()[1]}")
    assert "no run there" in refused(capsys, "--workdir=nothing", "--port=0")
    assert "give seconds" in refused(capsys, where, "--refresh=-1", "--port=0")


def test_the_command_serves_what_its_flags_say(copied_run, monkeypatch):
    started = []
    monkeypatch.setattr("realm_jax.cli.serve._serve", lambda server, *_: started.append(server.config.app))
    assert cli.main(["serve", f"--workdir={copied_run}", "--port=0", "--search=bm25"]) == 0
    with TestClient(started[0], base_url="http://127.0.0.1") as client:
        found = client.post("/search", json={"question": QUESTION}).json()["candidates"]
    assert found and all([*one["ranks"]] == ["bm25"] for one in found)


@pytest.mark.slow
def test_questions_are_reranked_in_batches_as_in_python(trained_run):
    service = Service(trained_run.workdir, {"rerank": "tokens"}, most=2)
    service.warm_up(STAY)
    python = realm_jax.Model(trained_run.workdir, rerank="tokens")
    with TestClient(make_app(service, Limits(most=2, every=0))) as client:
        assert client.get("/model").json()["rerank"] == "tokens"
        asked = [question(n)["question"] for n in range(3)]
        replies = client.post("/search", json={"question": asked, "top": 16}).json()
    for reply, wanted in zip(replies, python.search(asked, top=16), strict=True):
        ranks = [one["ranks"] for one in reply["candidates"]]
        assert ranks == [one["ranks"] for one in wanted["candidates"]]
        assert [one.get("tokens") for one in ranks] == [*range(1, 11), *[None] * 6]


# ---- anything at all


def any_json() -> st.SearchStrategy:
    """Values of JSON, with the fields of requests among their keys."""
    keys = st.sampled_from(["question", "top", "text", "answer", "pieces", "input", "model", "encoding_format"])
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["query", "a ___ b"])
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner), max_leaves=12)


def nearly_right() -> st.SearchStrategy:
    """Bodies with the right fields, and any text in them."""
    texts = st.text(min_size=1, max_size=80) | st.sampled_from(
        ["___", "[x]", "[ ]", "[" * 40, "\x00", "\u202e", "a" * 300]
    )
    some = texts | st.lists(texts, min_size=1, max_size=5)
    return (
        st.fixed_dictionaries({"question": some}, optional={"top": st.integers(1, 100)})
        | st.fixed_dictionaries({"text": texts}, optional={"answer": texts, "pieces": st.integers(1, 16)})
        | st.fixed_dictionaries({"input": some}, optional={"model": st.sampled_from(["query", "document"])})
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    path=st.sampled_from(["/ask", "/search", "/inspect", "/v1/embeddings"]),
    body=st.binary(max_size=60) | (any_json() | nearly_right()).map(lambda value: json.dumps(value).encode()),
)
def test_no_body_is_a_fault_of_the_server(client, path, body):
    reply = client.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code in (200, 400, 422), reply.text
    if reply.status_code != 200:
        message = reply.json()["error"]["message"]
        assert message and "\n" not in message
