"""Types of command line arguments. Nothing here needs JAX or a config."""

import argparse


def nonempty(text: str) -> str:
    """Argument type: a non-empty string."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; give a value or omit the flag")
    return text


def positive(text: str) -> int:
    """Argument type: a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)
