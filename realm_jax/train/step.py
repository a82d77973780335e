"""The training state (`State`), sharded over the mesh, and the step as one jitted program.

The gradient is that of the whole global batch, all at once or part by part. Part by part takes the memory of one part
and gives the same gradient: sums and counts add up over the parts, and only then is the mean taken. A loss that
compares every example with every other (the inverse cloze task) takes two passes: first all vectors, without a
gradient; then the gradient of the loss at the vectors, carried back through the towers part by part (Gao et al. 2021,
"Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup").

Read `make_step`; `loop.py` drives it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from realm_jax.config import RealmConfig
from realm_jax.forward import Index
from realm_jax.index.control import reduce_control
from realm_jax.mesh import replicated
from realm_jax.models.layers import Params
from realm_jax.tasks.base import LOG_PERPLEXITY, Batch, Metrics, Task
from realm_jax.train.optimizer import (
    FRESH_HEADS,
    SHORT_RETRIEVER,
    SHORT_WARMUP,
    RateScales,
    make_optimizer,
    zero_frozen_gradients,
)

Array = jax.Array


class State(NamedTuple):
    """The training state. step: int32 scalar; frozen: parameters that this task does not train."""

    step: jax.Array
    trained: Params
    frozen: Params
    optimizer: Any

    @property
    def params(self) -> Params:
        return {**self.frozen, **self.trained}


def task_optimizer(task: Task) -> Any:
    """The optimiser of a task, from its section of the config."""
    config, settings, short = task.run.config, task.settings, is_short(task)
    warmup = config.optimizer.warmup or (SHORT_WARMUP.get(task.name, 20) if short else 0)
    retriever_start = settings.retriever_start if isinstance(settings, RealmConfig) else 0
    return make_optimizer(settings.learning_rate, settings.steps, warmup, retriever_start, task_rates(task), short)


def is_short(task: Task) -> bool:
    """Whether the optimizer is the preset of short runs from pretrained weights."""
    return bool(task.run.config.optimizer.preset == "short")


def task_rates(task: Task) -> RateScales:
    """The rates of the parts of the model, as multiples of the task's learning rate."""
    if not is_short(task):
        return RateScales()
    return RateScales(SHORT_RETRIEVER.get(task.name, 1.0), heads=FRESH_HEADS, words=False)


def start_state(task: Task, params: Params) -> State:
    """A task's state at step 0, sharded. The parameters are donated, as a step donates its state."""
    optimizer = task_optimizer(task)
    trained = {name: params[name] for name in task.trained}
    frozen = {name: value for name, value in params.items() if name not in task.trained}
    shardings = state_shardings(task)

    def build(trained: Params, frozen: Params) -> State:
        return State(jnp.zeros((), jnp.int32), trained, frozen, optimizer.init(trained))

    return jax.jit(build, donate_argnums=(0, 1), out_shardings=shardings)(trained, frozen)


def state_shardings(task: Task) -> Any:
    """Where every array of a task's state lives; moments live where their parameters do. A `State` of shardings."""
    import optax  # here, as in `optimizer.py`

    run = task.run
    everywhere = replicated(run.mesh)
    trained = {name: run.param_shardings[name] for name in task.trained}
    frozen = {name: value for name, value in run.param_shardings.items() if name not in task.trained}
    optimizer = task_optimizer(task)
    shapes = run.abstract_params
    abstract = jax.eval_shape(optimizer.init, {name: shapes[name] for name in task.trained})

    def has_none(moment: Any) -> bool:
        return isinstance(moment, optax.MaskedNode)

    moments = optax.tree_utils.tree_map_params(
        optimizer,
        lambda moment, sharding: moment if has_none(moment) else sharding,
        abstract,
        trained,
        transform_non_params=lambda _: everywhere,
        is_leaf=has_none,
    )
    return State(everywhere, trained, frozen, moments)  # type: ignore[arg-type]


Step = Callable[[State, Any, Index | None, jax.Array], tuple[State, dict[str, jax.Array]]]


def make_step(task: Task) -> Step:
    """One optimiser step as one jitted program; the state is donated. Metric `consensus`: the reduced control words."""
    import optax

    run, optimizer = task.run, task_optimizer(task)
    seed, dropout, rates = run.config.seed, run.model.bert.dropout > 0, task_rates(task)

    def step(state: State, batch: Any, index: Index | None, control: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), task.stream), state.step) if dropout else None

        grads, metrics = gradients(task, state.trained, state.frozen, batch, index, key, task.num_microbatches)
        grads = zero_frozen_gradients(grads, rates)
        updates, moments = optimizer.update(grads, state.optimizer, state.trained)
        trained = optax.apply_updates(state.trained, updates)
        metrics["gradient_norm"] = optax.tree.norm(grads)
        metrics["consensus"] = reduce_control(control)
        return State(state.step + 1, trained, state.frozen, moments), metrics

    shardings = state_shardings(task)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated(run.mesh)))


# --- the gradient -----------------------------------------------------------------------------------------------------


def gradients(
    task: Task, trained: Params, frozen: Params, batch: Batch, index: Any, key: Array | None, parts: int
) -> tuple[Params, dict[str, Array]]:
    """Gradient of the mean loss by `trained`, and what the task reports. parts: divides the batch size."""
    if parts == 1:
        whole = jax.grad(lambda trained: loss_and_metrics(task, {**frozen, **trained}, batch, index, key), has_aux=True)
        return whole(trained)
    if task.contrast is None:
        grads, means = _summed(task, trained, frozen, split(batch, parts), index, key)
    else:
        grads, means = _cached(task, trained, frozen, split(batch, parts), key)
    return grads, metric_values(means)


def loss_and_metrics(
    task: Task, params: Params, batch: Batch, index: Any, key: Array | None
) -> tuple[Array, dict[str, Array]]:
    """The loss of a whole batch, and everything that is reported of it."""
    values = metric_values(task.loss(params, batch, index, key))
    return values["loss"], values


def metric_values(means: Metrics) -> dict[str, Array]:
    """The values of means; a perplexity is the exponential of one."""
    values = {name: mean.mean for name, mean in means.items()}
    if LOG_PERPLEXITY in values:
        values["perplexity"] = jnp.exp(values.pop(LOG_PERPLEXITY))
    return values


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
) -> tuple[Params, Metrics]:
    def total(trained: Params, part: Batch, number: Array) -> tuple[Array, Metrics]:
        means = task.loss({**frozen, **trained}, part, index, _part_key(key, number))
        return means["loss"].total, means

    def add(sums: Params, entry: tuple[Array, Batch]) -> tuple[Params, Metrics]:
        number, part = entry
        (_, means), grads = jax.value_and_grad(total, has_aux=True)(trained, part, number)
        return jax.tree.map(jnp.add, sums, grads), means

    zeros = jax.tree.map(jnp.zeros_like, trained)
    grads, means = jax.lax.scan(add, zeros, (jnp.arange(_length(batch)), batch))
    means = jax.tree.map(lambda of_parts: of_parts.sum(axis=0), means)
    count = jnp.maximum(means["loss"].weight, 1.0)
    return jax.tree.map(lambda gradient: gradient / count, grads), means


def _cached(task: Task, trained: Params, frozen: Params, batch: Batch, key: Array | None) -> tuple[Params, Metrics]:
    assert task.contrast is not None
    encode, null, contrast = task.contrast

    def vectors(trained: Params, number: Array, part: Batch) -> Any:
        return encode({**frozen, **trained}, part, _part_key(key, number))

    def loss(vectors: Any, trained: Params) -> tuple[Array, Metrics]:
        means = contrast(vectors, null({**frozen, **trained}, key))
        return means["loss"].mean, means

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
