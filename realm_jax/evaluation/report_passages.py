"""The parts of the report that show text: questions with their passages, and one masked sentence read three ways.

The second is Table 3 of the paper: p(y|x) without retrieval, p(y|z,x) with the right passage z, and the marginal over
the retrieved passages. Used by `report.py` alone.
"""

from collections.abc import Mapping
from typing import Any

from realm_jax.evaluation.page import Bar, bars, card, grid, probability, text

Data = Mapping[str, Any]

_PASSAGES_SHOWN = 4
_SNIPPET_CHARACTERS = 260


def examples(data: Data) -> str:
    cards = [_example(example) for example in data.get("examples", ())]
    note = (
        "Marked is where a passage first has the model's answer, right or wrong. The bar is p(z|x): how much of its "
        "trust the retriever gives to a passage, among those it found for the question. A name in a question may have "
        "its words replaced by synonyms. The model never saw these questions in training."
    )
    return (
        f'<section><h2>Questions, answers, passages</h2><p class="note">{note}</p>{grid("pair", cards)}</section>'
        if cards
        else ""
    )


def _example(example: Data) -> str:
    verdict = _verdict(example)
    candidates = sorted(example.get("candidates", ()), key=lambda candidate: -candidate["probability"])
    shown, rest = candidates[:_PASSAGES_SHOWN], candidates[_PASSAGES_SHOWN:]
    more = ""
    if rest:
        together = probability(sum(candidate["probability"] for candidate in rest))
        more = f'<p class="note">{len(rest)} more, together {text(together)}</p>'
    return (
        f'<article class="card"><p class="question">{text(example["question"])}</p><p class="verdict">{verdict}</p>'
        f"{''.join(map(_candidate, shown))}{more}</article>"
    )


def _verdict(example: Data) -> str:
    """The prediction, right, wrong or without a judgement, and what is right where that is known."""
    answers = " or ".join(example.get("answers", ()))
    right = f' <span class="note">right: {text(answers)}</span>' if answers else ""
    if "prediction" not in example:
        return right
    prediction = text(example["prediction"] or "no answer")
    if "correct" not in example:
        return f"<span>{prediction}</span>{right}"
    if example["correct"]:
        return f'<span class="right">✓ {prediction}</span>'
    return f'<span class="wrong">✗ {prediction}</span>{right}'


def _candidate(candidate: Data) -> str:
    weight = candidate["probability"]
    gold = ' <span class="gold">right passage</span>' if candidate.get("is_gold") else ""
    body = f"<b>{text(candidate.get('title', ''))}</b>{gold} {_snippet(candidate)}"
    if not candidate.get("title") and not candidate.get("text"):
        body = '<span class="note">the empty passage: answer without reading</span>'
    return f'<div class="passage">{bars([Bar("p(z|x)", weight, "realm", probability(weight))])}<p>{body}</p></div>'


def _snippet(candidate: Data) -> str:
    """The part of a passage around the answer, with the answer marked; the start where there is none."""
    passage, span = candidate.get("text", ""), candidate.get("answer_span")
    if not span or not 0 <= span[0] < span[1] <= len(passage):
        cut = _word_end(passage, _SNIPPET_CHARACTERS)
        return text(passage[:cut]) + ("…" if cut < len(passage) else "")
    start, end = span
    # A start that is nearly the passage's start is moved there: the first words say what the passage is about.
    first = _word_start(passage, start - _SNIPPET_CHARACTERS // 2) if start > _SNIPPET_CHARACTERS * 0.7 else 0
    last = max(_word_end(passage, first + _SNIPPET_CHARACTERS), end)
    before, after = ("…" if first > 0 else ""), ("…" if last < len(passage) else "")
    return (
        f"{before}{text(passage[first:start])}<mark>{text(passage[start:end])}</mark>{text(passage[end:last])}{after}"
    )


def _word_start(passage: str, place: int) -> int:
    return 0 if place <= 0 else passage.rfind(" ", 0, place) + 1


def _word_end(passage: str, place: int) -> int:
    space = passage.find(" ", place)
    return len(passage) if place >= len(passage) or space < 0 else space


def masked_sentence(data: Data) -> str:
    masked = data.get("masked_sentence")
    if not masked:
        return ""
    rows = []
    for row in masked["rows"]:
        value = row["probability"]
        passage = f'<p class="note">{text(row["passage"])}</p>' if row.get("passage") else ""
        rows.append(
            f'<div class="reading"><div><b>{text(row["model"])}</b></div><div>'
            f'<span class="expression">{text(row["expression"])}</span>'
            f"{bars([Bar(row['expression'], value, 'realm', probability(value))])}{passage}</div></div>"
        )
    note = (
        f"Of {masked['sentences']} sentences, the one that retrieval helps most. How probable is the masked word "
        "without retrieval, with the passage that helps most, and as REALM?"
    )
    body = (
        f'<p class="sentence">{_with_blank(masked["sentence"])}</p>'
        f"<p>The masked word: <b>{text(masked['answer'])}</b></p>"
    )
    return card("One sentence, three ways of reading it", note, body + "".join(rows))


def _with_blank(sentence: str) -> str:
    """The sentence with one blank for each run of [MASK] or underscores."""
    parts, inside = [], False
    for word in sentence.replace("[MASK]", " [MASK] ").split():
        is_blank = word == "[MASK]" or (len(word) > 1 and set(word) == {"_"})
        if is_blank and not inside:
            parts.append('<span class="blank" role="img" aria-label="blank"></span>')
        elif not is_blank:
            parts.append(text(word))
        inside = is_blank
    return " ".join(parts)
