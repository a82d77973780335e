"""The one exception for mistakes that the user can correct.

A `UserError` has a message of one line: the place (file and line, flag or config key), the fault and the remedy.
The command line prints it and exits with code 2; no traceback is shown. Its subclasses, such as
`realm_jax.storage.StorageError`, are for callers that can handle them.

A `TransientFault` is no mistake of the user, and may be over when the command runs again: storage that fails, a machine
or an index that is late. Its exit code is 74, after which every launch target restarts the job, and counts the failure.
"""

import errno
import os
import re

USER_ERROR = 2  # exit code
TRANSIENT_FAULT = 74  # exit code (EX_IOERR): the same command may succeed later, so the job is restarted
FULL = {code: os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT)}  # of a disk, or of a user's quota
_WROTE_LESS = re.compile(r"\d+ requested and \d+ written")
LESS_MEMORY = (  # which keys change what a step needs
    "--config.optimizer.microbatches=2 or more, --config.model.remat=dots or layer, --config.model.dtype=bfloat16, "
    "--config.mesh.fsdp=N, or more chips"
)


class UserError(Exception):
    """A user error in input, configuration or environment, described in one line."""


class TransientFault(UserError):
    """A fault of storage, of a machine or of another process, which may be over when the command runs again."""


class Resumable(UserError):
    """Work that ended early and can be resumed: its finished part is saved."""


def install_extra(name: str) -> str:
    """Return the advice to install an extra of `setup.cfg`, such as `documents`."""
    return f"run `pip install -e '.[{name}]'` in your clone of realm_jax"


def full_disk(error: BaseException | None) -> str:
    """Return the system's message for a full disk or quota, if an error or one of its causes is such an error; else ''.

    Libraries that are not written in Python have it in the text of their own errors; NumPy only says that it wrote
    fewer bytes than requested.
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


def user_message(error: Exception) -> str:
    """Return the message for the user, empty for a defect."""
    if isinstance(error, UserError):
        advice = "; make room there, then run the command again"
        return f"{error}{advice}" if full_disk(error) and ";" not in str(error) else str(error)
    message = " ".join(str(error).split())
    file = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
    if full := full_disk(error):
        cause = "" if isinstance(error, OSError) else f" ({message[:300]})"
        return f"{file}{full}{cause}; make room there, then run the command again: saved files are complete"
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return f"{file}{error.strerror}; name a folder that can be written to"
    # JAX initializes its devices when they are first used, so this may come from any command.
    if isinstance(error, RuntimeError) and message.startswith("Unable to initialize backend"):
        return f"JAX does not start: {message}; `realm doctor` shows the devices and settings"
    if isinstance(error, RuntimeError) and message.startswith("RESOURCE_EXHAUSTED"):
        request = message.rstrip(".")
        return f"a device has too little memory ({request}); a step needs less with {LESS_MEMORY}; saved steps are kept"
    return ""
