"""Types of command line arguments. Nothing here needs JAX or a config."""

import argparse


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
