"""What the errors of object stores mean, for all that read or write there."""

from __future__ import annotations

import re

from obstore.exceptions import NotSupportedError, PermissionDeniedError, UnauthenticatedError

__all__ = ["error_line", "is_final"]

_FINAL = (PermissionDeniedError, UnauthenticatedError, NotSupportedError, ValueError)
# "builder error": no request can be made, of an endpoint with http:// that was not allowed for one.
_FINAL_STATUS = re.compile(r"status code: 4(?!08|29)\d\d|builder error")


def is_final(error: Exception) -> bool:
    """Returns whether asking again cannot help."""
    return isinstance(error, _FINAL) or _FINAL_STATUS.search(str(error)) is not None


def error_line(error: Exception) -> str:
    """Returns what it says, in one line."""
    return str(error).strip().split("\n", 1)[0][:300]
