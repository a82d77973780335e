"""Names of `config.py`, until the imports are renamed."""

from realm_jax.config import *  # noqa: F403
from realm_jax.config import check as require  # noqa: F401
