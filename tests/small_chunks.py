"""`realm`, as a program, with chunks of a few passages, so that sixteen passages have several, and with one generation
that stays; nobody waits long between two looks at a folder."""

import sys
from collections.abc import Callable

from realm_jax import storage
from realm_jax.cli import main as cli
from realm_jax.indexing import files as generations


def shrink(patch: Callable[..., None] = setattr) -> None:
    """The same in this process. patch: what sets an attribute of an object."""
    patch(generations, "CHUNK_ROWS", 6)
    patch(generations, "RETAINED_GENERATIONS", 1)
    for kind in (storage.PosixFolder, storage.Bucket):
        patch(kind, "poll_seconds", 0.01)


if __name__ == "__main__":
    shrink()
    sys.exit(cli.main())
