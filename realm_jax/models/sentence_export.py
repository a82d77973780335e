"""A tower as a folder of sentence-transformers, beside the weights that `weights.py` writes there.

`SentenceTransformer(FOLDER).encode` then gives the tower's vectors. Its LayerNorm has one epsilon, which is larger than
BERT's; scaling what goes into it makes up for that exactly, since LayerNorm takes any scale out again. A folder that is
no encoder of texts, the reader's, gets a list of modules at which the library stops, where it would otherwise take the
mean of hidden states and say nothing. Read next: `sentence_folder.py`, the way back.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from realm_jax.models.realm import Params, Realm
from realm_jax.models.sentence_folder import (
    FLAGS,
    IDENTITY,
    INPUT,
    LIBRARY,
    LIBRARY_EPSILON,
    MODULES,
    POOLINGS,
    PROMPTS,
    REFUSING,
    SETTINGS,
    TANH,
    WEIGHTS,
)
from realm_jax.models.weights import write_json
from realm_jax.text.templates import parse

README = "README.md"
QUERIES, PASSAGES = "query", "document"  # the library's names for prompts, and for the texts that a tower is for


def write_modules(
    folder: Path, model: Realm, tower: Params, encoder: dict[str, Any], lengths: dict[str, int]
) -> None:  # fmt: skip
    """Make the library's files around a tower's BERT, which lies in `folder`.

    encoder: the config's section. lengths: 'query' or 'document', what the tower is for, both where it is shared → word
    pieces of its longest input.
    """
    modules = [("Transformer", ""), _add_pooling(folder, model)]
    modules += [_add(folder, 2 + number, *module) for number, module in enumerate(_layers(model, tower))]
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": f"{LIBRARY}models.{kind}"}
        for number, (kind, path) in enumerate(modules)
    ]
    write_json(folder / MODULES, entries)
    longest = {"max_seq_length": max(lengths.values()), "do_lower_case": False}
    write_json(folder / INPUT, longest | {"model_args": {"add_pooling_layer": False}})
    prompts = {purpose: prompt for purpose in lengths if (prompt := _prompt(encoder, purpose))}
    write_json(
        folder / PROMPTS,
        {
            "prompts": prompts,
            "default_prompt_name": next(iter(prompts)) if len(lengths) == len(prompts) == 1 else None,
            "similarity_fn_name": "cosine" if model.normalization == "l2" else "dot",
        },
    )
    (folder / README).write_text(_readme(encoder, list(lengths)), "utf-8")


def refuse_modules(folder: Path) -> None:
    """Make sentence-transformers stop at a folder that is no encoder of texts."""
    write_json(folder / MODULES, [{"idx": 0, "name": "0", "path": "", "type": REFUSING}])


Layer = tuple[str, dict[str, Any], dict[str, NDArray[np.float32]]]  # the library's class, its settings and its tensors


def _layers(model: Realm, tower: Params) -> list[Layer]:
    """The modules behind the pooling."""
    layers: list[Layer] = []
    if model.pooling == "pooler":
        layers.append(_dense(tower["pooler"]["kernel"], tower["pooler"]["bias"], TANH))
    normed = model.normalization == "layer"
    scale = (LIBRARY_EPSILON / model.norm_epsilon) ** 0.5 if normed else 1.0
    if model.projection:
        layers.append(_dense(tower["projection"]["kernel"] * scale, tower["projection"]["bias"] * scale, IDENTITY))
    elif normed:
        layers.append(_dense(np.eye(model.vector_size) * scale, np.zeros(model.vector_size), IDENTITY))
    if normed:
        norm = tower["projection_norm"]
        tensors = {"norm.weight": _array(norm["scale"]), "norm.bias": _array(norm["bias"])}
        layers.append(("LayerNorm", {"dimension": model.vector_size}, tensors))
    if model.normalization == "l2":
        layers.append(("Normalize", {}, {}))
    return layers


def _dense(kernel: Any, bias: Any, activation: str) -> Layer:
    sizes = {"in_features": kernel.shape[0], "out_features": kernel.shape[1]}
    settings = sizes | {"bias": True, "activation_function": activation}
    return "Dense", settings, {"linear.weight": _array(kernel.T), "linear.bias": _array(bias)}


def _array(values: Any) -> NDArray[np.float32]:
    return np.ascontiguousarray(values, np.float32)


def _add_pooling(folder: Path, model: Realm) -> tuple[str, str]:
    pooling = "cls" if model.pooling == "pooler" else model.pooling
    flags = {flag: POOLINGS.get(mode) == pooling for flag, mode in FLAGS.items()}
    settings: dict[str, Any] = {"word_embedding_dimension": model.bert.width, "include_prompt": True}
    return _add(folder, 1, "Pooling", settings | flags, {})


def _add(folder: Path, number: int, kind: str, settings: dict[str, Any], tensors: dict[str, Any]) -> tuple[str, str]:
    """Write a module's folder. Returns its class and path."""
    path = f"{number}_{kind}"
    (folder / path).mkdir()
    if settings:
        write_json(folder / path / SETTINGS, settings)
    if tensors:
        save_file(tensors, folder / path / WEIGHTS, metadata={"format": "pt"})
    return kind, path


def _prompt(encoder: dict[str, Any], purpose: str) -> str:
    """The literal text before the first slot."""
    template = encoder["query_prompt" if purpose == QUERIES else "passage_prompt"]
    return parse(template, "config.encoder", titles=True)[0] if template else ""


def _readme(encoder: dict[str, Any], purposes: list[str]) -> str:
    """What to encode, and how to compare."""
    lines = ["# A retriever's tower for sentence-transformers", ""]
    for purpose in purposes:
        lines += _usage(encoder, purpose)
    lines += [
        f"Scores are inner products of the two towers' vectors divided by the temperature, {encoder['temperature']:g}.",
        "`model.safetensors` holds the tower's own layers once more, under names that transformers reports and leaves",
        "out; `realm train --config.init_from` reads them.",
    ]
    return "\n".join(lines) + "\n"


def _usage(encoder: dict[str, Any], purpose: str) -> list[str]:
    call = f"SentenceTransformer(FOLDER).encode_{purpose}"
    template = encoder["query_prompt" if purpose == QUERIES else "passage_prompt"]
    if purpose == PASSAGES and not template:
        text, what = "[(title, text), ...]", "pairs of title and text, since the tower reads them as two segments"
    else:
        prompt = _prompt(encoder, purpose)
        rest = (template or "{text}")[len(prompt.replace("{", "{{").replace("}", "}}")) :]
        text, what = f'[f"{rest}", ...]', f"texts as {rest!r}"
        what += f"; the prompt {prompt!r} is put before them" if prompt else ""
    name = "Queries" if purpose == QUERIES else "Passages"
    return [f"{name}: {what}.", "", f"    {call}({text})", ""]
