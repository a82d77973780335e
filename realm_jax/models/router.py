"""Two towers as one folder of sentence-transformers: its Router, which embeds queries with one and documents with the
other.

    modules.json, router_config.json          a Router with the routes `query` and `document`
    config_sentence_transformers.json         the prompts of both
    query_0_Transformer/, query_1_Pooling/ …  the modules of each route

`encode_query` and `encode_document` of `SentenceTransformer(FOLDER)` take their own routes; plain `encode` takes that
of documents, since whoever embeds a corpus calls it most. What a tower's modules are: `sentence_transformers.py`.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realm_jax.models.sentence_transformers import LIBRARY, MODULES, PASSAGES, PROMPTS, QUERIES, README
from realm_jax.models.weights import write_json
from realm_jax.storage import read_fetched_json, read_settings

ROUTER = "router_config.json"
OF_A_TOWER = (MODULES, PROMPTS, README)  # what the router has in its own folder instead


def write_router(folder: Path, towers: Mapping[str, Path]) -> None:
    """Make `folder` of the folders of two towers, which are moved into it.

    towers: QUERIES and PASSAGES → a folder as `write_modules` leaves it, whose vectors are compared alike.
    """
    settings = {route: read_settings(tower / PROMPTS) for route, tower in towers.items()}
    prompts = {route: one["prompts"].get(route, "") for route, one in settings.items()}
    folder.mkdir(exist_ok=True)
    routes = {route: _move(tower, folder, route) for route, tower in towers.items()}
    write_json(folder / MODULES, [{"idx": 0, "name": "0", "path": "", "type": f"{LIBRARY}models.Router"}])
    router = {
        "types": {name: kind for modules in routes.values() for name, kind in modules.items()},
        "structure": {route: list(modules) for route, modules in routes.items()},
        "parameters": {"default_route": PASSAGES, "allow_empty_key": True},
    }
    write_json(folder / ROUTER, router)
    default = PASSAGES if prompts[PASSAGES] else None
    similarity = settings[QUERIES]["similarity_fn_name"]
    write_json(folder / PROMPTS, {"prompts": prompts, "default_prompt_name": default, "similarity_fn_name": similarity})


def _move(tower: Path, folder: Path, route: str) -> dict[str, str]:
    """Move a tower's modules into folders of their own; their names and classes, in order."""
    entries: list[dict[str, Any]] = read_fetched_json(tower / MODULES)
    names = [f"{route}_{number}_{entry['type'].rpartition('.')[2]}" for number, entry in enumerate(entries)]
    for entry, name in zip(entries[1:], names[1:], strict=True):
        shutil.move(tower / entry["path"], folder / name)
    for name in OF_A_TOWER:
        (tower / name).unlink()
    shutil.move(tower, folder / names[0])  # what is left is the Transformer
    return {name: entry["type"] for name, entry in zip(names, entries, strict=True)}
