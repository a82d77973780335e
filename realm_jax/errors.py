"""The one exception for mistakes that the user can correct.

A `UserError` carries one line: what is wrong, where (file and line, or config key), and what to do.
The command line prints it and exits with code 2; no traceback is shown. Its subclasses, such as
`realm_jax.storage.StorageError`, are for callers that can do something about it.
"""

USER_ERROR = 2  # exit code


class UserError(Exception):
    """A user error in input, configuration or environment, described in one line."""


class Resumable(UserError):
    """Work that ended early and can be resumed: what is finished is kept."""
