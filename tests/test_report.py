"""The report page: what it says for good, bad and partial results, that it stands alone, and that text is harmless."""

import copy
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.evaluation.charts import Series, curves, thinned, ticks
from realm_jax.evaluation.findings import headline, share, takeaways
from realm_jax.evaluation.page import duration, probability
from realm_jax.evaluation.report import render_report, write_report


def sample_data() -> dict[str, Any]:
    """A whole run: every key of the report's data."""
    passage = (
        "Dalvik Moren is a bridge in the north of the country. It was opened in March 1874 after nine years of work. "
        "The builder of Dalvik Moren was Torvald Espel, who had learnt his trade on the canals. Its length is 412 "
        "metres. Every spring a fair is held on it, and the toll house at its southern end is now a small museum."
    )
    span = [passage.index("Torvald"), passage.index(", who")]
    candidates = [
        {"title": "Dalvik Moren", "text": passage, "probability": 0.938, "is_gold": True, "answer_span": span},
        {"title": "", "text": "", "probability": 0.031, "is_gold": False, "answer_span": None},
        {"title": "Dalvik Tern", "text": "Dalvik Tern is a mill. " * 4, "probability": 0.02, "is_gold": False},
        {"title": "Sorn Moren", "text": "Sorn Moren is a river.", "probability": 0.0098, "is_gold": False},
        {"title": "Ilka Moren", "text": "Ilka Moren is a singer.", "probability": 0.0012, "is_gold": False},
    ]
    example = {
        "question": "who built the crossing Dalvik Stennow ?",
        "answers": ["Torvald Espel"],
        "prediction": "torvald espel",
        "correct": True,
        "candidates": candidates,
    }
    wrong = {**example, "question": "who founded Ostra Kell ?", "prediction": "may 1790", "correct": False}
    wrong["answers"] = ["Brenna Aldous"]
    stages = [
        ("mlm", "Reader warm-up", "Masked words of a sentence, beside a passage of the same article", 1500),
        ("ict", "Inverse cloze task", "Which passage a sentence was taken from", 800),
        ("realm", "REALM pre-training", "Masked words alone; passages are retrieved and never named", 3000),
        ("qa", "Questions and answers", "Questions with the text of the answer, no passage", 900),
    ]
    return {
        "title": "REALM quickstart",
        "command": "realm quickstart --workdir runs/first",
        "created": "2025-05-04 12:30",
        "hardware": "one GPU",
        "corpus": {
            "passages": 6000,
            "pretraining": 4500,
            "train_questions": 3000,
            "dev_questions": 1000,
            "description": "An encyclopedia of made-up things, so nothing can be known without reading",
        },
        "results": {
            "recall@5": {
                "untrained": 0.031,
                "ict": 0.482,
                "realm": 0.987,
                "bm25": 0.624,
                "no_retriever_gradient": 0.471,
                "more_ict": 0.523,
            },
            "recall@20": {"untrained": 0.06, "ict": 0.66, "realm": 0.996, "bm25": 0.71},
            "exact_match": {"retrieval": 0.912, "closed_book": 0.041, "chance": 0.023},
            "retrieval_utility": 2.41,
            "seconds": {"mlm": 61.2, "ict": 34.0, "realm": 412.7, "qa": 88.1},
        },
        "stages": [
            {
                "name": name,
                "title": title,
                "supervision": supervision,
                "steps": steps,
                "seconds": steps / 8,
                "metrics": _metrics(name, steps),
            }
            for name, title, supervision, steps in stages
        ],
        "recall_history": [
            {"stage": "ict", "step": step, "recall@5": 0.03 + step / 1800} for step in range(0, 801, 200)
        ]
        + [
            {
                "stage": "realm",
                "step": step,
                "recall@5": 0.987 - 0.505 * 0.5 ** (step / 500),
                "refresh": step > 0,
            }
            for step in range(0, 3001, 250)
        ],
        "recall_by_replaced_words": {
            "bm25": {"0": 0.99, "1": 0.62, "2": 0.05},
            "ict": {"0": 0.75, "1": 0.42, "2": 0.12},
            "realm": {"0": 0.996, "1": 0.985, "2": 0.97},
        },
        "examples": [example, wrong],
        "masked_sentence": {
            "sentence": "The crossing Dalvik Stennow was built by [MASK] [MASK] .",
            "answer": "Torvald Espel",
            "rows": [
                {"model": "Without retrieval", "expression": "p(y | x)", "probability": 1.1e-14, "passage": None},
                {
                    "model": "With the right passage",
                    "expression": "p(y | z, x)",
                    "probability": 0.9981,
                    "passage": passage,
                },
                {
                    "model": "REALM, over the top 8",
                    "expression": "p(y | x) = Σ p(y | z, x) p(z | x)",
                    "probability": 0.812,
                },
            ],
        },
        "settings": {"seed": 1, "batch size": 64, "candidates": 8, "layers": 2, "hidden": 128, "refresh every": 250},
    }


def _metrics(name: str, steps: int) -> list[dict[str, float]]:
    rows = []
    for step in range(0, steps + 1, 10):
        decay = 0.5 ** (step / (steps / 5))
        row = {"step": step, "loss": 0.6 + 6 * decay + 0.1 * (step % 7)}
        if name in ("realm", "qa"):
            row |= {"null_probability": 0.04 + 0.3 * decay}
        if name == "realm":
            row |= {"retrieval_utility": 2.4 * (1 - decay), "useful_candidates": 1.4 - decay}
        if name in ("mlm", "ict"):
            row |= {"accuracy": 0.9 - 0.8 * decay}
        rows.append(row)
    return rows


class Balance(HTMLParser):
    """Checks that tags close in order, and collects the text and the attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())
