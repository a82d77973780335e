"""Types of command line arguments. Nothing here needs JAX or a config."""

import argparse


def filled(text: str) -> str:
    """The type of an argument that says something."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; give a value or leave the flag out")
    return text


def positive(text: str) -> int:
    """The type of an argument that is a whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)
