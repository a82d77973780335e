"""`realm serve`: answer questions over HTTP, for programs and, on a page, for people.

This file opens the port and handles signals; the application is `realm_jax/serving/app.py`.
"""

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from realm_jax.cli.argument_types import local_path, nonempty, positive
from realm_jax.cli.arguments import (
    add_reader_argument,
    add_rerank_argument,
    add_run_arguments,
    add_search_argument,
    config_changes,
)
from realm_jax.errors import UserError, install_extra
from realm_jax.host import signal_handler

logger = logging.getLogger(__name__)

TOKEN = "REALM_TOKEN"  # environment variable
PORT = 8000
STOPPING = 20  # seconds in which running requests must end after SIGTERM; Kubernetes kills after 30
DAY = 86_400
EXAMPLES = """examples:
  realm serve --workdir=runs/wiki                                    then open http://127.0.0.1:8000
  realm serve --workdir=runs/docs --port=9000 --search=hybrid
  REALM_TOKEN=… realm serve --workdir=runs/wiki --host=0.0.0.0       for other machines
  curl localhost:8000/ask -H 'content-type: application/json' -d '{"question": "Who built the bridge?"}'

  POST /ask, /search    {"question": "…" or ["…", …], "top": N}
  POST /inspect         {"text": "a sentence with a ___ or [blank], or a question", "answer": "…", "pieces": N}
  POST /v1/embeddings   compatible with OpenAI clients; "model" is "query" or "document"
  GET  /model, /v1/models, /openapi.json, /health, /ready, /metrics (Prometheus)

The service loads a newer exported model or an edited corpus in the background, without interrupting requests.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm serve`."""
    parser.epilog = EXAMPLES
    add_run_arguments(parser, in_bucket=False)
    add = parser.add_argument_group("service").add_argument
    add("--host", type=nonempty, default="127.0.0.1", metavar="ADDRESS", help="address to listen at (default: "
        "127.0.0.1, this machine only). Other addresses need a secret in the environment variable "
        f"{TOKEN}, which every request must carry")  # fmt: skip
    add(
        "--port", type=port, default=PORT, metavar="N", help=f"port to listen at; 0 picks a free port (default: {PORT})"
    )
    group = parser.add_argument_group("search and reading")
    how = group.add_mutually_exclusive_group()
    add_search_argument(how)
    how.add_argument("--generation", type=nonempty, metavar="NAME", help="search this index version, or the "
        "'newest'; returns passages only, without answers")  # fmt: skip
    add_rerank_argument(group)
    add_reader_argument(group)
    add("--batch", type=positive, default=8, metavar="N", help="maximum number of texts per batch (default: 8)")
    add("--waiting", type=positive, default=256, metavar="N", help="maximum number of texts in the queue; further "
        "requests get HTTP 429 (default: 256)")  # fmt: skip
    add(
        "--timeout",
        type=positive,
        default=60,
        metavar="SECONDS",
        help="seconds until a request gets HTTP 504 (default: 60)",
    )
    add("--refresh", type=int, default=10, metavar="SECONDS", help="seconds between two checks for a newer model or "
        "corpus; 0 turns them off (default: 10)")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C; running requests are answered first."""
    workdir = local_path(args.workdir, "--workdir=")
    token, host = os.environ.get(TOKEN, "").strip() or None, args.host.strip("[]")
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host.lower() == "localhost"
    if not local and token is None:
        raise UserError(f"--host={host}: other machines could use it; set {TOKEN} to a secret for requests")
    if not 0 <= args.refresh <= DAY:
        raise UserError(f"--refresh={args.refresh}: give seconds up to a day, or 0 for never")
    try:
        import uvicorn

        from realm_jax.serving.app import Limits, make_app
        from realm_jax.serving.service import Service
    except ModuleNotFoundError as error:
        raise UserError(f"`realm serve` needs the Python package {error.name!r}; {install_extra('serve')}") from error

    # With IPPROTO_TCP, because asyncio disables Nagle's algorithm only then; otherwise every reply takes 40 ms more.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, args.port))
            listening.listen(1024)
        except OSError as error:
            raise UserError(
                f"--host={host} --port={args.port}: cannot listen there ({error.strerror}); choose another address or "
                "port"
            ) from None
        options = {name: vars(args)[name] for name in ("search", "rerank", "generation", "reader")}
        options["config"] = config_changes(args)
        service = Service(workdir, options, args.batch)
        limits = Limits(args.batch, args.waiting, args.timeout, args.refresh)
        # A page of another site must not reach a service on this machine by another host name (DNS rebinding).
        hosts = {"localhost", "127.0.0.1", "::1", host} if local else set()
        failed = threading.Event()
        app = make_app(service, limits, token, hosts, failed.set)
        server = uvicorn.Server(
            uvicorn.Config(
                app, log_config=None, access_log=False, lifespan="on", ws="none", server_header=False,
                timeout_graceful_shutdown=STOPPING,
            )
        )  # fmt: skip
        shown = f"[{host}]" if ":" in host else host
        logger.info("http://%s:%d answers with %s", shown, listening.getsockname()[1], service.model)
        _serve(server, listening, failed)
        if failed.is_set():
            raise UserError(f"--workdir={args.workdir}: an example could not be answered; the log above has the reason")


def _serve(server: Any, listening: socket.socket, failed: threading.Event) -> None:
    """Run the server until a signal comes or `failed` is set.

    uvicorn's signal handling is replaced, because it would end the process by the same signal again.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        server.handle_exit(number, frame)

    @contextlib.contextmanager
    def stopped_by_signals() -> Iterator[None]:
        with signal_handler(signal.SIGTERM, stop), signal_handler(signal.SIGINT, stop):
            yield

    async def serve() -> None:
        watching = asyncio.create_task(stop_when_failed())
        await server.serve(sockets=[listening])
        watching.cancel()

    async def stop_when_failed() -> None:
        while not failed.is_set():
            await asyncio.sleep(0.5)
        server.should_exit = True

    server.capture_signals = stopped_by_signals
    for name in ("uvicorn", "uvicorn.error"):  # hides its warnings about requests that are no HTTP
        logging.getLogger(name).setLevel(logging.ERROR)
    asyncio.run(serve())
    logger.info("stopped")


def port(text: str) -> int:
    """Return the port number that a text spells. Raises ValueError if there is no such port."""
    number = int(text)
    if not 0 <= number < 1 << 16:
        raise ValueError(text)
    return number
