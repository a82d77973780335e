"""Templates: the literal text that goes before queries and passages, as an encoder was trained to read it.

    'query: {text}'   'passage: {title} {text}'   'title: {title} | text: {text}'

Slots are `{text}`, which comes last, and for passages `{title}`; a literal brace is written twice. A template becomes
tokens once, so that a step lays it around the stored pieces (`models/inputs.py`). That gives the pieces of the
whole text because words end at white space and at punctuation, which every literal therefore has to end in; it is
tried out, as there are tokenizers that count the space to the word after it in another way.
"""

import re
import string
import unicodedata
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from realm_jax.errors import UserError

TEXT, TITLE = "text", "title"
SAMPLE = "a text"  # to try a template with
Encode = Callable[[str], list[int]]  # text → ids of its tokens, without special tokens


class Template(NamedTuple):
    """Tokens around a text: `before` title (or text, where `titled` is false) and `between` title and text."""

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    titled: bool = False

    @property
    def size(self) -> int:
        """Literal pieces."""
        return len(self.before) + len(self.between)


def parse(template: str, key: str, titles: bool) -> tuple[str, str, bool]:
    """A template's text before its first slot, between its two slots, and whether it has a title.

    key: what the message names. titles: whether `{title}` may be used. Raises UserError for a template that is not as
    the module's docstring says.
    """
    known = (TITLE, TEXT) if titles else (TEXT,)
    slots = " and ".join(f"{{{slot}}}" for slot in known)
    try:
        fields = list(string.Formatter().parse(template))
    except ValueError as fault:
        _refuse(key, template, f"cannot be read ({fault}); slots are {slots}, and a brace of the text is doubled")
    literals, named = [""], []  # the text before each slot; a literal brace makes a field of its own
    for literal, slot, form, change in fields:
        if form or change:
            _refuse(key, template, f"has a slot with a format; use {slots}")
        literals[-1] += literal
        if slot is not None:
            named.append(slot)
            literals.append("")
    unknown = next((slot for slot in named if slot not in known), None)
    if unknown is not None:
        _refuse(key, template, f"has no slot {{{unknown}}}; its slots are {slots}")
    if TEXT not in named:
        _refuse(key, template, f"leaves out {{{TEXT}}}; end it in that slot")
    if literals[-1] or named not in ([TEXT], [TITLE, TEXT]):
        _refuse(key, template, f"must end in {{{TEXT}}}, with each slot once")
    before, between = literals[0], literals[1]
    if before and not _separates(before[-1]):
        _refuse(key, template, "must have a space or punctuation before its first slot, or words grow together")
    if len(named) == 2 and not (between and _separates(between[0]) and _separates(between[-1])):
        _refuse(
            key, template, "must have a space or punctuation on both sides between its slots, or words grow together"
        )
    return before, between, len(named) == 2


def _refuse(key: str, template: str, advice: str) -> NoReturn:
    raise UserError(f"{key}: {template!r} {advice}")


def _separates(character: str) -> bool:
    """Whether BERT's basic tokenizer ends a word at a character: white space, or what it takes for punctuation."""
    ascii_punctuation = character.isascii() and character.isprintable() and not character.isalnum()
    return character.isspace() or ascii_punctuation or unicodedata.category(character).startswith("P")


def compiled(template: str, key: str, titles: bool, encode: Encode) -> Template:
    """A template as tokens. Raises UserError as `parse` does, and where a text has others behind a literal."""
    before, between, titled = parse(template, key, titles)
    pieces = Template(tuple(encode(before.rstrip())), tuple(encode(between.strip())), titled)
    text = encode(SAMPLE)
    laid = [*pieces.before, *text, *([*pieces.between, *text] if titled else [])]
    if encode(before + SAMPLE + (between + SAMPLE if titled else "")) != laid:
        _refuse(key, template, "cannot be laid around texts with this tokenizer, which has other tokens behind it")
    return pieces


def query_lengths(lengths: Any, template: Template | None) -> Any:
    """Tokens of queries as a tower reads them. lengths: of `[CLS] text [SEP]`, a number or an array."""
    return lengths + (template.size if template else 0)


def passage_lengths(bodies: Any, titles: Any, template: Template | None) -> Any:
    """Tokens of passages as a tower reads them, of the pieces of their bodies and titles: numbers or arrays."""
    if template is None:
        return bodies + titles + 3
    return bodies + (titles if template.titled else 0) + 2 + template.size


def longest_passage(length: int, template: Template | None) -> int:
    """Tokens of the longest passage as a tower reads it; length: that of two segments, `[CLS] title [SEP] body [SEP]`.
    One text has one [SEP] less."""
    return length if template is None else length - 1 + template.size


def from_prompt(prompt: str, rest: str) -> str:
    """The template of a literal prompt with the slots `rest` after it."""
    return prompt.replace("{", "{{").replace("}", "}}") + rest


def placeholder(text: str) -> list[int]:
    """As many pieces as a text has words: for sizes, where there is no vocabulary."""
    return [0] * len(re.findall(r"\w+|[^\w\s]", text))
