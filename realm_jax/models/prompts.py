"""Templates: the literal text that goes before queries and passages, as an encoder was trained to read it.

    'query: {text}'   'passage: {title} {text}'   'title: {title} | text: {text}'

Slots are `{text}`, which comes last, and for passages `{title}`; a literal brace is written twice. A template becomes
tokens once, so that a step lays it around the stored tokens (`models/inputs.py`). That gives the tokens of the complete
text because words end at white space and at punctuation, in which every literal therefore has to end. `compiled` tries
it, because some tokenizers count the space to the word after it in another way.
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
    """Tokens around a text.

    Attributes:
        before: the title, or the text if there is no title.
        between: title and text.
        titled: titles are read.
    """

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    titled: bool = False

    @property
    def size(self) -> int:
        """Return the number of literal tokens."""
        return len(self.before) + len(self.between)


def parse(template: str, key: str, titles: bool) -> tuple[str, str, bool]:
    """Parse a template.

    Args:
        template: see the docstring of this module.
        key: key of the config, for messages.
        titles: `{title}` may be used.

    Returns:
        Its text before the first slot, its text between the two slots, and True if it has a title.

    Raises:
        UserError: for a template of another form.
    """
    known = (TITLE, TEXT) if titles else (TEXT,)
    slots = " and ".join(f"{{{slot}}}" for slot in known)
    try:
        fields = list(string.Formatter().parse(template))
    except ValueError as error:
        _refuse(key, template, f"cannot be read ({error}); slots are {slots}, and a brace of the text is doubled")
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
    """Return True if BERT's basic tokenizer ends a word at a character: white space or punctuation."""
    ascii_punctuation = character.isascii() and character.isprintable() and not character.isalnum()
    return character.isspace() or ascii_punctuation or unicodedata.category(character).startswith("P")


def compiled(template: str, key: str, titles: bool, encode: Encode) -> Template:
    """Parse a template and tokenize its literals.

    Args:
        template: see the docstring of this module.
        key: key of the config, for messages.
        titles: `{title}` may be used.
        encode: text → ids of its tokens.

    Raises:
        UserError: like `parse`, and if a text has other tokens behind a literal.
    """
    before, between, titled = parse(template, key, titles)

    def behind_space(text: str) -> list[int]:
        """Return the tokens that texts of passages and of prompted queries have (`Tokenizer.placed`)."""
        spaced, plain = encode(f" {text}"), encode(text)
        return spaced if len(spaced) == len(plain) else plain

    literal = behind_space(between.strip()) if between[:1].isspace() else encode(between.strip())
    tokens = Template(tuple(encode(before.rstrip())), tuple(literal), titled)
    text = behind_space(SAMPLE) if titles or before else encode(SAMPLE)
    expected = [*tokens.before, *text, *([*tokens.between, *text] if titled else [])]
    if encode(before + SAMPLE + (between + SAMPLE if titled else "")) != expected:
        advice = "cannot be laid around texts with this tokenizer, which has other tokens behind it"
        has_space = before[-1:].isspace() or encode(SAMPLE) == text
        _refuse(key, template, advice if has_space else f"{advice}; put a space before its first slot")
    return tokens


def query_lengths(lengths: Any, template: Template | None) -> Any:
    """Return the number of tokens of queries that the query encoder reads.

    Args:
        lengths: lengths of `[CLS] text [SEP]`, a number or an array.
        template: around queries; None for none.
    """
    return lengths + (template.size if template else 0)


def passage_lengths(bodies: Any, titles: Any, template: Template | None) -> Any:
    """Return the number of tokens of passages that the passage encoder reads.

    Args:
        bodies: tokens of the bodies, a number or an array.
        titles: tokens of the titles, like `bodies`.
        template: around passages; None for two segments.
    """
    if template is None:
        return bodies + titles + 3
    return bodies + (titles if template.titled else 0) + 2 + template.size


def longest_passage(length: int, template: Template | None) -> int:
    """Return the number of tokens of the longest passage that the passage encoder reads.

    Args:
        length: length of the two segments `[CLS] title [SEP] body [SEP]`; one text has one [SEP] less.
        template: around passages; None for two segments.
    """
    return length if template is None else length - 1 + template.size


def from_prompt(prompt: str, rest: str) -> str:
    """Return the template of a literal prompt.

    Args:
        prompt: may contain braces.
        rest: slots after the prompt.
    """
    return prompt.replace("{", "{{").replace("}", "}}") + rest


def placeholder(text: str) -> list[int]:
    """Return as many token ids as a text has words: for sizes, if there is no vocabulary."""
    return [0] * len(re.findall(r"\w+|[^\w\s]", text))
