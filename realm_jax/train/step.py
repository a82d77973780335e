"""The training state (`State`), sharded over the mesh, and the step as one jitted program.

The gradient is that of the global batch, at once or by microbatch. Microbatches need the memory of one of them and give
the same gradient: sums and counts are added up over them before the mean is taken. A loss that compares every example
with every other (the inverse cloze task) takes two passes: first all vectors, without a gradient; then the gradient of
the loss at the vectors, carried back through the encoders by microbatch (Gao et al. 2021, "Scaling Deep Contrastive
Learning Batch Size under Memory Limited Setup").

Read `make_step`; `loop.py` drives it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from realm_jax.config import RealmConfig
from realm_jax.forward import Index
from realm_jax.indexing.control import reduce_control
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
    """The training state of a task.

    Attributes:
        step: number of steps that are done, int32 scalar.
        trained: parameters that the task trains, by network.
        frozen: all other parameters, by network.
        optimizer: optax state, with moments for `trained` only.
    """

    step: jax.Array
    trained: Params
    frozen: Params
    optimizer: Any

    @property
    def params(self) -> Params:
        """Return all parameters, by network."""
        return {**self.frozen, **self.trained}


def task_optimizer(task: Task) -> Any:
    """Return the optax optimizer of a task, from its section of the config."""
    config, settings, short = task.run.config, task.settings, is_short(task)
    warmup = config.optimizer.warmup or (SHORT_WARMUP.get(task.name, 20) if short else 0)
    retriever_start = settings.retriever_start if isinstance(settings, RealmConfig) else 0
    return make_optimizer(settings.learning_rate, settings.steps, warmup, retriever_start, task_rates(task), short)


def is_short(task: Task) -> bool:
    """Return True if the optimizer is the preset for short runs from pretrained weights."""
    return bool(task.run.config.optimizer.preset == "short")


def task_rates(task: Task) -> RateScales:
    """Return the learning rates of parts of the model, as multiples of the task's."""
    if not is_short(task):
        return RateScales()
    return RateScales(SHORT_RETRIEVER.get(task.name, 1.0), heads=FRESH_HEADS, words=False)


def start_state(task: Task, params: Params) -> State:
    """Return a task's sharded state at step 0. The parameters are donated, as a step donates its state.

    Args:
        task: names the networks that it trains.
        params: all parameters, by network.
    """
    optimizer = task_optimizer(task)
    trained = {name: params[name] for name in task.trained}
    frozen = {name: value for name, value in params.items() if name not in task.trained}
    shardings = state_shardings(task)

    def build(trained: Params, frozen: Params) -> State:
        return State(jnp.zeros((), jnp.int32), trained, frozen, optimizer.init(trained))

    return jax.jit(build, donate_argnums=(0, 1), out_shardings=shardings)(trained, frozen)


def state_shardings(task: Task) -> Any:
    """Return a `State` of shardings; moments are sharded like their parameters."""
    import optax  # here, as in `optimizer.py`

    run = task.run
    on_all_devices = replicated(run.mesh)
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
        transform_non_params=lambda _: on_all_devices,
        is_leaf=has_none,
    )
    return State(on_all_devices, trained, frozen, moments)  # type: ignore[arg-type]


Step = Callable[[State, Any, Index | None, jax.Array], tuple[State, dict[str, jax.Array]]]


def make_step(task: Task) -> Step:
    """Return an optimizer step as one jitted program: (state, batch, index, control signals) → (state, metrics).

    The state is donated. Metrics are float32 scalars, except `consensus`, the reduced control signal, [3] int32.
    """
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


# --- Gradient ---------------------------------------------------------------------------------------------------------


def gradients(
    task: Task, trained: Params, frozen: Params, batch: Batch, index: Any, key: Array | None, num_microbatches: int
) -> tuple[Params, dict[str, Array]]:
    """Return the gradient of the mean loss, and the metrics.

    Args:
        task: has the loss.
        trained: parameters to differentiate by.
        frozen: all other parameters.
        batch: arrays [batch, …].
        index: index of a task that retrieves, else None.
        key: random key for dropout; None for none.
        num_microbatches: a divisor of the batch size.

    Returns:
        Gradients, a tree like `trained`, and metrics, scalars by name.
    """
    if num_microbatches == 1:
        gradient = jax.grad(
            lambda trained: loss_and_metrics(task, {**frozen, **trained}, batch, index, key), has_aux=True
        )
        return gradient(trained)
    microbatches = split(batch, num_microbatches)
    if task.contrast is None:
        grads, means = _summed_gradients(task, trained, frozen, microbatches, index, key)
    else:
        grads, means = _contrastive_gradients(task, trained, frozen, microbatches, key)
    return grads, metric_values(means)


def loss_and_metrics(
    task: Task, params: Params, batch: Batch, index: Any, key: Array | None
) -> tuple[Array, dict[str, Array]]:
    """Return the mean loss of a batch and its metrics, scalars by name. Arguments: see `gradients`."""
    values = metric_values(task.loss(params, batch, index, key))
    return values["loss"], values


def metric_values(means: Metrics) -> dict[str, Array]:
    """Return the values of means; a perplexity is the exponential of a mean."""
    values = {name: mean.mean for name, mean in means.items()}
    if LOG_PERPLEXITY in values:
        values["perplexity"] = jnp.exp(values.pop(LOG_PERPLEXITY))
    return values


def split(batch: Batch, parts: int) -> Batch:
    """Split arrays into microbatches: [batch, …] → [parts, batch / parts, …].

    Microbatch i has the examples whose number mod `parts` is i, so that no example moves to another device.

    Args:
        batch: a tree of arrays.
        parts: number of microbatches, a divisor of the batch size.
    """
    return jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)


def _microbatch_key(key: Array | None, number: Array) -> Array | None:
    """Return the dropout key of a microbatch, so that no two draw the same numbers."""
    return None if key is None else jax.random.fold_in(key, number)


def _summed_gradients(
    task: Task, trained: Params, frozen: Params, microbatches: Batch, index: Any, key: Array | None
) -> tuple[Params, Metrics]:
    """Return the gradient of the mean loss and the means, added up by microbatch."""

    def total(trained: Params, part: Batch, number: Array) -> tuple[Array, Metrics]:
        means = task.loss({**frozen, **trained}, part, index, _microbatch_key(key, number))
        return means["loss"].total, means

    def add(sums: Params, entry: tuple[Array, Batch]) -> tuple[Params, Metrics]:
        number, part = entry
        (_, means), grads = jax.value_and_grad(total, has_aux=True)(trained, part, number)
        return jax.tree.map(jnp.add, sums, grads), means

    zeros = jax.tree.map(jnp.zeros_like, trained)
    grads, means = jax.lax.scan(add, zeros, (jnp.arange(_num_microbatches(microbatches)), microbatches))
    means = jax.tree.map(lambda sums: sums.sum(axis=0), means)  # [parts] → []
    count = jnp.maximum(means["loss"].weight, 1.0)
    return jax.tree.map(lambda gradient: gradient / count, grads), means


def _contrastive_gradients(
    task: Task, trained: Params, frozen: Params, microbatches: Batch, key: Array | None
) -> tuple[Params, Metrics]:
    """Return the gradient of a loss that compares all examples of a batch, and the means, in two passes."""
    assert task.contrast is not None
    encode, null, contrast = task.contrast

    def vectors(trained: Params, number: Array, part: Batch) -> Any:
        return encode({**frozen, **trained}, part, _microbatch_key(key, number))

    def loss(vectors: Any, trained: Params) -> tuple[Array, Metrics]:
        means = contrast(vectors, null({**frozen, **trained}, key))
        return means["loss"].mean, means

    numbers = jnp.arange(_num_microbatches(microbatches))
    by_microbatch = jax.lax.map(lambda entry: vectors(trained, *entry), (numbers, microbatches))
    all_vectors = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), by_microbatch)  # undoes `split`
    (_, means), (cotangents, grads) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(all_vectors, trained)

    def add(grads: Params, entry: tuple[Array, Batch, Any]) -> tuple[Params, None]:
        number, part, cotangent = entry
        _, back = jax.vjp(lambda trained: vectors(trained, number, part), trained)
        return jax.tree.map(jnp.add, grads, back(cotangent)[0]), None

    grads, _ = jax.lax.scan(add, grads, (numbers, microbatches, split(cotangents, len(numbers))))
    return grads, means


def _num_microbatches(microbatches: Batch) -> int:
    return len(next(iter(microbatches.values())))
