"""What commands write: files that flags name, through links and into pipes; and numbers for people and programs."""

import os
from pathlib import Path

import pytest

from realm_jax.cli.output import checked_output, print_line, print_records, write_output
from realm_jax.errors import UserError


def put(path: Path, text: str) -> None:
    write_output(checked_output(path, "--trec"), text)


def test_names_in_a_table_are_whole_where_no_terminal_limits_it(capsys):
    print_records([{"name": "n" * 100, "other": "o" * 100}], as_json=False, empty_message="")
    assert capsys.readouterr().out.split() == ["name", "other", "n" * 100, "o" * 100]


def test_a_link_stays_and_the_file_that_it_leads_to_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "there" / "file.jsonl")
    for text in ("one\n", "two\n"):
        put(link, text)
        assert link.is_symlink() and (tmp_path / "there" / "file.jsonl").read_text() == text


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)
    put(tmp_path / "pipe", "one\n")
    assert os.read(reader, 100) == b"one\n" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    put(Path("/dev/null"), "one\n")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere/run.txt", "--trec=nowhere/run.txt: is not a file in an existing folder"),
        (".", "--trec=.: is not a file in an existing folder"),
        ("/proc/run.txt", "--trec=/proc: cannot be written to"),
    ],
)
def test_where_nothing_can_be_written_is_named(path, message):
    with pytest.raises(UserError, match=message):
        checked_output(path, "--trec")


def test_a_file_that_may_not_be_written_to_is_refused(tmp_path, monkeypatch):
    (tmp_path / "there").write_text("kept")
    monkeypatch.setattr(os, "access", lambda *_: False)  # the administrator may write to all files
    for path in (tmp_path / "there", "/dev/null"):
        with pytest.raises(UserError, match=f"--output={path}: cannot be written"):
            checked_output(path, "--output")


def test_a_line_for_programs_has_a_dash_for_what_is_not_there(capsys):
    print_line("f1", [0.5, None, 3, "qa"], ".4f")
    assert capsys.readouterr().out == "f1 0.5000 - 3 qa\n"
