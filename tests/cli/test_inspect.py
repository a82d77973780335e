"""`realm inspect data`: what is shown is what is stored."""

import re

import numpy as np
import pytest
from capitals import write_lines

from realm_jax.cli import main as cli
from realm_jax.cli.inspect import histogram, spans_in_text, statistics
from realm_jax.cli.prepare import prepare
from realm_jax.data.sources import open_sources


@pytest.fixture
def data(tmp_path, passages, questions):
    prepare(passages, tmp_path / "data", questions=[questions], vocabulary_size=300, shards=2)
    return tmp_path / "data"


def test_passages_are_shown_with_their_spans_and_a_query(data, capsys):
    assert cli.main(["inspect", "data", str(data), "--document=oslo"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Oslo is the capital of Norway. The city burned in 1624 and was built again." in out
    hidden = re.search(r"\[MASK\].* = (\w+)", out)
    assert hidden and hidden[1] in ("norway", "1624")
    assert "questions train 2, dev 1" in out


def test_spans_are_found_again_in_the_text(data):
    sources = open_sources(data)
    (row,) = sources.passages.rows_of("oslo")
    text, kinds = sources.passages.text(row), sources.passages.span_kinds
    found = spans_in_text(sources.passages, row, sources.tokenizer)
    assert [(text[start:end], kinds[kind]) for start, end, kind in found] == [("Norway", "name"), ("1624", "date")]


@pytest.mark.parametrize("masking", ["uniform", "random_span"])
def test_every_kind_of_masking_can_be_looked_at(data, capsys, masking):
    overrides = [f"--config.realm.masking={masking}", "--config.data.text=pretraining"]
    assert cli.main(["inspect", "data", str(data), "--rows=2", *overrides]) == 0
    assert capsys.readouterr().out.count(" = ") == 2


def test_the_numbers_are_those_of_plain_loops(data):
    sources = open_sources(data)
    store, rows = sources.passages, range(len(sources.passages))
    found = statistics(store, sources.tokenizer)
    spans = [store.span_kinds[kind] for row in rows for _, _, kind in store.spans(row)]
    assert found.kinds == {kind: spans.count(kind) for kind in found.kinds} and sum(found.kinds.values()) == len(spans)
    assert found.numbers["tokens"] == sum(len(store.body_tokens(row)) for row in rows)
    assert found.counted["sentences of a passage"].tolist() == [len(store.sentences(row)) for row in rows]
    assert ("italy", "name", 1) in found.spans


def test_a_histogram_counts_every_value_once():
    edges, counts = histogram(np.array([3, 3, 4, 90, 17]))
    assert counts.sum() == 5 and edges[0] == 3 and edges[-1] > 90 and len(counts) <= 16


def test_the_page_needs_nothing_from_elsewhere(data, tmp_path, capsys):
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(page)
    assert cli.main(["inspect", "data", str(data), "--rows=0", f"--html={link}"]) == 0
    text = page.read_text()
    assert "salient spans of a passage" in text
    assert "<script" not in text and "http" not in text.replace("http-equiv", "")
    assert link.is_symlink() and f"{link} is written" in capsys.readouterr().out


def test_texts_cannot_steer_the_terminal_or_use_its_markup(tmp_path, capsys):
    text = "The [b]bridge[/b] was \x1b[31mbuilt in 1850\x9b by Ada."
    file = write_lines(tmp_path / "p.jsonl", [{"id": "a[/b]\x1b", "title": "[x]\x1b]0;t\x07", "text": text}])
    prepare(file, tmp_path / "data", vocabulary_size=300)
    assert cli.main(["inspect", "data", f"{tmp_path}/data"]) == 0
    out = capsys.readouterr().out
    assert "[x]" in out and "The [b]bridge[/b] was  [31mbuilt in 1850  by Ada." in " ".join(out.split("\n"))
    assert "document a[/b]" in out
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in out.replace("\n", ""))


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--document=bern", "has no such document"),
        ("--rows=-1", "--rows=-1: must be at least 0"),
        ("--config.seed=-1", "config.seed: must be from 0"),
        ("--config.data.query_length=0", "config.data.query_length: must be at least 8"),
        ("--html=absent/page.html", "--html=absent/page.html: is not a file in an existing folder"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_shown(data, capsys, flag, message):
    assert cli.main(["inspect", "data", str(data), flag]) == 2
    said = capsys.readouterr()
    assert message in said.err and not said.out


def test_a_folder_that_is_not_prepared_is_named_without_the_config(data, capsys):
    assert cli.main(["inspect", "data", f"{data}/absent"]) == 2
    assert f"{data}/absent: not a prepared folder" in (said := capsys.readouterr().err) and "config" not in said


@pytest.mark.parametrize("kind", [99, -1])
def test_a_span_of_no_kind_is_damage_of_a_file(data, capsys, kind):
    path = next(data.glob("passages/segment-*/spans.npy"))
    spans = np.load(path)
    spans[:, 2] = kind
    np.save(path, spans)
    for rows in (0, 9):  # of all spans, of a row's
        assert cli.main(["inspect", "data", str(data), f"--rows={rows}"]) == 2
        assert f"{path} is damaged (a span of no kind); prepare the data again" in capsys.readouterr().err
