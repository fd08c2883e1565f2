"""All of a file into memory: out of the page cache where it is there, past it where not. Blocking calls for threads.

From a cold file a read past the cache is one copy less, and evicts nobody's pages; what is in the cache already is a
copy at memory's rate instead of the disk's. Which of the two a file is, is asked of the kernel, file by file. Kernels
take back a few pages of files that are in use: what lacks no more than that is as good as hot.
"""

import errno
import fcntl
import os
from enum import StrEnum
from typing import Final

from contracts.manifest import PAGE
from weightcache import libc

FEW: Final = 8  # one page in so many


class Way(StrEnum):
    """How a file's bytes came."""

    CACHED = "cached"  # out of the page cache, which held nearly all of it
    DIRECT = "direct"  # past the page cache
    BUFFERED = "buffered"  # through the page cache, as the file system refuses O_DIRECT


def fill(fd: int, into: memoryview, *, from_medium: bool = False) -> Way:
    """Fill `into` (page-aligned) with the beginning of the file, `from_medium` whatever the page cache has. Raises
    EOFError where the file ends before, which one that shrinks meanwhile does as well, and OSError.
    """
    if not from_medium and libc.missing_pages(fd, into.nbytes) * PAGE * FEW <= into.nbytes:
        _read(fd, into, 0)
        return Way.CACHED
    # A read past the cache is of whole pages; what follows them is read the other way.
    pages = into.nbytes // PAGE * PAGE
    done = _read_direct(fd, into[:pages])
    if done < into.nbytes:
        _read(fd, into, done)
    return Way.DIRECT if done else Way.BUFFERED


def _read(fd: int, into: memoryview, done: int) -> None:
    while done < into.nbytes:
        count = os.preadv(fd, [into[done:]], done)  # an interrupted one is repeated by the interpreter (PEP 475)
        if count == 0:
            raise EOFError
        done += count


def _read_direct(fd: int, into: memoryview) -> int:
    """How much was read until the file system refused, here or at once, or gave a part of a page."""
    done = 0
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        try:
            while done < into.nbytes and done % PAGE == 0:
                count = os.preadv(fd, [into[done:]], done)
                if count == 0:
                    raise EOFError
                done += count
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return done
