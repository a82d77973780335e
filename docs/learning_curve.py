"""Draw recall@5 by training step of a run, as an SVG file: `python docs/learning_curve.py RUN FILE.svg`.

The stages follow one another, and BM25 is a horizontal line. All numbers are read from the run directory.
"""

import argparse
from pathlib import Path

from realm_jax.eval.html import Band, chart, environment
from realm_jax.storage import read_json
from realm_jax.train.metrics import read_lines

MEASURE = "recall@5"
TITLES = {"mlm": "warm-up", "ict": "inverse cloze", "realm": "REALM", "qa": "questions"}
# The macro draws shapes with classes; in a file of its own they need their colours here.
PAGE = """\
{% from "curve.svg.j2" import curve %}
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ width }} {{ height }}" font-family="system-ui, sans-serif">
<style>
text { font-size: 13px; fill: #586373; } .axis { font-size: 12.5px; } .grid { stroke: #dfe2e7; }
.frame { stroke: #586373; } .mark { stroke: #586373; stroke-width: .8; opacity: .35; } .flag { fill: #586373; }
.band0 { fill: #f4f2ec; } .band1 { fill: #e9eef6; } .band2 { fill: #eff3ea; }
.curve { fill: none; stroke: #0b5fc4; stroke-width: 2.4; } .dot { fill: #0b5fc4; }
.level { stroke: #7b6bb0; stroke-dasharray: 6 5; stroke-width: 1.8; }
</style>
<rect width="{{ width }}" height="{{ height }}" fill="#fff"/>
<text x="46" y="20">recall@5 ({{ questions }} held-out questions)</text>
<svg y="{{ top }}" width="{{ width }}" height="{{ height - top }}">
{{ curve(plot) }}
</svg>
<text x="{{ width - 30 }}" y="{{ level }}" text-anchor="end" style="fill: #7b6bb0">BM25, {{ "%.2f" % bm25 }}</text>
</svg>
"""


def draw(run: Path) -> str:
    """Draw a finished run of `realm quickstart`; return the text of an SVG file."""
    recall = read_json(run / "results.json")[MEASURE]
    questions = read_json(run / "data" / "PREPARED.json")["questions"]["dev"]
    points, refreshes, bands = measured(run)
    points = [(0, recall["untrained"]), *points]
    description = (
        f"Recall@5: {recall['untrained']:.2f} untrained, "
        f"{recall['ict']:.2f} after the inverse cloze task, {recall['realm']:.2f} after REALM, "
        f"{recall['qa']:.2f} after fine-tuning; BM25 has {recall['bm25']:.2f}"
    )
    x_label = "training step after the warm-up (a triangle: the index is refreshed)"
    plot = chart(points, description, x_label, (0, 1), bands, refreshes, recall["bm25"])
    assert plot is not None, "the baselines are always there"
    (width, height), top = plot["size"], 28
    level = top + plot["level"] - 8
    return (
        environment()
        .from_string(PAGE)
        .render(
            plot=plot, width=width, height=height + top, top=top, questions=questions, bm25=recall["bm25"], level=level
        )
    )


def measured(run: Path) -> tuple[list[tuple[float, float]], list[float], list[Band]]:
    """Return recall by step, the steps at which the index was refreshed, and the stages that have measurements."""
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
