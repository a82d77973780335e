"""Draws how retrieval is learned in a run, as an SVG file: `python docs/learning_curve.py RUN FILE.svg`.

The picture of the run's `report.html`: recall of the first five passages at every measurement, one stage after the
other, and BM25's as a level. For the README and the documentation; all numbers are those of the run folder.
"""

import argparse
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from realm_jax.eval.charts import Band, Series, plot
from realm_jax.storage import read_json
from realm_jax.train.metrics import read_lines

MEASURE = "recall@5"
TITLES = {"mlm": "warm-up", "ict": "inverse cloze", "realm": "REALM", "qa": "questions"}
SIZE = (660, 360)
# The chart's macro draws shapes with classes; in a file of its own they need their colours here.
PAGE = """\
{% from "macros.html.j2" import curves with context %}
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ width }} {{ height }}" font-family="system-ui, sans-serif">
<style>
text { font-size: 13px; fill: #586373; } .axis { font-size: 12.5px; } .grid { stroke: #dfe2e7; }
.frame { stroke: #586373; } .mark { stroke: #586373; stroke-width: .8; opacity: .35; } .flag { fill: #586373; }
.band0 { fill: #f4f2ec; } .band1 { fill: #e9eef6; } .band2 { fill: #eff3ea; }
.curve { fill: none; stroke-width: 2.4; } .dashed { stroke-dasharray: 6 5; stroke-width: 1.8; }
.curve.realm { stroke: #0b5fc4; } .curve.bm25 { stroke: #7b6bb0; } .dot { fill: #0b5fc4; }
</style>
<rect width="{{ width }}" height="{{ height }}" fill="#fff"/>
<text x="46" y="20">right passage among the first five, share of {{ questions }} held-out questions</text>
<svg y="{{ top }}" width="{{ width }}" height="{{ height - top }}">
{{ curves(chart) }}
</svg>
<text x="{{ width - 30 }}" y="{{ level }}" text-anchor="end" style="fill: #7b6bb0">BM25, {{ "%.2f" % bm25 }}</text>
</svg>
"""


def draw(run: Path) -> str:
    """The picture of a finished run of `realm quickstart`, as the text of an SVG file."""
    recall = read_json(run / "results.json")[MEASURE]
    questions = read_json(run / "data" / "PREPARED.json")["questions"]["dev"]
    points, refreshes, bands = measured(run)
    points, last = [(0, recall["untrained"]), *points], bands[-1].end
    description = (
        f"Share of questions whose passage is among the first five: {recall['untrained']:.2f} untrained, "
        f"{recall['ict']:.2f} after the inverse cloze task, {recall['realm']:.2f} after REALM, "
        f"{recall['qa']:.2f} after fine-tuning; BM25 has {recall['bm25']:.2f}"
    )
    (width, height), top = SIZE, 28
    chart = plot(
        [Series([(0, recall["bm25"]), (last, recall["bm25"])], "bm25", is_dashed=True), Series(points, "realm")],
        description,
        "training steps after the warm-up; a triangle: all passages embedded anew",
        (0, 1),
        bands,
        refreshes,
        (width, height - top),
    )
    assert chart is not None, "the baselines are always there"
    loader = PackageLoader("realm_jax.eval", "templates")
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    level = top + chart["curves"][0]["points"][0][1] - 8
    return page.from_string(PAGE).render(
        chart=chart, width=width, height=height, top=top, questions=questions, bm25=recall["bm25"], level=level
    )


def measured(run: Path) -> tuple[list[tuple[float, float]], list[float], list[Band]]:
    """Recall by step, the steps at which the index was made anew, and the stages; from the first measured stage on."""
    config, start = read_json(run / "config.json"), 0
    points, refreshes, bands = list[tuple[float, float]](), list[float](), list[Band]()
    for name in config["tasks"].split(","):
        lines = read_lines(run / name / "evaluations.jsonl")
        if not lines:
            continue
        points += [(start + line["step"], line[MEASURE]) for line in lines]
        refreshes += [start + line["step"] for line in lines if line["refresh"]]
        bands.append(Band(TITLES[name], start, start + config[name]["steps"]))
        start += config[name]["steps"]
    return points, refreshes, bands


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    args.output.write_text(draw(args.run), "utf-8")
