"""The training state (`State`), sharded over the mesh, and the step as one jitted program.

Read next: `loop.py`, which drives it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from realm_jax.mesh import replicated
from realm_jax.models.realm import Params
from realm_jax.retrieval.search import Index
from realm_jax.run import BaseRun
from realm_jax.tasks.base import Task
from realm_jax.train.gradients import gradients
from realm_jax.train.optimizer import FRESH_HEADS, RateScales, make_optimizer, zero_frozen_gradients


class State(NamedTuple):
    """The training state. step: int32 scalar; frozen: parameters that this task does not train."""

    step: jax.Array
    trained: Params
    frozen: Params
    optimizer: Any

    @property
    def params(self) -> Params:
        return {**self.frozen, **self.trained}


def task_optimizer(config: ConfigDict, task: Task) -> Any:
    """The optimiser of a task, from its section of the config."""
    c, short = config[task.name], is_short(config)
    warmup = config.optimizer.warmup or (task.short.warmup if short else 0)
    return make_optimizer(c.learning_rate, c.steps, warmup, task.retriever_delay, task_rates(config, task), short)


def is_short(config: ConfigDict) -> bool:
    """Whether the optimizer is the preset of short runs from pretrained weights. A tagger's config has no presets."""
    return bool(config.optimizer.get("preset") == "short")


def task_rates(config: ConfigDict, task: Task) -> RateScales:
    """The rates of the parts of the model, as multiples of the task's learning rate."""
    return RateScales(task.short.retriever, heads=FRESH_HEADS, words=False) if is_short(config) else RateScales()


def start_state(run: BaseRun, task: Task, params: Params) -> State:
    """A task's state at step 0, sharded. The parameters are donated, as a step donates its state."""
    optimizer = task_optimizer(run.config, task)
    trained = {name: params[name] for name in task.trained}
    frozen = {name: value for name, value in params.items() if name not in task.trained}
    shardings = state_shardings(run, task)

    def build(trained: Params, frozen: Params) -> State:
        return State(jnp.zeros((), jnp.int32), trained, frozen, optimizer.init(trained))

    return jax.jit(build, donate_argnums=(0, 1), out_shardings=shardings)(trained, frozen)


def state_shardings(run: BaseRun, task: Task) -> Any:
    """Where every array of a task's state lives; moments live where their parameters do. A `State` of shardings."""
    import optax  # here, as in `optimizer.py`

    everywhere = replicated(run.mesh)
    trained = {name: run.param_shardings[name] for name in task.trained}
    frozen = {name: value for name, value in run.param_shardings.items() if name not in task.trained}
    optimizer = task_optimizer(run.config, task)
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


class ControlWords(NamedTuple):
    """The control words that processes exchange in every step, and receive two steps later.

    word: for the generation that is loaded, −1 for none; consensus: that of all processes, −1 where they differ.
    step: its export step, −1 for none; consensus: the newest that any of them has.
    stop: 1 if the process was asked to stop; consensus: 1 if any was.
    """

    word: int = -1
    step: int = -1
    stop: int = 0


def put_control(mesh: Mesh, said: ControlWords) -> jax.Array:
    """The control words of this process, int32 [devices, 3]. The step reduces them.

    Decisions that all processes must take at the same step travel this way, inside the step, so that no host ever waits
    for another.
    """
    places = control_sharding(mesh)
    return jax.make_array_from_callback((mesh.size, len(said)), places, lambda part: np.array([said], np.int32))


def control_sharding(mesh: Mesh) -> NamedSharding:
    """A row on every device."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names, None))


def reduce_control(control: jax.Array) -> jax.Array:
    """The reduced control words: a `ControlWords` as int32 [3]."""
    words, steps, stops = control.T
    return jnp.stack([jnp.where(words.min() == words.max(), words.min(), -1), steps.max(), stops.max()])


def make_step(run: BaseRun, task: Task) -> Step:
    """One optimiser step as one jitted program; the state is donated. Metric `consensus`: the reduced control words."""
    import optax

    optimizer = task_optimizer(run.config, task)
    seed, parts = run.config.seed, run.config.optimizer.microbatches if task.is_parted else 1
    dropout, rates = run.model.bert.dropout > 0, task_rates(run.config, task)

    def step(state: State, batch: Any, index: Index | None, control: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), task.stream), state.step) if dropout else None

        grads, metrics = gradients(task, state.trained, state.frozen, batch, index, key, parts)
        grads = zero_frozen_gradients(grads, rates)
        updates, moments = optimizer.update(grads, state.optimizer, state.trained)
        trained = optax.apply_updates(state.trained, updates)
        metrics["gradient_norm"] = optax.tree.norm(grads)
        metrics["consensus"] = reduce_control(control)
        return State(state.step + 1, trained, state.frozen, moments), metrics

    shardings = state_shardings(run, task)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated(run.mesh)))
