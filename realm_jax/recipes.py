"""Names of `config.py`, until the imports are renamed."""

from realm_jax.config import *  # noqa: F403
