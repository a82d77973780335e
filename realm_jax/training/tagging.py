"""How a tagger is trained: its loss, and its course through the same loop as REALM's tasks.

Read `tagger_loss`, then `train_tagger`; the loop is `loop.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp

from realm_jax.data.tagged import tagger_examples
from realm_jax.models.likelihood import Mean
from realm_jax.models.tagger import Params, Tagger
from realm_jax.tagger_config import TAGGER
from realm_jax.tagger_run import TaggerRun
from realm_jax.text.tags import IGNORED, Cutter
from realm_jax.training.flops import Tower, peak
from realm_jax.training.loop import Course, Measure, train_loop
from realm_jax.training.metrics import Work
from realm_jax.training.refresh import IndexSource
from realm_jax.training.tasks import Batch, Means, Task

Array = jax.Array


def tagger_loss(tagger: Tagger, params: Params, batch: Batch, index: None, key: Array | None) -> Means:
    """Cross-entropy of the labels of first pieces; the mean over them."""
    log_p = tagger.scores(params, batch["ids"], batch["length"], batch["shapes"], key)
    wanted = batch["labels"].astype(jnp.int32)
    weights = (wanted != IGNORED).astype(jnp.float32)
    found = jnp.take_along_axis(log_p, jnp.maximum(wanted, 0)[..., None], axis=-1)[..., 0]
    right = found >= log_p.max(axis=-1)
    count = weights.sum()
    return {"loss": Mean(-(found * weights).sum(), count), "accuracy": Mean((right * weights).sum(), count)}


def tagger_task(tagger: Tagger) -> Task:
    """Everything is trained, nothing retrieved."""
    return Task(TAGGER, (TAGGER,), partial(tagger_loss, tagger), retrieves=False)


def train_tagger(run: TaggerRun, params: Params, measure: Measure) -> Params:
    """Train to the last step, or on from the newest checkpoint; returns the parameters. Raises as `train_task` does."""
    cutter, data = Cutter(run.wordpiece), run.config.data
    course = Course(
        tagger_task(run.tagger),
        lambda params: tagger_examples(run.splits["train"], cutter, run.tagger.kinds, data.length, data.hidden),
        work_of(run),
        lambda *_: IndexSource(),
        measure=measure,
        every=run.config.evaluation.every,
    )
    return train_loop(run, course, params, run.workdir / TAGGER)


def work_of(run: TaggerRun) -> Work:
    """What a step is to the devices, for the records."""
    model, length, batch = run.config.model, run.config.data.length, run.config.tagger.batch_size
    labels = 2.0 * length * model.width * (2 * len(run.tagger.kinds) + 1)
    forward = Tower(model.layers, model.width, model.feed_forward).forward(length) + labels
    return Work(3 * batch * forward, run.mesh.size, peak(run.mesh.devices.flat[0].device_kind))
