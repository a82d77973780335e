"""`realm serve` under load: requests a second and their times, beside the bare model; memory; and what clients see when
the corpus is edited or the service is stopped.

    python benchmarks/serving.py load   --workdir=realm-quickstart --questions=QUESTIONS.jsonl --seconds=60
    python benchmarks/serving.py memory --workdir=realm-quickstart --questions=QUESTIONS.jsonl --requests=10000
    python benchmarks/serving.py edit   --workdir=COPY --questions=QUESTIONS.jsonl --passages=NEW.jsonl
    python benchmarks/serving.py stop   --workdir=realm-quickstart --questions=QUESTIONS.jsonl

Clients are threads with one connection each, which ask again as soon as they have an answer. `edit` changes the corpus
of the run that it is given, with `realm corpus add`. A line of JSON a measurement. Alone on the machine; clients share
its cores with the service.
"""

import argparse
import collections
import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import realm_jax
from realm_jax.launch.local import free_port

BATCH = 8


class Load:
    """Clients that ask until they are told to stop, and what they saw: [(when, seconds, status)]."""

    def __init__(self, port: int, questions: list[str], clients: int) -> None:
        self._port, self._next = port, itertools.cycle(questions)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self.seen: list[tuple[float, float, Any]] = []
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        while not self._stop.is_set():
            with self._lock:
                body = json.dumps({"question": next(self._next), "top": 1})
            began = time.monotonic()
            try:
                connection.request("POST", "/ask", body, {"content-type": "application/json"})
                reply = connection.getresponse()
                reply.read()
                status: Any = reply.status
            except (OSError, http.client.HTTPException) as error:
                status = type(error).__name__
                connection.close()
            now = time.monotonic()
            with self._lock:
                self.seen.append((now, now - began, status))
            if not isinstance(status, int):
                self._stop.wait(0.05)

    def statuses(self) -> dict[str, int]:
        """How often each status, or error of the connection, was seen."""
        return {str(status): times for status, times in collections.Counter(one[2] for one in self.seen).items()}

    def facts(self, seconds: float) -> dict[str, Any]:
        """Requests a second and milliseconds of those that were answered."""
        took = np.array([one[1] for one in self.seen if one[2] == 200]) * 1e3
        ends = {f"p{share}_ms": round(float(np.percentile(took, share)), 1) for share in (50, 99)}
        return {"requests_per_second": round(len(took) / seconds, 1), **ends, "statuses": self.statuses()}


@contextmanager
def service(workdir: str, *flags: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """The command as a process of its own, ready, and its port."""
    port = free_port()
    command = [sys.executable, "-m", "realm_jax", "serve", f"--workdir={workdir}", f"--port={port}"]
    process = subprocess.Popen([*command, f"--batch={BATCH}", *flags], stderr=subprocess.DEVNULL)
    try:
        while get(port, "/ready") != 200:
            if process.poll() is not None:
                sys.exit(f"the service ended with {process.returncode}")
            time.sleep(0.2)
        yield process, port
    finally:
        process.terminate()
        process.wait()


def get(port: int, path: str) -> int | None:
    """The status of a GET; None where nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def passages(port: int) -> int:
    """Passages of the model that answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/model")
    return int(json.load(connection.getresponse())["passages"])


def tell(**facts: Any) -> None:
    """A line of results."""
    print(json.dumps(facts), flush=True)


def bare(workdir: str, questions: list[str], seconds: float) -> None:
    """The model alone, one question at a time and in whole batches."""
    model = realm_jax.Model(workdir)
    for size in (1, BATCH):
        model.ask(questions[:size] if size > 1 else questions[0], batch_size=size)
        asked, began = itertools.cycle(questions), time.monotonic()
        done, took = 0, []
        while time.monotonic() - began < seconds:
            some, before = [next(asked) for _ in range(size)], time.monotonic()
            model.ask(some if size > 1 else some[0], top=1, batch_size=size)
            took.append((time.monotonic() - before) * 1e3)
            done += size
        speed = round(done / (time.monotonic() - began), 1)
        tell(what="bare model", batch=size, questions_per_second=speed, p50_ms=round(float(np.median(took)), 1))


def load(args: argparse.Namespace, questions: list[str]) -> None:
    """Speed with 1, 8 and 64 clients."""
    bare(args.workdir, questions, args.seconds / 4)
    with service(args.workdir) as (_, port):
        for clients in (1, 8, 64):
            with Load(port, questions, clients) as seen:
                time.sleep(args.seconds)
                facts = seen.facts(args.seconds)
            tell(what="load", clients=clients, seconds=args.seconds, **facts)


def memory(args: argparse.Namespace, questions: list[str]) -> None:
    """Memory of the service after each tenth of the requests."""
    with service(args.workdir) as (process, port), Load(port, questions, 2 * BATCH) as seen:
        for part in range(11):
            while len(seen.seen) < args.requests * part / 10:
                time.sleep(0.05)
            resident = psutil.Process(process.pid).memory_info().rss
            tell(what="memory", requests=len(seen.seen), megabytes=round(resident / 1e6, 1), statuses=seen.statuses())


def edit(args: argparse.Namespace, questions: list[str]) -> None:
    """Requests while the corpus is edited and a new generation taken up."""
    with service(args.workdir, "--refresh=1") as (_, port), Load(port, questions, BATCH) as seen:
        before, began = passages(port), time.monotonic()
        time.sleep(5)
        command = [sys.executable, "-m", "realm_jax", "corpus", "add", args.passages]
        subprocess.run([*command, f"--workdir={args.workdir}"], check=True)
        edited = time.monotonic()
        while passages(port) == before:
            time.sleep(0.1)
        took = time.monotonic() - edited
        time.sleep(5)
        facts = seen.facts(time.monotonic() - began)
        tell(what="edit", passages=[before, passages(port)], seconds_to_take_up=round(took, 1), **facts)


def stop(args: argparse.Namespace, questions: list[str]) -> None:
    """What clients see when the service is stopped (SIGTERM), and when it is killed, under load."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with service(args.workdir) as (process, port), Load(port, questions, 2 * BATCH) as seen:
            time.sleep(5)
            at = time.monotonic()
            os.kill(process.pid, number)
            code = process.wait()
            took = time.monotonic() - at
            time.sleep(0.5)
        whole = [one for one in seen.seen if one[0] - one[1] < at]  # asked before the signal
        lost = collections.Counter(str(one[2]) for one in whole if one[2] != 200)
        tell(what=number.name, seconds=round(took, 2), exit_code=code, asked_before=len(whole), lost=dict(lost))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["load", "memory", "edit", "stop"])
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--questions", required=True, help="JSON Lines with questions")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--passages", help="JSON Lines to add to the corpus")
    args = parser.parse_args()
    lines = Path(args.questions).read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    {"load": load, "memory": memory, "edit": edit, "stop": stop}[args.what](args, questions)


if __name__ == "__main__":
    main()
