"""The one place where an exception becomes an errno.

Whatever a handler of pyfuse3 raises other than `pyfuse3.FUSEError` ends the whole mount.
"""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from pyfuse3 import FUSEError

from tenplexfs.errors import TenplexError

__all__ = ["boundary"]

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def boundary(handler: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Returns ``handler`` such that it raises `FUSEError` only; trio's cancellation passes through."""

    @functools.wraps(handler)
    async def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await handler(*args, **kwargs)
        except FUSEError:
            raise
        except TenplexError as error:
            if error.errno == errno.EIO:
                log.warning("%s: %s", handler.__name__, error.message)
            raise FUSEError(error.errno) from None
        except Exception:
            log.exception("%s failed", handler.__name__)
            raise FUSEError(errno.EIO) from None

    guarded.is_boundary = True  # type: ignore[attr-defined]
    return guarded
