"""realm_jax: train language models that retrieve before they predict (REALM, Guu et al. 2020).

Start reading at `realm_jax/cli/quickstart.py` (the whole recipe) and `realm_jax/train/loop.py` (the train loop).
"""

__version__ = "0.1.0"
