"""The gradient of a task's loss over a global batch, all at once or part by part.

Part by part takes the memory of one part and gives the same gradient: sums and counts add up over the parts, and only
then is the mean taken. A loss that compares every example with every other (the inverse cloze task) takes two passes:
first all vectors, without a gradient; then the gradient of the loss at the vectors, carried back through the towers
part by part (Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup").
"""

from typing import Any

import jax
import jax.numpy as jnp

from realm_jax.models.realm import Params
from realm_jax.tasks.base import Batch, Means, Task, metric_values

Array = jax.Array


def gradients(
    task: Task, trained: Params, frozen: Params, batch: Batch, index: Any, key: Array | None, parts: int
) -> tuple[Params, dict[str, Array]]:
    """Gradient of the mean loss by `trained`, and what the task reports. parts: divides the batch size."""
    if parts == 1:
        whole = jax.grad(lambda trained: task.value({**frozen, **trained}, batch, index, key), has_aux=True)
        return whole(trained)
    if task.contrast is None:
        grads, means = _summed(task, trained, frozen, split(batch, parts), index, key)
    else:
        grads, means = _cached(task, trained, frozen, split(batch, parts), key)
    return grads, metric_values(means)


def split(batch: Batch, parts: int) -> Batch:
    """[batch, …] → [parts, batch / parts, …]. Part i has every example whose number mod `parts` is i, so that each
    device keeps its own."""
    return jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)


def _join(parts: Any) -> Any:
    """The inverse of `split`."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), parts)


def _part_key(key: Array | None, number: Array) -> Array | None:
    return None if key is None else jax.random.fold_in(key, number)


def _summed(
    task: Task, trained: Params, frozen: Params, batch: Batch, index: Any, key: Array | None
) -> tuple[Params, Means]:
    def total(trained: Params, part: Batch, number: Array) -> tuple[Array, Means]:
        means = task.loss({**frozen, **trained}, part, index, _part_key(key, number))
        return means["loss"].total, means

    def one(number: Array, part: Batch) -> tuple[Params, Means]:
        (_, means), grads = jax.value_and_grad(total, has_aux=True)(trained, part, number)
        return grads, means

    def add(sums: tuple[Params, Means], entry: tuple[Array, Batch]) -> tuple[tuple[Params, Means], None]:
        return jax.tree.map(jnp.add, sums, one(*entry)), None

    numbers = jnp.arange(_length(batch))
    shapes = jax.eval_shape(one, numbers[0], jax.tree.map(lambda x: x[0], batch))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (grads, means), _ = jax.lax.scan(add, zeros, (numbers, batch))
    count = jnp.maximum(means["loss"].number, 1.0)
    return jax.tree.map(lambda gradient: gradient / count, grads), means


def _cached(task: Task, trained: Params, frozen: Params, batch: Batch, key: Array | None) -> tuple[Params, Means]:
    assert task.contrast is not None
    encode, null, contrast = task.contrast

    def vectors(trained: Params, number: Array, part: Batch) -> Any:
        return encode({**frozen, **trained}, part, _part_key(key, number))

    def loss(vectors: Any, trained: Params) -> tuple[Array, Means]:
        means = contrast(vectors, null({**frozen, **trained}, key))
        return means["loss"].value, means

    numbers = jnp.arange(_length(batch))
    found = _join(jax.lax.map(lambda entry: vectors(trained, *entry), (numbers, batch)))
    (_, means), (cotangents, grads) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(found, trained)

    def add(grads: Params, entry: tuple[Array, Batch, Any]) -> tuple[Params, None]:
        number, part, cotangent = entry
        _, back = jax.vjp(lambda trained: vectors(trained, number, part), trained)
        return jax.tree.map(jnp.add, grads, back(cotangent)[0]), None

    grads, _ = jax.lax.scan(add, grads, (numbers, batch, split(cotangents, len(numbers))))
    return grads, means


def _length(batch: Batch) -> int:
    return len(next(iter(batch.values())))
