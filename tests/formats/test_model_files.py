"""How a model is spread over safetensors files."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplexfs.errors import CorruptError, InvalidError
from tenplexfs.formats.model_files import INDEX, SINGLE, files_of_index, lay_out_files

PATHS = st.lists(st.text("abc", min_size=1, max_size=2), min_size=1, max_size=3).map("/".join)
SIZES = st.dictionaries(PATHS, st.integers(0, 9), min_size=1, max_size=8)


@given(SIZES, st.integers(1, 20))
def test_every_tensor_stands_once_and_files_are_as_small_as_asked(sizes, most):
    tensors = {path: ("uint8", (size,)) for path, size in sizes.items()}
    files = lay_out_files(tensors, shard_bytes=most, metadata={"x": "y"})
    headers = {name: json.loads(layout.header[8:]) for name, layout in files.layouts.items()}
    found = [path for header in headers.values() for path in header if path != "__metadata__"]
    assert sorted(found) == sorted(path.replace("/", ".") for path in tensors)
    for name, layout in files.layouts.items():
        assert layout.size - len(layout.header) <= most or len(headers[name]) == 2
        assert headers[name]["__metadata__"]["format"] == "pt"
    if files.index is None:
        assert list(headers) == [SINGLE]
        assert headers[SINGLE]["__metadata__"]["x"] == "y"
        return
    index = json.loads(files.index)
    assert index["metadata"] == {"total_size": sum(sizes.values()), "x": "y"}
    assert {name: set(header) - {"__metadata__"} for name, header in headers.items()} == {
        name: {tensor for tensor, file in index["weight_map"].items() if file == name} for name in headers
    }
    assert files_of_index(files.index) == set(headers)
    assert [name.split("-")[1:] for name in headers] == [
        [f"{n:05d}", "of", f"{len(headers):05d}.safetensors"] for n in range(1, len(headers) + 1)
    ]


def test_what_has_no_name_or_type_is_refused():
    with pytest.raises(InvalidError, match="has no type complex128"):
        lay_out_files({"a": ("complex128", ())}, shard_bytes=None, metadata={})
    for text in (b"", b"{}", b'{"weight_map": []}', b"[]"):
        with pytest.raises(CorruptError, match="no index"):
            files_of_index(text)
    assert files_of_index(b'{"weight_map": {"a": "../x", "b": 3, "c": "y"}}') == {"y"}
    assert INDEX.startswith(SINGLE)
