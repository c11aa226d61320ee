"""Tensor paths: how the keys of a state dict become names of files, and back.

A path is components joined by ``/``. A component is the text of a key part, escaped so that it is a file name
on every Linux file system; the escaping is injective and leaves plain names as they are.
"""

from __future__ import annotations

import hashlib
import re

from tenplexfs.errors import InvalidError

__all__ = ["escape_component", "name_of_path", "path_of_name", "unescape_component"]

_LONGEST_BYTES = 240
_KEPT_BYTES = 200
_SPECIAL = re.compile(r"[%/.\0]")
_ESCAPE = re.compile(r"%(25|2F|2E|00)")
_HASHED = re.compile(r".*%h[0-9a-f]{16}", re.DOTALL)
_INT = re.compile(r"%i(-?[0-9]+)")


def escape_component(text: str) -> str:
    r"""Returns ``text`` as one component of a path; no dot of it separates.

    ``%``, ``/``, ``.`` and NUL become ``%XX``. NULs alone get one more, so that ``%00`` alone is the empty
    text. What is longer than 240 bytes becomes its first 200 (or up to 3 fewer, never a part of a character
    or an escape), ``%h`` and 16 hex digits of the hash of the whole.

    >>> escape_component("weight"), escape_component("a/b.c"), escape_component(""), escape_component("..")
    ('weight', 'a%2Fb%2Ec', '%00', '%2E%2E')

    Raises:
        InvalidError: The text is no valid Unicode.
    """
    escaped = _SPECIAL.sub(lambda match: f"%{ord(match[0]):02X}", text)
    if not text.strip("\0"):
        escaped += "%00"
    try:
        encoded = escaped.encode()
    except UnicodeEncodeError as error:
        raise InvalidError(f"key {text!r}: not valid Unicode: {error.reason}") from error
    if len(encoded) <= _LONGEST_BYTES:
        return escaped
    head = encoded[:_KEPT_BYTES].decode(errors="ignore")
    if (cut := head.rfind("%", -2)) >= 0:  # an escape was cut through
        head = head[:cut]
    return f"{head}%h{hashlib.blake2b(encoded, digest_size=8).hexdigest()}"


def unescape_component(component: str) -> str:
    """Returns the text that `escape_component` made ``component`` of, and the digits of a marked int key.

    Raises:
        InvalidError: It is none that `escape_component` gives, or holds the hash of a longer one.
    """
    if _HASHED.fullmatch(component):
        raise InvalidError(f"path component {component!r}: its text was too long to be kept in a path")
    if marked := _INT.fullmatch(component):
        return marked[1]
    text = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), component)
    if text and not text.strip("\0"):
        text = text[1:]
    if escape_component(text) != component:
        raise InvalidError(
            f"path component {component!r}: not escaped as a path is, e.g. {escape_component(text)!r}"
        )
    return text


def path_of_name(name: str) -> str:
    """Returns the path of a name whose dots separate, as in a state dict or a safetensors file; injective.

    A name that is nothing but dots is one component.

    >>> path_of_name("layers.0.weight"), path_of_name("a..b"), path_of_name(".")
    ('layers/0/weight', 'a/%00/b', '%2E')

    Raises:
        InvalidError: The name is no valid Unicode.
    """
    if name and not name.strip("."):
        return escape_component(name)
    return "/".join(map(escape_component, name.split(".")))


def name_of_path(path: str) -> str:
    """Returns the name with dots for ``path``, which `path_of_name` turns back if no component holds a dot.

    >>> name_of_path("layers/0/weight")
    'layers.0.weight'

    Raises:
        InvalidError: A component is not escaped, or was too long to be kept.
    """
    return ".".join(map(unescape_component, path.split("/")))
