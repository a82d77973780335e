"""Progress on a terminal, in a narrow one, and in a log file."""

import logging
import os
import subprocess
import sys
from io import StringIO

import pytest
from rich.console import Console

from realm_jax import console
from realm_jax.console import StageProgress

METRICS = {"loss": 1.23456, "recall": 0.5, "p_null": 0.123}


def terminal(width: int) -> tuple[Console, StringIO]:
    file = StringIO()
    return Console(file=file, width=width, force_terminal=True, color_system=None), file


def last_frame(file: StringIO) -> str:
    return file.getvalue().split("\r")[-1].replace("\x1b[2K", "").replace("\x1b[?25h", "").strip()


def test_a_terminal_shows_stage_steps_metrics_and_a_bar():
    to, file = terminal(100)
    with StageProgress("realm", total=600, start=200, to=to) as bar:
        bar.update(219, METRICS)
    frame = last_frame(file)
    assert frame.startswith("realm ━") and "219/600" in frame
    assert "loss 1.235  recall 0.5  p_null 0.123" in frame


@pytest.mark.parametrize("width, expected", [(60, "loss 1.235  recall 0.5"), (40, "loss 1.235"), (30, "219/600")])
def test_a_narrow_terminal_drops_the_bar_and_then_whole_metrics_from_the_end(width, expected):
    to, file = terminal(width)
    with StageProgress("realm", total=600, to=to) as bar:
        bar.update(219, METRICS)
    frame = last_frame(file)
    assert expected in frame and "219/600" in frame
    assert "━" not in frame and "…" not in frame and "\n" not in frame


def test_a_log_file_gets_a_line_at_first_then_one_every_ten_seconds_and_the_last(caplog):
    now = [0.0]
    to = Console(file=StringIO(), force_terminal=False)
    caplog.set_level(logging.INFO, logger="realm_jax")
    with StageProgress("realm", total=30, to=to, clock=lambda: now[0]) as bar:
        for step in range(1, 31):
            now[0] += 1.0
            bar.update(step, {"loss": 1 / step})
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[1] for line in lines] == ["1/30", "11/30", "21/30", "30/30"]
    assert lines[1] == "realm 11/30  loss 0.09091  0:00:19 left"


def test_time_left_counts_the_steps_of_this_run_only(caplog):
    now = [0.0]
    caplog.set_level(logging.INFO, logger="realm_jax")
    with StageProgress("realm", total=100, start=90, to=Console(file=StringIO()), clock=lambda: now[0]) as bar:
        now[0] = 600.0  # it has waited for the compiler
        bar.update(91)
        now[0] = 610.0
        bar.update(96)
    assert [record.getMessage() for record in caplog.records] == ["realm 91/100", "realm 96/100  0:00:08 left"]


def test_a_log_line_is_one_unwrapped_line_and_its_brackets_are_text(monkeypatch):
    to, file = Console(file=StringIO(), width=40, force_terminal=False), StringIO()
    to.file = file
    monkeypatch.setattr(console, "console", lambda: to)
    record = logging.LogRecord("realm_jax", logging.WARNING, __file__, 1, "[bold]" + "x" * 60, None, None)
    console._ConsoleHandler().handle(record)
    assert file.getvalue().endswith(" warning: [bold]" + "x" * 60 + "\n")
    assert file.getvalue().count("\n") == 1


def test_the_console_is_on_stderr_so_that_results_can_be_piped(capsys):
    console.console().print("a progress line")
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "a progress line\n"


def test_nobody_reading_the_log_neither_ends_a_program_nor_changes_its_exit_code():
    reader, writer = os.pipe()
    os.close(reader)
    code = """
import logging, sys
from realm_jax.console import set_up_logging
set_up_logging()
for line in range(3):
    logging.getLogger("realm_jax.test").info("line %d", line)
sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", code], stderr=writer, timeout=60)
    os.close(writer)
    assert done.returncode == 7
