"""A projection that starts as the principal components of the corpus (`encoder.projection_start='pca'`).

    kernel = the components of largest variance of pooled vectors, bias = −mean · kernel

so that inner products of projected vectors are as near as they can be to those of centred pooled ones. The vectors are
those of passages that the config's seed draws, through the weights that the run starts from; both towers get the same.
It is made once and lies in the run folder, so that a start that is repeated has the same bits.
"""

import dataclasses
import logging

import jax
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from realm_jax.errors import UserError
from realm_jax.mesh import put_with_sharding
from realm_jax.models.realm import Params
from realm_jax.models.weights import open_safetensors
from realm_jax.processes import broadcast_from_process_0, is_process_0, run_on_process_0
from realm_jax.run import Run
from realm_jax.storage import write_atomic

logger = logging.getLogger(__name__)

FILE = "projection.safetensors"
SAMPLE = 2048  # passages; beyond a few for each feature more change little
STREAM = 11  # of random numbers; those of tasks are `Task.stream`


def with_principal_components(run: Run, params: Params) -> Params:
    """Parameters with a projection of principal components in both towers; every process has to call it.

    It is read from the run folder, or made there. Raises UserError for a file that cannot be read or does not
    fit, and for fewer passages than features.
    """
    path = run.workdir / FILE
    if not broadcast_from_process_0(int(path.is_file())):
        made = _make(run, params)
        run_on_process_0(lambda: write_atomic(path, save(made)))
    # A torn file is for the user to remove, since other devices than those that made it would give it other bits.
    with open_safetensors(path, "remove it, and it is made again") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}
    params, shardings = dict(params), run.param_shardings
    for tower in run.model.embedder_names:
        shapes = jax.tree.map(lambda leaf: leaf.shape, params[tower]["projection"])
        if {name: array.shape for name, array in found.items()} != shapes:
            raise UserError(f"{path}: is of another size than config.encoder.projection says; remove it")
        places = shardings[tower]["projection"]
        params[tower] = params[tower] | {"projection": jax.tree.map(put_with_sharding, found, places)}
    return params


def _make(run: Run, params: Params) -> dict[str, NDArray[np.float32]]:
    """Kernel and bias from a sample of the corpus."""
    total, size = len(run.sources.passages), run.config.encoder.projection
    if min(total, run.model.bert.width) < size:
        raise UserError(
            f"config.encoder.projection: is {size}, and {total} passages of {run.model.bert.width} features have fewer "
            "principal components; lower it, or set encoder.projection_start='fresh'"
        )
    chosen = np.random.default_rng((run.config.seed, STREAM)).choice(total, min(SAMPLE, total), replace=False)
    rows = run.corpus.take(np.sort(chosen))
    if is_process_0():
        logger.info("encoder.projection_start='pca': embedding %d passages", len(chosen))
    pooled = dataclasses.replace(run.model, projection=0, normalization="none")
    kernel, bias, share = principal_components(run.with_model(pooled).embed(params, rows=rows), size)
    if is_process_0():
        logger.info("%d principal components hold %.0f %% of the variance", size, 100 * share)
    return {"kernel": kernel, "bias": bias}


def principal_components(
    vectors: NDArray[np.float32], size: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
    """The `size` components of largest variance of vectors [rows, width].

    Returns kernel [width, size] and bias [size], float32, and the share of the variance that they hold. The largest
    entry of every component is positive.
    """
    wide = vectors.astype(np.float64)
    mean = wide.mean(axis=0)
    variances, components = np.linalg.eigh(np.cov(wide, rowvar=False))
    kernel = components[:, ::-1][:, :size]
    largest = np.take_along_axis(kernel, np.abs(kernel).argmax(axis=0)[None], axis=0)
    kernel = kernel * np.where(largest < 0, -1.0, 1.0)
    share = float(variances[::-1][:size].sum() / variances.sum())
    return kernel.astype(np.float32), (-mean @ kernel).astype(np.float32), share
