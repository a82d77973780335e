"""Plans: counted operations, shapes of batches, and, where the TPU compiler is installed, real programs."""

import importlib.util
import json
import runpy
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec
from tiny_run import tiny_config

from realm_jax.assemble import abstract_run, make_run
from realm_jax.cli import main as cli
from realm_jax.config import default, load_config
from realm_jax.data.sources import open_sources
from realm_jax.environment import image_versions
from realm_jax.flops import BertSize, chip, embedding_flops
from realm_jax.launch import plan
from realm_jax.launch.plan import (
    abstract_arguments,
    abstract_documents,
    compiled_needs,
    devices_to_compile_for,
    show,
    useful_share,
)
from realm_jax.mesh import replicated
from realm_jax.tasks import make_task, packed
from realm_jax.tasks.qa_examples import positive_examples
from realm_jax.tasks.step_flops import step_flops
from realm_jax.train.step import make_step

ROOT = Path(__file__).parents[2]


def needs_compiler(test):
    """A slow test of real programs."""
    there = importlib.util.find_spec("libtpu") is not None
    return pytest.mark.slow(pytest.mark.skipif(not there, reason="the TPU compiler is not installed")(test))


def arrays(example) -> dict[str, tuple]:
    """Name → shape and dtype."""
    return {name: (np.shape(value), np.asarray(value).dtype) for name, value in example.items()}


def promised(task) -> dict[str, tuple]:
    return {name: (shape, np.dtype(dtype)) for name, (shape, dtype) in task.example_spec().items()}


@pytest.mark.parametrize("task", ["ict", "realm", "qa"])
def test_shapes_are_those_of_real_examples(people, task, tmp_path):
    config = tiny_config(people)
    for name in ("ict", "qa"):
        config[name].batch_size = 8
    made = make_task(task, make_run(config, tmp_path, open_sources(people)))
    assert arrays(made.examples({}, None).make(0, np.random.default_rng(0))) == promised(made)


@pytest.mark.parametrize("titles", [True, False])
def test_shapes_of_a_question_with_its_positive_passage(people, titles):
    config = tiny_config(people)
    config.qa.titles, config.qa.objective, config.qa.batch_size = titles, "positive", 8
    sources = open_sources(people)
    task = make_task("qa", make_run(config, Path("."), sources, jax.devices()[:1]))
    asked = sources.questions["train"][:1]
    examples = positive_examples(asked, [0], sources.passages, sources.tokenizer, task.run.lengths, titles)
    assert arrays(examples.make(0, np.random.default_rng(0))) == promised(task)


@pytest.mark.parametrize("task, changes", [("ict", {"negatives": "index"}), ("qa", {"objective": "positive"})])
def test_a_step_of_every_objective_can_be_planned(task, changes):
    """Of abstract arrays alone: with an index where it retrieves, and a joint where one comes with a batch."""
    config = tiny_config(Path("-"))
    config[task].update(changes)
    run = abstract_run(config, Path("."), 1000, 300, jax.devices()[:1])
    made = jax.eval_shape(make_step(make_task(task, run)), *abstract_arguments(run, task))
    assert "loss" in str(jax.tree.structure(made))


def test_operations_of_a_tower_by_hand():
    """Width 4, feed-forward 8, three pieces: 24 × 16 for the projections, 144 for attention, 384 for the rest."""
    one = BertSize(layers=1, width=4, feed_forward=8)
    assert one.forward(3) == 2 * (4 * 3 * 16) + 2 * 2 * 3 * 3 * 4 + 2 * 2 * 3 * 4 * 8
    assert BertSize(2, 4, 8).forward(3) == 2 * one.forward(3)
    first = 2 * (2 * 1 + 2 * 3) * 16 + 2 * 2 * 1 * 3 * 4 + 2 * 2 * 1 * 4 * 8
    assert BertSize(2, 4, 8).forward(3, 1) == one.forward(3) + first


def flops_of(config, task: str, rows: int) -> dict[str, float]:
    return step_flops(make_task(task, abstract_run(config, Path("."), rows, 30_522, jax.devices()[:1])))


def test_operations_of_a_step_of_the_paper_s_size():
    """330 million parameters, about 6 operations a parameter and piece: queries 96, seven documents 288, joints 382."""
    config = default()
    parts = flops_of(config, "realm", 13_353_718)
    rough = 512 * 6 * 85e6 * (96 + 7 * 288 + 7 * 382 + 97)
    assert sum(parts.values()) == pytest.approx(rough, rel=0.25)
    assert parts["search"] < 0.02 * sum(parts.values())
    assert embedding_flops(config, 288) == pytest.approx(2 * 85e6 * 288, rel=0.1)


def test_objectives_over_the_index_read_and_embed_less():
    """The inverse cloze task over the index searches and embeds no passage; one positive passage is one to read."""
    config, rows = default(), 10_000
    batch = flops_of(config, "ict", rows)
    config.ict.negatives, config.qa.objective = "index", "positive"
    found = flops_of(config, "ict", rows)
    assert found["search"] == config.ict.batch_size * 2 * 10_000 * config.encoder.projection
    assert "documents" not in found and found["queries"] == batch["queries"]
    positive = flops_of(config, "qa", rows)
    config.qa.objective = "marginal"
    marginal = flops_of(config, "qa", rows)
    assert marginal["reader"] == config.qa.passages * positive["reader"]
    assert marginal["search"] == positive["search"]


SMALL = ["--config.model.layers=2", "--config.model.width=128", "--config.model.feed_forward=256",
         "--config.realm.batch_size=64", "--config.ict.batch_size=64", "--config.mlm.batch_size=64",
         "--config.qa.batch_size=64", "--config.model.heads=2", "--config.model.dropout=0.0"]  # fmt: skip


@needs_compiler
def test_a_plan_of_a_small_model(capsys):
    assert cli.main(["launch", "plan", "--spec.trainer.slice=v5e:4x4", "--passages=100000", "--json", *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == 16 and found["fits"] and found["bytes"]["peak"] < 2**34
    assert sum(entry["bytes"] for name, entry in found["collectives"].items() if name.startswith("all-reduce")) > 0
    for name in ("seconds", "mfu", "hours", "refresh_seconds", "steps_per_refresh"):
        assert 0 < found[name][0] <= found[name][1], name
    assert found["compiler"].keys() == {"jax", "jaxlib", "libtpu"}


@needs_compiler
def test_a_plan_that_does_not_fit_names_the_keys_to_change(capsys):
    assert cli.main(["launch", "plan", "--spec.trainer.slice=v5e:2x2", "--config.model.dtype=bfloat16"]) == 1
    assert "does NOT fit" in capsys.readouterr().out


@needs_compiler
def test_trainer_and_builders_have_slices_of_their_own(capsys):
    spec = ["trainer.slice=v5e:2x4", "trainer.slices=2", "builder.slice=v6e:2x2", "builder.slices=2"]
    flags = [*(f"--spec.{key}" for key in spec), "--passages=100000", "--json", "--price-per-chip-hour=2"]
    assert cli.main(["launch", "plan", *flags, *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["devices"], found["device"]) == (16, "TPU v5 lite")
    assert (found["builder_devices"], found["builder_device"]) == (2 * 4, "TPU v6 lite")
    apart = [name for name, entry in found["collectives"].items() if "bytes_between_slices" in entry]
    assert apart == ["all-reduce between slices"], "each slice has the corpus: gradients travel, and control words"
    assert found["builder"]["fits"] and found["cost"] == pytest.approx(
        [hours * (16 + 8) * 2 for hours in found["hours"]]
    )


@needs_compiler
def test_tokens_are_gathered_on_their_devices():
    """A TPU's usual layout of uint16 [rows, 288] has the columns one after another: a copy of all in every step."""
    config = load_config("realm_wiki", ["--config.data.path=-", "--config.mesh.fsdp=4"], default)
    run = abstract_run(config, Path("."), 1_000_000, 30522, devices_to_compile_for("v5e:2x2"))

    def taken(documents, rows):
        whole, spread = PartitionSpec(), PartitionSpec(run.mesh.axis_names)
        gather = jax.shard_map(
            lambda ids, rows: ids[rows], mesh=run.mesh, in_specs=(spread, whole), out_specs=spread, check_vma=False
        )
        return gather(documents.ids, rows)

    rows = jax.ShapeDtypeStruct((3584,), np.int32, sharding=replicated(run.mesh))
    compiled = jax.jit(taken).lower(abstract_documents(run, 1_000_000, "rows"), rows).compile()
    assert "u16[250000,288]" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


def test_tokens_have_the_planned_layout(people, tmp_path, monkeypatch):
    """On a CPU rows lie together anyway; columns do where that is asked for, and are the same tokens."""
    made = [make_run(tiny_config(people), tmp_path, open_sources(people), jax.devices()[:4]) for _ in range(2)]
    usual = made[0].documents.ids
    assert usual.format.layout.major_to_minor == (0, 1)

    def columns_first(sharding, dimensions):
        return Format(Layout(tuple(reversed(range(dimensions)))), sharding)

    monkeypatch.setattr("realm_jax.run.row_major", columns_first)
    ids = made[1].documents.ids
    assert ids.format.layout.major_to_minor == (1, 0) and ids.sharding == usual.sharding
    np.testing.assert_array_equal(ids, usual)


def test_the_share_of_tokens_follows_from_the_lengths_of_the_data(people, tmp_path, monkeypatch):
    """However candidates are found and sentences are masked: neither is done to see how long they are."""
    sources, config = open_sources(people), tiny_config(people)
    found = useful_share(make_run(config, tmp_path, sources, jax.devices()[:1]), "realm")
    pieces = np.minimum(sources.passages.counts("tokens") + 3, config.data.document_length)
    assert found["passage"] == pytest.approx(pieces.mean()) and 4 < found["query"] <= config.data.query_length
    config.realm.search, config.realm.masking = "hybrid", "evidence"
    run = make_run(config, tmp_path, sources, jax.devices()[:1])
    assert useful_share(run, "realm") == found and not (tmp_path / "words").exists()
    for key in ("query_length", "document_length"):
        config.data[key] *= 2
    shorter = found["share"]
    longer = useful_share(make_run(config, tmp_path, sources, jax.devices()[:1]), "realm")["share"]
    monkeypatch.setattr(packed, "WORTH", 0.0)
    padded = useful_share(make_run(config, tmp_path, sources, jax.devices()[:1]), "realm")["share"]
    assert 0 < padded < longer < 1 and padded < shorter < 1, "packed sequences are padded less"


@pytest.mark.parametrize("part, marginal", [("reader", "example"), ("reader", "span"), ("documents", "example")])
def test_tokens_of_titles_count_where_they_are_read(people, tmp_path, monkeypatch, part, marginal):
    """With a part that takes as many operations as a passage has pieces."""
    config, sources = tiny_config(people), open_sources(people)
    config.realm.marginal = marginal
    work = {"reader": 0, "documents": 0}
    monkeypatch.setattr(plan, "step_flops", lambda task: work | {part: task.run.config.data.document_length})
    found = useful_share(make_run(config, tmp_path, sources, jax.devices()[:1]), "realm")
    tokens, titles = sources.passages.counts("tokens"), sources.passages.column("title_lengths")
    assert titles.mean() > 1
    read = (tokens - titles).mean() if (part, marginal) == ("reader", "example") else tokens.mean()
    assert found["share"] == round(read + 3) / config.data.document_length


@pytest.mark.parametrize(
    ("flags", "sizes", "useful"),
    [
        (["--config.data.path={people}"], (16, 135), True),
        (["--config.data.path={people}", "--passages=99"], (99, 135), True),
        (["--config.data.path=gs://bucket/data"], (13_353_718, 30_522), False),
        (["--config.data.path=.", "--vocabulary=500"], (13_353_718, 500), False),  # no prepared folder
        (["--config.data.path={people}", "--task=ict"], (16, 135), False),
        (["--config.data.path={people}", "--task=qa", "--config.tasks=qa"], (16, 135), False),
    ],
)
def test_a_plan_has_the_sizes_of_local_data(people, monkeypatch, capsys, flags, sizes, useful):
    monkeypatch.setattr(plan, "tpu_devices", lambda *_: jax.devices()[:1])
    planned = {}

    def step_needs(run, task, *_):
        planned.update(task=make_task(task, run))
        return {"fits": True, "bytes": {}}

    monkeypatch.setattr(plan, "step_needs", step_needs)
    monkeypatch.setattr(plan, "plan_of_builder", lambda *_: {"builder": {"fits": True}})
    small = ["--config.mesh.fsdp=1", "--config.optimizer.microbatches=1", "--json"]
    assert cli.main(["launch", "plan", *(flag.format(people=people) for flag in flags), *small]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["passages"], found["vocabulary"], "useful" in found) == (*sizes, useful)
    packs = sizes[1] == 135 and planned["task"].name in ("realm", "qa")
    assert (planned["task"].context.packing is not None) == packs, "as it will be trained on these data"


RECORDED = runpy.run_path(str(ROOT / "benchmarks" / "plans.py"))


@pytest.mark.parametrize("name", RECORDED["WANTED"])
def test_recorded_plans_are_of_the_shipped_config(name):
    """`benchmarks/plans.py` writes the records anew; there is room in every topology that the project speaks of."""
    recorded = json.loads(RECORDED["GOLDEN"].read_text())[name]
    config = load_config(str(ROOT / "configs" / f"{name}.py"), [], default)
    assert RECORDED["is_of"](recorded, config), "run benchmarks/plans.py"
    config.realm.candidates += 1
    assert not RECORDED["is_of"](recorded, config)
    assert list(recorded["plans"]) == RECORDED["WANTED"][name]
    for topology, found in recorded["plans"].items():
        assert found["fits"] and found["bytes"]["peak"] < chip(found["device"]).memory, topology
        assert found.get("builder", found)["fits"], topology
        assert 0 < found["seconds"][0] <= found["seconds"][1] and found["compiler"].keys() >= {"jax", "libtpu"}
        assert found["compiler"].items() <= image_versions().items(), f"{topology}: plan with the versions of the image"


@pytest.mark.parametrize("text, known", [("ENTRY %main (a: f32[8]) -> f32[8] {\n}", True), ("a program", False)])
def test_a_plan_without_a_time_has_memory(capsys, text, known):
    """Of a compiler that writes its programs in another way."""
    sizes = dict.fromkeys(("argument", "output", "temp", "alias", "generated_code"), 2**30)
    compiled = types.SimpleNamespace(
        memory_analysis=lambda: types.SimpleNamespace(
            **{f"{name}_size_in_bytes": size for name, size in sizes.items()}
        ),
        as_text=lambda: text,
    )
    device = types.SimpleNamespace(device_kind="TPU v5 lite", platform="tpu", slice_index=0, coords=(0, 0, 0))
    run = types.SimpleNamespace(mesh=types.SimpleNamespace(devices=np.array([device])))
    found = compiled_needs(types.SimpleNamespace(compile=lambda: compiled), run)
    assert found["fits"] and found["bytes"]["peak"] == 3 * 2**30
    assert ("seconds" in found, "time_unknown" in found) == (known, not known)
    found |= {"device": "TPU v5 lite", "devices": 1, "flops": 1.0, "flops_by_part": {}}
    show(found | {"task": "realm", "passages": 1, "vocabulary": 1})
    assert ("not known" in capsys.readouterr().out) == (not known)


def test_recorded_plans_are_shown_with_their_parts(capsys):
    recorded = json.loads(RECORDED["GOLDEN"].read_text())["realm_wiki"]["plans"]
    show(recorded["v5e:8x8 --num-slices=2"])
    shown = capsys.readouterr().out
    for part in ("all-reduce between slices", "only collectives between slices", "libtpu", "MFU of embedding"):
        assert part in shown


def test_the_page_has_the_table_of_the_recorded_plans():
    page, plans = RECORDED["PAGE"].read_text("utf-8"), json.loads(RECORDED["GOLDEN"].read_text())
    assert page == RECORDED["filled_page"](page, plans), "python benchmarks/plans.py --page"
    assert page.count("GiB |") == sum(len(entry["plans"]) for entry in plans.values())


def test_a_task_that_the_recipe_does_not_have_is_named(capsys):
    assert cli.main(["launch", "plan", "--task=mlm", "--config.tasks=realm"]) == 2
    assert "--task=mlm: the recipe has realm" in capsys.readouterr().err
