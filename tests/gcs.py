"""A stand-in for Google Cloud Storage, which gcsfs, TensorStore, and processes of tests reach by environment variables.

It is the package gcp-storage-emulator. We add the header with the generation of an object, without which TensorStore
rewrites nothing. It does not check preconditions of writes, so no test depends on two writers of one object.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from types import SimpleNamespace

import fsspec
import gcp_storage_emulator.server as emulator
import pytest
from gcp_storage_emulator.handlers import objects

from realm_jax.launch.local import free_port

BUCKET = "bucket"


def with_generation(download):
    def send(request, response, storage, *rest, **keywords):
        download(request, response, storage, *rest, **keywords)
        if response.status < 300:
            file = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
            response["x-goog-generation"] = file["generation"]

    return send


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, *request):
        """A client that has read enough closes its connection."""


class SerialRouter(emulator.Router):
    """Handles one request after another. The emulator lists and stores objects in dictionaries without a lock: a list
    during a write breaks off the connection, and the client takes that for a failed write."""

    handling = threading.Lock()

    def handle(self, method):
        with self.handling:
            super().handle(method)


@contextmanager
def bucket() -> Iterator[str]:
    """The URL of an empty bucket."""
    port = free_port()
    address = f"http://localhost:{port}"
    variables = {
        "STORAGE_EMULATOR_HOST": address,  # gcsfs and google.cloud.storage
        "TENSORSTORE_GCS_HTTP_URL": address,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",  # TensorStore
        "GOOGLE_CLOUD_PROJECT": "project",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it would ask Google for the kind of the bucket
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(objects, "download", with_generation(objects.download))
        patch.setattr(emulator, "server", SimpleNamespace(HTTPServer=QuietServer))  # not http.server of all modules
        patch.setattr(emulator, "Router", SerialRouter)
        logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
        fsspec.get_filesystem_class("gs").clear_instance_cache()
        with emulator.create_server("localhost", port, in_memory=True, default_bucket=BUCKET):
            yield f"gs://{BUCKET}"
        fsspec.get_filesystem_class("gs").clear_instance_cache()
