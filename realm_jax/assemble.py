"""Assemble a run from its config: the mesh, the networks, and the static arguments of its compiled steps.

A run's methods are in `run.py`; `train/recipe.py` checks its config and its directory.
"""

import dataclasses
from pathlib import Path

import jax
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from realm_jax.config import Config, as_config, joint_length, reader_section, task_names
from realm_jax.data.examples import lengths_from
from realm_jax.data.sources import Sources
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.errors import UserError
from realm_jax.forward import StaticContext
from realm_jax.host import WIDE_MODEL, release_large_blocks
from realm_jax.mesh import logical_sharding
from realm_jax.models.architectures.table import ARCHITECTURES
from realm_jax.models.networks import Realm
from realm_jax.models.prompts import Encode, Template, compiled, longest_passage, placeholder, query_lengths
from realm_jax.models.reader import Reader, span_size
from realm_jax.run import Run, device_options, make_bert, mesh_for
from realm_jax.tasks.rerank import CrossEncoder


def make_run(
    config: Config | ConfigDict, workdir: Path, sources: Sources, devices: list[jax.Device] | None = None
) -> Run:
    """Make a run.

    Args:
        config: validated.
        workdir: the run directory.
        sources: the data.
        devices: devices of the mesh; None for all.

    Raises:
        UserError: config and data do not fit together.
    """
    config = as_config(config)
    rows = len(sources.passages)
    trained = max(config.realm.candidates, config.qa.passages) if task_names(config) else 0  # an index trains nothing
    required = max(trained, config.answering.read)
    if rows < required:
        raise UserError(
            f"{config.data.path}: the corpus has {rows} passages, but config.realm.candidates, "
            f"qa.passages and answering.read need {required}; add passages or lower the keys"
        )
    if max(config.model.width, reader_section(config.model).width) >= WIDE_MODEL:
        release_large_blocks()
    tokenizer = sources.tokenizer
    special = tokenizer.cls_id, tokenizer.sep_id
    bare = abstract_run(config, workdir, rows, tokenizer.size, devices, special, prompt_encoder(tokenizer))
    is_prompted = bare.model.query_template is not None and bool(bare.model.query_template.before)
    sources = dataclasses.replace(sources, tokenizer=tokenizer.placed(behind_space=is_prompted))
    if config.data.text == "passages":
        sources = dataclasses.replace(sources, pretraining=sources.passages)
    return dataclasses.replace(bare, sources=sources)


def abstract_run(
    config: Config | ConfigDict, workdir: Path, rows: int, vocabulary_size: int,
    devices: list[jax.Device] | None = None, special: tuple[int, int] = (101, 102), encode: Encode = placeholder,
) -> Run:  # fmt: skip
    """Make a run without data, which is enough to compile its programs.

    Args:
        config: validated.
        workdir: the run directory.
        rows: number of passages.
        vocabulary_size: size of the tokenizer.
        devices: devices of the mesh; None for all.
        special: ids of [CLS] and [SEP], by default those of BERT's vocabulary.
        encode: tokenizes prompts.

    Raises:
        UserError: sizes do not fit together.
    """
    config = as_config(config)
    mesh = mesh_for(config, devices)
    data = config.data
    hidden = logical_sharding(mesh, "batch", None, None)
    model = make_model(config, vocabulary_size, encode, hidden)
    model = model.with_compute(**device_options(mesh, model.bert.compute.dtype))
    if "rerank" in task_names(config):
        model = dataclasses.replace(model, networks=(CrossEncoder(model.reader.bert),))
    context = StaticContext(model, mesh, *special, rows)
    masking, answers = config.realm.masking, config.qa.answers
    lengths = lengths_from(
        data.query_length, data.document_length, masking, data.predictions, answers, config.model.span_width
    )
    return Run(config, workdir, mesh, context.model, None, context, lengths)  # type: ignore[arg-type]


def make_model(
    config: Config | ConfigDict, vocabulary_size: int, encode: Encode = placeholder,
    hidden: NamedSharding | None = None,
) -> Realm:  # fmt: skip
    """Make the networks of a config.

    Args:
        config: validated.
        vocabulary_size: size of the tokenizer.
        encode: tokenizes prompts.
        hidden: sharding of hidden states.

    Raises:
        UserError: prompts leave too few positions for texts.
    """
    config = as_config(config)
    model, encoder = config.model, config.encoder
    query, passage = encoder.query_prompt, encoder.passage_prompt
    query_template = compiled(query, "config.encoder.query_prompt", False, encode) if query else None
    passage_template = compiled(passage, "config.encoder.passage_prompt", True, encode) if passage else None
    if passage_template is None and ARCHITECTURES[model.architecture].segment_types < 2:
        raise UserError(
            f"config.encoder.passage_prompt: {model.architecture!r} does not read title and body as two segments; set "
            "it to a template such as '{title} {text}'"
        )
    features = encoder.projection or model.width
    if encoder.dimensions > features:
        raise UserError(
            f"config.encoder.dimensions: is {encoder.dimensions}, but vectors have {features} features; set at most "
            "that many"
        )
    longest = max(joint_length(config), *longest_inputs(config, query_template, passage_template))
    bert = make_bert(model, vocabulary_size, longest, hidden)
    reader_bert = make_bert(reader_section(model), vocabulary_size, longest, hidden)
    return Realm(
        bert,
        projection=encoder.projection,
        norm_epsilon=encoder.norm_epsilon,
        norm_scale=encoder.norm_scale,
        pooling=encoder.pooling,
        normalization=encoder.normalization,
        dimensions=encoder.dimensions,
        temperature=float(encoder.temperature),
        query_template=query_template,
        passage_template=passage_template,
        shared_tower=model.shared_tower,
        reader=Reader(reader_bert, span_size(reader_bert.width), model.span_width),
    )


def longest_inputs(config: Config, query: Template | None, passage: Template | None) -> tuple[int, int]:
    """Return the tokens of the longest query and of the longest passage, including their prompts.

    Args:
        config: config of the run.
        query: the query prompt; None for none.
        passage: the passage prompt; None for none.
    """
    lengths = config.data
    return query_lengths(lengths.query_length, query), longest_passage(lengths.document_length, passage)


def prompt_encoder(tokenizer: Tokenizer) -> Encode:
    """Return a function that tokenizes a prompt."""
    return lambda text: tokenizer.placed(behind_space=False).encode(text).ids
