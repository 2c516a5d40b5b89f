"""Put a finished directory in the place of another, so that a reader sees the old one or the new one."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from probe_cli.manifest.files import sync_directory

__all__ = ["put_in_place"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def put_in_place(new: Path, target: Path) -> Path | None:
    """Rename `new` to `target`. If `target` exists it is exchanged, in one step where the system can, and the path
    that now holds the old content is returned. Raises OSError, with `target` as it was; interrupted when all is done, the old
    content is at `new`."""
    if not os.path.lexists(target):
        os.rename(new, target)
        sync_directory(target.parent)
        return None
    old = new
    if not _exchange(new, target):
        old = target.with_name(f".{target.name}.{os.urandom(4).hex()}.old")
        try:
            os.rename(target, old)
            os.rename(new, target)
        except BaseException:  # a signal between the two as well
            if os.path.lexists(old):
                # After both, what is old is where an exchange would have left it.
                os.rename(old, new if os.path.lexists(target) else target)
            raise
    sync_directory(target.parent)
    return old


def _exchange(one: Path, other: Path) -> bool:
    """Swap two paths in one step (Linux renameat2 with RENAME_EXCHANGE). False if system or file system cannot."""
    import ctypes  # slow to import, and only a replacement needs it

    with contextlib.suppress(AttributeError):
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
        result = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
        if result == 0:
            return True
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
            raise OSError(code, os.strerror(code), str(other))
    return False
