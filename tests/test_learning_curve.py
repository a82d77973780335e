"""The picture of learning in the README and the documentation, drawn from a run folder."""

import json
from xml.etree import ElementTree

import pytest
from scripts import script


def test_the_picture_of_learning_shows_the_numbers_of_a_run(tmp_path):
    recall = {"untrained": 0.0, "bm25": 0.5, "ict": 0.25, "realm": 1.0, "qa": 0.75}
    steps = {"mlm": 100, "ict": 10, "realm": 20, "qa": 10}
    measured = {
        "ict": [(10, 0.25, False)],
        "realm": [(0, 0.25, True), (10, 0.5, True), (20, 1.0, False)],
        "qa": [(10, 0.75, False)],
    }
    files = {
        "config.json": {"tasks": "mlm,ict,realm,qa"} | {name: {"steps": count} for name, count in steps.items()},
        "results.json": {"recall@5": recall},
        "data/PREPARED.json": {"questions": {"dev": 600}},
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    for task, lines in measured.items():
        (tmp_path / task).mkdir()
        rows = [{"step": step, "recall@5": value, "refresh": is_new} for step, value, is_new in lines]
        (tmp_path / task / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    picture = script("docs/learning_curve.py").draw(tmp_path)
    root = ElementTree.fromstring(picture)
    assert "recall@5 (600 held-out questions)" in picture and "BM25, 0.50" in picture
    assert "0.25 after the inverse cloze task, 1.00 after REALM, 0.75 after fine-tuning" in picture
    dots = [
        (float(one.attrib["cx"]), float(one.attrib["cy"])) for one in root.iter("{http://www.w3.org/2000/svg}circle")
    ]
    (left, bottom), (right, _) = dots[0], dots[-1]
    assert [(x - left) / (right - left) for x, _ in dots] == pytest.approx([0, 0.25, 0.25, 0.5, 0.75, 1], abs=0.01)
    heights = [(bottom - y) / (bottom - min(y for _, y in dots)) for _, y in dots]
    assert heights == pytest.approx([0, 0.25, 0.25, 0.5, 1, 0.75], abs=0.01)
