"""Count the operations of a step of each task, by part of the model; `realm_jax/flops.py` says which ones count.

`EXAMPLE_FLOPS` has a function for each task. The backward pass costs twice the forward one, hence the factor 3. Lengths
are those of the config, so that `realm launch plan` can count the same step with other lengths.
"""

from collections.abc import Callable
from typing import Any

from realm_jax.config import joint_length
from realm_jax.flops import embedding_flops, reader_size, score_flops, word_flops
from realm_jax.forward import MAX_POINTED, PackingSpec
from realm_jax.tasks.base import Task
from realm_jax.tasks.evidence_contrast import EvidenceContrast
from realm_jax.tasks.ict import Ict
from realm_jax.tasks.mlm import Mlm
from realm_jax.tasks.qa import Qa
from realm_jax.tasks.realm import RealmTask
from realm_jax.tasks.rerank import RerankTask


def step_flops(task: Task) -> dict[str, float]:
    """Return the operations of a step: {part of the model: operations}."""
    return {part: task.settings.batch_size * flops for part, flops in example_flops(task).items()}


def example_flops(task: Task) -> dict[str, float]:
    """Return the operations of a step per example: {part of the model: operations}."""
    return EXAMPLE_FLOPS[task.name](task)


def _mlm(task: Mlm) -> dict[str, float]:
    run, packing = task.run, packing_of(task)
    slots = packing.reader_inputs / packing.examples
    read = reader_size(run.config).forward(joint_length(run.config), run.lengths.predictions, slots)
    return {"reader": 3 * (read + word_flops(run))}


def _ict(task: Ict) -> dict[str, float]:
    run, config, score = task.run, task.run.config, score_flops(task.run)
    queries = 3 * embedding_flops(config, config.data.query_length)
    if task.retrieves:  # stored vectors have no gradient: a product each way
        scores = 2 * score * (1 + config.qa.beam)
        return {"search": run.context.rows * score, "queries": queries, "scores": scores}
    documents = 3 * embedding_flops(config, config.data.document_length)
    return {"queries": queries, "documents": documents, "scores": 3 * score * task.settings.batch_size}


def _realm(task: RealmTask) -> dict[str, float]:
    run, realm, config = task.run, task.settings, task.run.config
    reader, packing, predictions = reader_size(config), packing_of(task), run.lengths.predictions
    query_length, document_length = config.data.query_length, config.data.document_length
    candidates = realm.candidates - 1

    padded_query = embedding_flops(config, query_length)  # as hosts embed it
    query = embedding_flops(config, query_length, packed_length=packing.queries / packing.examples)
    document_slots = packing.passages / (packing.examples * candidates)
    document = embedding_flops(config, document_length, packed_length=document_slots)

    if not realm.reads:
        reading = 0.0
    elif realm.uses_span_marginal:
        read = min(MAX_POINTED, candidates)
        reading = read * reader.forward(joint_length(config), None, packing.reader_inputs / (packing.examples * read))
    else:
        slots = packing.reader_inputs / (packing.examples * candidates)
        reading = candidates * reader.forward(joint_length(config), predictions, slots)
        reading += reader.forward(query_length + 1, predictions, packing.null_inputs / packing.examples)
        reading += realm.candidates * word_flops(run)

    compared = 0 if realm.search == "bm25" else run.context.rows
    return {
        "search": padded_query if run.scann_config is not None else query + compared * score_flops(run),
        "queries": 3 * query,
        "documents": 0.0 if task.frozen_passages else 3 * candidates * document,
        "reader": 3 * reading,
    }


def _qa(task: Qa) -> dict[str, float]:
    # A question with its positive passage counts with the maximum length, because batches' lengths depend on the data.
    run, qa, config = task.run, task.settings, task.run.config
    reader, packing, joint = reader_size(config), packing_of(task), joint_length(config)
    spans = 2 * joint * reader.width * 2 * run.model.reader.span_hidden
    read = 1 if task.is_positive else qa.passages
    slots = packing.reader_inputs / (packing.examples * read)
    parts = {"reader": 3 * read * (reader.forward(joint, packed_length=slots) + spans)}
    if not qa.uses_bm25_only:
        queries = embedding_flops(config, config.data.query_length, packed_length=packing.queries / packing.examples)
        parts |= {"search": run.context.rows * score_flops(run), "queries": 3 * queries}
    if qa.trains_passages:
        document_slots = packing.passages / (packing.examples * read)
        documents = embedding_flops(config, config.data.document_length, packed_length=document_slots)
        parts["documents"] = 3 * qa.passages * documents
    return parts


def _rerank(task: RerankTask) -> dict[str, float]:
    run, config, count = task.run, task.run.config, task.candidates
    reader, length = reader_size(config), joint_length(config)
    read, scored = reader.forward(length), reader.forward(length, 1) + 2 * reader.width**2
    parts = {"reader": count * read, "reranker": 3 * count * scored}
    if not config.qa.uses_bm25_only:
        queries = embedding_flops(config, config.data.query_length)
        parts |= {"search": run.context.rows * score_flops(run), "queries": queries}
    return parts


def _evidence_contrast(task: EvidenceContrast) -> dict[str, float]:
    config = task.run.config
    return {
        "queries": 3 * embedding_flops(config, config.data.query_length),
        "documents": 2 * 3 * embedding_flops(config, config.data.document_length),
        "scores": 6 * score_flops(task.run) * task.settings.batch_size,
    }


def packing_of(task: Task) -> PackingSpec:
    """Return the packing of a device's share of a microbatch; one example and no slots if it is padded."""
    return task.context.packing or PackingSpec(1)


EXAMPLE_FLOPS: dict[str, Callable[[Any], dict[str, float]]] = {
    "mlm": _mlm,
    "ict": _ict,
    "realm": _realm,
    "qa": _qa,
    "closed_book": _mlm,
    "rerank": _rerank,
    "evidence_contrast": _evidence_contrast,
}
