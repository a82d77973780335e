"""The one exception for mistakes that the user can correct.

A `UserError` carries one line: what is wrong, where (file and line, or config key), and what to do.
The command line prints it and exits with code 2; no traceback is shown. Its subclasses, such as
`realm_jax.storage.StorageError`, are for callers that can do something about it.
"""

import errno
import os
import re

USER_ERROR = 2  # exit code
MACHINE_FAULT = 1  # exit code, as Python's own for what nobody expects: a job that ends with it is started again
FULL = {code: os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT)}  # of a disk, or of a user's share of it
_WROTE_LESS = re.compile(r"\d+ requested and \d+ written")
LESS_MEMORY = (  # which keys change what a step needs
    "--config.optimizer.microbatches=2 or more, --config.model.remat=dots or layer, --config.model.dtype=bfloat16, "
    "--config.mesh.fsdp=N, or more chips"
)


class UserError(Exception):
    """A user error in input, configuration or environment, described in one line."""


class Resumable(UserError):
    """Work that ended early and can be resumed: what is finished is kept."""


def full_disk(error: BaseException | None) -> str:
    """Return what the system says of a full disk or quota, if an error or what it came from is one; else ''.

    Libraries that are not written in Python have it in the text of errors of their own; NumPy only says that it wrote
    less than it was to write.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return FULL[error.errno]
        if isinstance(error, OSError) and error.errno is None and _WROTE_LESS.fullmatch(str(error)):
            return FULL[errno.ENOSPC]
        if not isinstance(error, UserError):
            for reason in FULL.values():
                if reason in str(error):
                    return reason
        error = error.__cause__ or error.__context__
    return ""
