"""Types of command line arguments. Nothing here needs JAX or a config."""

import argparse
from pathlib import Path

from realm_jax.errors import UserError
from realm_jax.mirror import is_url


def nonempty(text: str) -> str:
    """Return the text. Raises ArgumentTypeError if it is blank."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; give a value or omit the flag")
    return text


def positive(text: str) -> int:
    """Return the integer that a text spells. Raises ArgumentTypeError unless it is 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)


def local_path(text: str, flag: str) -> Path:
    """Return the path of a run directory for a command that cannot work in a bucket.

    Args:
        text: the argument.
        flag: precedes it in the message, such as `--workdir=`.

    Raises:
        UserError: it is the URL of a bucket.
    """
    if is_url(text):
        raise UserError(
            f"{flag}{text}: the command needs a run directory on a disk; name one there "
            "(`gcloud storage cp --recursive` copies a run from a bucket, or to it)"
        )
    return Path(text)
