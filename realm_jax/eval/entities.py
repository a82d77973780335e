"""How well predicted names agree with annotated ones: precision, recall and F1 over whole names, as CoNLL counts them.

A name counts as found when both its ends are right: with its kind (`f1`), or whatever its kind (`boundary_f1`), which
is what salient spans need. `touched` counts a name that any span overlaps, and a span that overlaps any name.
"""

from collections.abc import Iterable, Sequence

from realm_jax.data.tags import Entity

Scores = dict[str, float]


def entity_scores(gold: Sequence[Iterable[Entity]], found: Sequence[Iterable[Entity]]) -> Scores:
    """gold, found: the names of each text, in the same order. Means over all names (micro averages), 0 to 1."""
    exact = [({*right}, {*guess}) for right, guess in zip(gold, found, strict=True)]
    ends = [({one[:2] for one in right}, {one[:2] for one in guess}) for right, guess in exact]
    counts = sum(len(right) for right, _ in exact), sum(len(guess) for _, guess in exact)
    scores = _scores("", sum(len(right & guess) for right, guess in exact), *counts)
    scores |= _scores("boundary_", sum(len(right & guess) for right, guess in ends), *counts)
    recalled = sum(_touches(one, guess) for right, guess in exact for one in right)
    precise = sum(_touches(one, right) for right, guess in exact for one in guess)
    touched = {"touched_precision": _share(precise, counts[1]), "touched_recall": _share(recalled, counts[0])}
    return scores | touched | {"names": counts[0], "found": counts[1]}


def _scores(prefix: str, right: int, gold: int, found: int) -> Scores:
    precision, recall = _share(right, found), _share(right, gold)
    f1 = 2 * precision * recall / (precision + recall) if right else 0.0
    return {f"{prefix}precision": precision, f"{prefix}recall": recall, f"{prefix}f1": f1}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _touches(one: Entity, others: Iterable[Entity]) -> bool:
    return any(one.start < other.end and other.start < one.end for other in others)
