"""The one exception for mistakes that the user can correct.

A `UserError` carries one line: what is wrong, where (file and line, or config key), and what to do.
The command line prints it and exits with code 2; no traceback is shown. Its subclasses, such as
`realm_jax.storage.StorageError`, are for callers that can do something about it.
"""

USER_ERROR = 2  # exit code
LESS_MEMORY = (  # which keys change what a step needs
    "--config.optimizer.microbatches=2 or more, --config.model.remat=dots or layer, --config.model.dtype=bfloat16, "
    "--config.mesh.fsdp=N, or more chips"
)


class UserError(Exception):
    """A user error in input, configuration or environment, described in one line."""


class Resumable(UserError):
    """Work that ended early and can be resumed: what is finished is kept."""
