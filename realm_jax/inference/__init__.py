"""What a trained run says: answers, nearest passages, vectors, explanations, measurements, as values of JSON.

Not here: how a run is opened (`train/trained_run.py`), what commands print (`cli/`). `realm_jax.api` and the commands
share these functions.
"""
