"""The documentation as a site: it builds without a warning, needs no other server, and has all that it promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from realm_jax.cli import main as cli

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built folder; mkdocs stops at what it would warn of: links, anchors and pages that are not there."""
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", f"--site-dir={folder}"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_page_loads_anything_from_another_server(site):
    """Scripts, styles, pictures, fonts and frames; links may lead anywhere."""
    loading = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)")
    pages = [*site.rglob("*.html")]
    assert len(pages) > 20
    for page in pages:
        assert not loading.findall(page.read_text("utf-8")), page
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text("utf-8")), style


def test_pages_are_made_of_commands_and_formulas_and_listed_for_programs(site):
    text = (site / "reference" / "commands.html").read_text("utf-8")
    assert all(f'id="realm-{name}"' in text and f"usage: realm {name}" in text for name in cli.JOBS)
    assert 'id="realm-launch-plan"' in text and "--price-per-chip-hour" in text
    text = (site / "objective.html").read_text("utf-8")
    assert text.count("<math") == 2 and "\\frac" not in text and "```" not in text
    listed = re.findall(r"^- \[.+\]\((.+)\): .+$", (site / "llms.txt").read_text("utf-8"), re.M)
    pages = {page.relative_to(site).with_suffix(".md").as_posix() for page in site.rglob("*.html")}
    assert sorted(listed) == sorted(pages - {"404.md"})
    assert all((site / page).read_text("utf-8").lstrip().startswith("# ") for page in listed)
