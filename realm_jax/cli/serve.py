"""`realm serve`: a trained run as a service, for programs and, with a page, for people.

The application is `realm_jax/serving/app.py`.
"""

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from realm_jax.cli.argument_types import nonempty, positive
from realm_jax.cli.arguments import add_run_arguments, add_search_argument, config_changes
from realm_jax.errors import UserError
from realm_jax.host import signal_handler

logger = logging.getLogger(__name__)

TOKEN = "REALM_TOKEN"  # environment variable
PORT = 8000
STOPPING = 30  # seconds that requests under way have after SIGTERM
EXAMPLES = """examples:
  realm serve --workdir=runs/wiki                                    then open http://127.0.0.1:8000
  realm serve --workdir=runs/docs --port=9000 --search=hybrid
  REALM_TOKEN=… realm serve --workdir=runs/wiki --host=0.0.0.0       for other machines
  curl localhost:8000/ask -H 'content-type: application/json' -d '{"question": "Who built the bridge?"}'

  POST /ask, /search    {"question": "…" or ["…", …], "top": N}
  POST /inspect         {"text": "a sentence with a ___ or [blank], or a question", "answer": "…", "pieces": N}
  POST /v1/embeddings   as OpenAI's clients ask; "model" is "query" or "document"
  GET  /model, /v1/models, /openapi.json, /health, /ready, /metrics (Prometheus)

The run is opened again when it has newer checkpoints, or its corpus was edited; requests go on meanwhile.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm serve`."""
    parser.epilog = EXAMPLES
    add_run_arguments(parser)
    add = parser.add_argument
    add("--host", type=nonempty, default="127.0.0.1", metavar="ADDRESS", help="address to listen at (127.0.0.1: this "
        f"machine alone); any other needs a token, which requests carry, in the environment as {TOKEN}")  # fmt: skip
    add("--port", type=_port, default=PORT, metavar="N", help=f"port to listen at; 0: a free one ({PORT})")
    how = parser.add_mutually_exclusive_group()
    add_search_argument(how)
    how.add_argument("--generation", type=nonempty, metavar="NAME", help="search this generation of the index, or the "
        "'newest', and give no answers")  # fmt: skip
    add("--batch", type=positive, default=8, metavar="N", help="texts that are computed together at most (8)")
    add("--waiting", type=positive, default=256, metavar="N", help="texts that may wait; beyond it requests get 429 "
        "(256)")  # fmt: skip
    add("--timeout", type=positive, default=60, metavar="SECONDS", help="for an answer; then 504 (60)")
    add("--refresh", type=int, default=10, metavar="SECONDS", help="between two looks for a newer checkpoint or "
        "corpus; 0: never (10)")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C; requests under way are answered."""
    token = os.environ.get(TOKEN) or None
    local = _is_loopback(args.host)
    if not local and token is None:
        raise UserError(f"--host={args.host}: other machines could ask; set {TOKEN} to a secret that requests carry")
    if args.refresh < 0:
        raise UserError(f"--refresh={args.refresh}: give seconds, or 0 for never")
    try:
        import uvicorn

        from realm_jax.serving.app import Limits, make_app
        from realm_jax.serving.service import Service
    except ModuleNotFoundError as error:
        raise UserError(
            f"`realm serve` needs the Python package {error.name!r}; run `pip install 'realm-jax[serve]'`"
        ) from error
    listening = _listen(args.host, args.port)
    options = {"search": args.search, "generation": args.generation, "config": config_changes(args)}
    with contextlib.closing(listening):
        service = Service(Path(args.workdir), options, args.batch)
        limits = Limits(args.batch, args.waiting, args.timeout, args.refresh)
        # A page elsewhere must not reach a service on this machine by a name of its own (DNS rebinding).
        hosts = {"localhost", "127.0.0.1", "::1", args.host} if local else set()
        app = make_app(service, limits, token, hosts)
        server = uvicorn.Server(
            uvicorn.Config(
                app, log_config=None, access_log=False, lifespan="on", ws="none", server_header=False,
                timeout_graceful_shutdown=STOPPING,
            )
        )  # fmt: skip
        logger.info("http://%s:%d answers with %s", _in_url(args.host), listening.getsockname()[1], service.model)
        _serve(server, listening)


def _serve(server: "uvicorn.Server", listening: socket.socket) -> None:  # type: ignore[name-defined] # noqa: F821
    """Run until a signal; its own way with signals would end the process by the same signal again."""

    def stop(number: int, frame: FrameType | None) -> None:
        server.handle_exit(number, frame)

    @contextlib.contextmanager
    def stopped_by_signals() -> Iterator[None]:
        with signal_handler(signal.SIGTERM, stop), signal_handler(signal.SIGINT, stop):
            yield

    server.capture_signals = stopped_by_signals
    asyncio.run(server.serve(sockets=[listening]))
    logger.info("stopped")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP: of a socket that is not asyncio leaves Nagle's algorithm on, and every reply waits 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(1024)
        return listening
    except OSError as error:
        listening.close()
        raise UserError(
            f"--host={host} --port={port}: cannot listen there ({error.strerror}); choose another"
        ) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number < 1 << 16:
        raise ValueError(text)
    return number
