"""The config: a page lists its keys, every bad value is named by its key, and resume keeps the training keys."""

import json
import re
from pathlib import Path

import pytest
from ml_collections import ConfigDict

import realm_jax
from realm_jax.config import (
    KEYS,
    RealmConfig,
    as_config,
    default,
    joint_length,
    reader_section,
    reference,
    task_names,
    training_keys,
    validate,
    with_overrides,
    with_values,
)
from realm_jax.errors import UserError
from realm_jax.tasks import TASKS
from realm_jax.train.workdir import recorded_config

PAGE = Path(realm_jax.__file__).parents[1] / "docs" / "config.md"


def test_the_page_of_keys_is_made_from_their_declarations():
    assert PAGE.read_text() == reference(), "`realm train --help-config > docs/config.md` writes it"


def test_the_page_lists_every_key_and_says_which_may_change():
    entries = dict(re.findall(r"^\* `(\S+)` \((.*?)(?=^\* |\Z)", reference(), re.DOTALL | re.MULTILINE))
    assert [*entries] == [*KEYS]
    kept = {name for name, text in entries.items() if "runtime):" not in " ".join(text.split())}
    assert kept == {*training_keys(default())}


def test_every_task_has_a_section():
    assert all(hasattr(default(), name) for name in TASKS)


@pytest.mark.parametrize("gone", ["optimizer.weight_decay", "index.min_recall"])
def test_a_run_of_another_version_is_refused_with_a_way_to_take_it_over(tmp_path, gone):
    recorded = default().to_dict()
    section, _, name = gone.partition(".")
    recorded[section] = recorded.get(section, {}) | {name: 0}
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    with pytest.raises(UserError, match=rf"unknown key {re.escape(gone)}.*`realm weights export`"):
        recorded_config(tmp_path)


def usable(changes: dict[str, object] | None = None) -> ConfigDict:
    config = default()
    config.update_from_flattened_dict({"data.path": "data"} | (changes or {}))
    return config


def test_runtime_keys_may_change_and_training_keys_may_not():
    runtime = dict.fromkeys(("checkpoint.every", "log.every", "evaluation.batch_size", "answering.read"), 7)
    runtime |= {"mesh.model": 2, "optimizer.microbatches": 4, "init_from": "elsewhere"}
    assert training_keys(usable(runtime)) == training_keys(usable())
    assert training_keys(usable(runtime | {"realm.candidates": 4})) != training_keys(usable())


def test_the_default_needs_nothing_but_data():
    validate(usable())
    validate(usable({"encoder.norm_scale": 1}))  # a whole number is a float, too
    with pytest.raises(UserError, match=r"^config\.data\.path: set it to a folder written by `realm prepare`$"):
        validate(default())


BAD = """
tasks= tasks=mlm,dance tasks=mlm,mlm seed=-1 seed=4294967296 realm.masking=none data.predictions=-1
data.query_length=7 data.document_length=15 qa.answers=0 model.heads=5 model.dropout=-0.1 model.dropout=1.0
model.dtype=float16 encoder.norm_scale=inf model.span_width=0 realm.marginal=word realm.retriever_start=-1
qa.objective=both realm.candidates=1 refresh.every=-1 realm.steps=0 qa.batch_size=0 mlm.learning_rate=0.0
mlm.learning_rate=inf optimizer.warmup=-1 optimizer.microbatches=0 optimizer.preset=long mesh.fsdp=0 mesh.model=-1
checkpoint.keep=0 log.every=0 log.to=tensorbord log.to=wandb,wandb ict.null_weight=-0.1 evaluation.held_out=0.0004
evaluation.batch_size=0
""".split()


@pytest.mark.parametrize("override", BAD)
def test_a_bad_value_is_named_by_its_key(override):
    with pytest.raises(UserError, match=rf"^config\.{re.escape(override.partition('=')[0])}: ") as fault:
        validate(with_overrides(usable(), [f"--config.{override}"]))
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("realm.steps", -1, "must be positive, not -1"),
        ("mlm.learning_rate", float("inf"), "must be a finite number"),
        ("retrieval.backend", "some", "must be one of 'device', 'scann', not 'some'"),
    ],
)
def test_a_value_beyond_its_limit_is_told_the_limit(key, value, message):
    with pytest.raises(UserError) as fault:
        validate(usable({key: value}))
    assert str(fault.value) == f"config.{key}: {message}"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"ict": {"stepss": 5}}, "ict.stepss: no such key, did you mean ict.steps?"),
        ({"zzz": {}, "a": 1}, "a: no such key, the top level has answering, checkpoint, "),
        ({"ict": 5}, "ict: is a section; set its keys, such as ict.steps"),
        ({"ict": {"steps": None}}, "ict.steps: takes a value of type int, such as 100000, not None"),
        ({"ict": {"steps": 3.0}}, "ict.steps: takes a value of type int, such as 100000, not float"),
        ({"ict": {"steps": True}}, "ict.steps: takes a value of type int, such as 100000, not bool"),
        ({"model": {"dropout": "0.1"}}, "model.dropout: takes a value of type float, such as 0.1, not str"),
        ({"tasks": ("ict", "qa")}, "tasks: takes a value of type str, such as 'mlm,ict,realm,qa', not tuple"),
        ({"log": {"every": {"steps": 1}}}, "log.every.steps: no such key, did you mean"),
    ],
)
def test_a_config_has_the_keys_of_the_default_and_no_others(changes, message):
    values = usable().to_dict()
    for key, value in changes.items():
        values[key] = values.get(key, {}) | value if isinstance(value, dict) else value
    with pytest.raises(UserError) as fault:
        validate(ConfigDict(values))
    assert str(fault.value).startswith(f"config.{message}") and "\n" not in str(fault.value)


def test_a_key_that_is_missing_is_named():
    config = usable()
    del config.log
    with pytest.raises(UserError, match=r"^config\.log\.every: is missing; begin with `realm_jax.config.default\(\)`"):
        validate(config)


TOGETHER = [
    # The released objective looks for answers in its beam, which holds the passages that are read.
    ("qa.objective=orqa qa.beam=3 qa.passages=5", "qa.beam: ", "qa.objective=marginal"),
    (
        "ict.negatives=index ict.null_weight=0.3",
        "ict.null_weight: ict.negatives=index has no null",
        "ict.negatives=batch",
    ),
    # One tower embeds both, so that fine-tuning moves passages.
    ("model.shared_tower=True", ".*set qa.refresh_every", "qa.refresh_every=1000"),
    ("model.shared_tower=True", ".*set qa.refresh_every", "qa.search=bm25"),
    ("qa.search=bm25 qa.refresh_every=10", ".*qa.refresh_every: trains vectors", "qa.search=vectors"),
    ("tasks=realm refresh.every=0 refresh.mode=async", "refresh.every", "refresh.mode=inline"),
    ("tasks=realm refresh.every=0 retrieval.backend=scann", "refresh.every", "retrieval.backend=device"),
    ("tasks=realm refresh.every=0 model.shared_tower=True", "refresh.every", "model.shared_tower=False"),
    ("answering.rerank=cross-encoder", ".*no task trains the cross-encoder", "answering.rerank=tokens"),
    ("answering.rerank_depth=51", ".*from 10 to 50", "answering.rerank_depth=50"),
    ("tasks=ict,rerank", ".*learns from a trained reader", "tasks=ict,qa,rerank"),
    ("tasks=ict,closed_book", "tasks: closed_book cannot be combined with other tasks", "tasks=mlm,closed_book"),
    ("tasks=closed_book,mlm", "tasks: closed_book cannot be combined with other tasks", "tasks=mlm,closed_book"),
]


@pytest.mark.parametrize("keys, message, repair", TOGETHER)
def test_keys_that_do_not_go_together_are_refused(keys, message, repair):
    overrides = [f"--config.{key}" for key in keys.split()]
    with pytest.raises(UserError, match=rf"^config\.{message}"):
        validate(with_overrides(usable(), overrides))
    validate(with_overrides(usable(), [*overrides, f"--config.{repair}"]))


def test_the_recipe_is_a_list_of_names():
    assert task_names(validate(usable({"tasks": "realm, qa"}))) == ["realm", "qa"]


def test_the_reader_is_as_the_encoders_but_for_the_keys_that_are_set():
    model = validate(
        with_overrides(usable(), ["--config.model.reader.width=24", "--config.model.reader.heads=3"])
    ).model
    reader = reader_section(model)
    assert (reader.width, reader.heads, reader.layers, model.width) == (24, 3, 12, 768)
    with pytest.raises(UserError, match="^config.model.reader: the reader's 12 heads must divide its width of 9$"):
        validate(usable({"model.reader.width": 9}))
    with pytest.raises(UserError, match="^config.model.reader.layers: takes a value of type int, not str$"):
        validate(usable({"model.reader.layers": "many"}))


def test_reader_sizes_of_an_earlier_version_are_read(tmp_path):
    recorded = default().to_dict()
    recorded["model"]["reader"] = "layers=2,hidden_act=gelu"
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    assert recorded_config(tmp_path).model.reader.changes == {"layers": 2, "hidden_act": "gelu"}


def test_another_number_of_steps_needs_no_other_program():
    """A loss takes its section as a static argument of a jitted function."""
    assert RealmConfig(steps=1, batch_size=2, learning_rate=0.1) == RealmConfig() != RealmConfig(candidates=4)
    assert hash(RealmConfig(steps=1)) == hash(RealmConfig())


def test_a_config_is_frozen_and_changed_by_its_dotted_keys():
    config = as_config(usable())
    changed = with_values(config, {"realm.candidates": 4, "model.reader.layers": 2})
    assert (changed.realm.candidates, config.realm.candidates, changed.model.reader.layers) == (4, 8, 2)
    with pytest.raises(UserError, match="^config.realm.candidates: must be at least 2"):
        with_values(config, {"realm.candidates": 1})


def test_the_joint_layout_holds_a_whole_query_and_a_whole_passage():
    """96 + 288 less the passage's [CLS] and the [SEP] of its title: 382 used of the released code's 384."""
    assert joint_length(usable()) == 382
    assert joint_length(usable({"realm.marginal": "span"})) == 383  # titles are read


def test_a_fresh_config_each_time():
    default().model.layers = 1
    assert default().model.layers == 12
