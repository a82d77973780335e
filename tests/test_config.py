"""The config: a page lists its keys, every bad value is named by its key, and resume keeps the science."""

import json
import math
import re
from pathlib import Path

import pytest
from ml_collections import ConfigDict

import realm_jax
from realm_jax import schema
from realm_jax.config import SECTIONS, default, flatten, reference, science, task_names, validate
from realm_jax.errors import UserError
from realm_jax.sections import TaskSection, joint_length
from realm_jax.tasks.tagger import TaggerTask
from realm_jax.train.opening import recorded_config

PAGE = Path(realm_jax.__file__).parents[1] / "docs" / "config.md"


def test_the_page_of_keys_is_made_from_their_declarations():
    assert PAGE.read_text() == reference(), "`realm train --help-config > docs/config.md` writes it"


@pytest.mark.parametrize("sections", [SECTIONS, TaggerTask.sections], ids=["realm", "tagger"])
def test_the_page_lists_every_key_and_says_which_may_change(sections):
    tasks = [name for name, section in sections.items() if isinstance(section, TaskSection)]
    entries = dict(re.findall(r"^\* `(\S+)` \((.*?)(?=^\* |\Z)", schema.help_text(sections), re.DOTALL | re.MULTILINE))
    for name in [name for name in entries if name.startswith("<section>")]:
        entries |= dict.fromkeys([name.replace("<section>", task) for task in tasks], entries.pop(name))
    config = schema.to_config_dict(sections)
    assert {*entries} == {*flatten(config.to_dict())}
    kept = {name for name, text in entries.items() if "operations):" not in " ".join(text.split())}
    assert kept == {*science(config)}


def test_a_run_of_another_version_is_refused_with_a_way_to_take_it_over(tmp_path):
    recorded = default().to_dict()
    recorded["refresh"]["max_age"] = 0
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    with pytest.raises(UserError, match=r"with a key refresh.max_age; there, write .* `realm weights export`"):
        recorded_config(tmp_path)


def test_operations_may_change_and_science_may_not():
    changed = default()
    changed.mesh.model, changed.optimizer.microbatches, changed.init_from = 2, 4, "elsewhere"
    changed.checkpoint.every = changed.log.every = changed.evaluation.batch_size = 7
    assert science(changed) == science(default())
    changed.retrieval.candidates = 4
    assert science(changed) != science(default())


def usable():
    config = default()
    config.data.path = "data"
    return config


def test_the_default_needs_nothing_but_data():
    validate(usable())
    with pytest.raises(UserError, match=r"^config\.data\.path: set it to a folder written by `realm prepare`$"):
        validate(default())


BAD = [
    ("tasks", ""),
    ("tasks", "mlm,dance"),
    ("tasks", "mlm,mlm"),
    ("seed", -1),
    ("seed", 2**32),
    ("data.masking", "none"),
    ("data.predictions", -1),
    ("data.query_length", 7),
    ("data.document_length", 15),
    ("data.answers", 0),
    ("model.heads", 5),
    ("model.dropout", -0.1),
    ("model.dropout", 1.0),
    ("model.dtype", "float16"),
    ("encoder.norm_scale", math.inf),
    ("model.span_width", 0),
    ("objective.marginal", "span"),
    ("objective.retriever_start", -1),
    ("objective.qa", "both"),
    ("retrieval.candidates", 1),
    ("refresh.every", 0),
    ("realm.steps", 0),
    ("qa.batch_size", 0),
    ("mlm.learning_rate", 0.0),
    ("mlm.learning_rate", math.inf),
    ("optimizer.warmup", -1),
    ("optimizer.microbatches", 0),
    ("optimizer.preset", "long"),
    ("optimizer.retriever_rate", math.nan),
    ("mesh.fsdp", 0),
    ("mesh.model", -1),
    ("checkpoint.keep", 0),
    ("log.every", 0),
    ("objective.ict_null_weight", -0.1),
    ("evaluation.held_out", 0.0004),
    ("evaluation.batch_size", 0),
]


@pytest.mark.parametrize("key, value", BAD)
def test_a_bad_value_is_named_by_its_key(key, value):
    config = usable()
    config.update_from_flattened_dict({key: value})
    with pytest.raises(UserError, match=rf"^config\.{re.escape(key)}: ") as fault:
        validate(config)
    assert "\n" not in str(fault.value)


MISSHAPEN = [
    ({"ict": {"stepss": 5}}, "ict.stepss: no such key, did you mean ict.steps?"),
    ({"zzz": {}, "a": 1}, "a: no such key, at the top it has checkpoint, closed_book, data, "),
    ({"ict": 5}, "ict: is a section; set its keys, such as ict.batch_size"),
    ({"ict": {"steps": None}}, "ict.steps: takes a value of type int, such as 100000, not None"),
    ({"ict": {"steps": 3.0}}, "ict.steps: takes a value of type int, such as 100000, not float"),
    ({"ict": {"steps": True}}, "ict.steps: takes a value of type int, such as 100000, not bool"),
    ({"model": {"dropout": "0.1"}}, "model.dropout: takes a value of type float, such as 0.1, not str"),
    ({"tasks": ("ict", "qa")}, "tasks: takes a value of type str, such as 'mlm,ict,realm,qa', not tuple"),
    ({"log": {"every": {"steps": 1}}}, "log.every.steps: no such key, did you mean"),
]


@pytest.mark.parametrize("changes, message", MISSHAPEN)
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


def test_a_whole_number_is_a_float_too():
    keys = usable().to_dict()
    validate(ConfigDict(keys | {"encoder": keys["encoder"] | {"norm_scale": 1}}))


def test_a_beam_of_the_released_objective_holds_the_passages_that_are_read():
    config = usable()
    config.objective.qa, config.retrieval.qa_beam, config.retrieval.qa_passages = "orqa", 3, 5
    with pytest.raises(UserError, match=r"^config\.retrieval\.qa_beam: "):
        validate(config)
    config.objective.qa = "marginal"  # which has no beam
    validate(config)


def test_a_null_document_takes_part_among_the_passages_of_a_batch_alone():
    config = usable()
    config.objective.update(ict="index", ict_null_weight=0.3)
    with pytest.raises(UserError, match=r"^config\.objective\.ict_null_weight: objective.ict=index has no null"):
        validate(config)
    config.objective.ict = "batch"
    validate(config)


def test_a_task_that_is_not_in_the_recipe_is_not_looked_at():
    config = usable()
    config.tasks, config.ict.steps = "realm, qa", 0
    validate(config)
    assert task_names(config) == ["realm", "qa"]


def test_the_joint_layout_holds_a_whole_query_and_a_whole_passage():
    """96 + 288 less the passage's [CLS] and the [SEP] of its title: 382 used of the released code's 384."""
    assert joint_length(usable()) == 382


def test_a_fresh_config_each_time():
    one = default()
    one.model.layers = 1
    assert default().model.layers == 12
