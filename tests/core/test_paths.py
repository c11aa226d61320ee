import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tenplexfs.core.paths import escape_component, name_of_path, path_of_name, unescape_component
from tenplexfs.errors import InvalidError

TEXT = st.text(
    st.one_of(st.sampled_from("./%\0hi0aä2E5F"), st.characters(exclude_categories=["Cs"])), max_size=20
)
LONG = st.tuples(TEXT, st.integers(0, 150), st.sampled_from("x.%äé漢\U0001f600/\0")).map(
    lambda t: t[0] + t[2] * t[1] + t[0]
)


@given(TEXT | LONG)
@example("")
@example("\0")
@example("\0\0")
@example("." * 66 + "x" * 50)
def test_component_is_a_file_name(text):
    component = escape_component(text)
    assert 0 < len(component.encode()) <= 240
    assert not re.search(r"[/\0.]", component)
    stripped = re.sub(r"%h[0-9a-f]{16}$", "", component)
    assert re.fullmatch(r"([^%]|%(25|2F|2E|00))*", stripped, re.DOTALL)
    if not re.search(r"[%./\0]", text) and text and len(text.encode()) <= 240:
        assert component == text


@given(TEXT)
@example("")
@example("\0")
@example("\0\0")
@example("%h0123456789abcdef")
@example("%i1")
def test_escaping_has_a_way_back(text):
    assert unescape_component(escape_component(text)) == text


@given(st.lists(TEXT | LONG, min_size=2, max_size=2, unique=True))
@example(["", "\0"])
@example(["%00", "\0"])
def test_escaping_is_injective(texts):
    assert escape_component(texts[0]) != escape_component(texts[1])


@given(st.lists(TEXT, min_size=2, max_size=2, unique=True))
@example([".", ""])
@example(["", "\0"])
def test_names_and_paths(names):
    paths = [path_of_name(name) for name in names]
    assert paths[0] != paths[1]
    assert [name_of_path(path) for path in paths] == names


def test_long_components_keep_their_first_200_bytes():
    assert escape_component("x" * 240) == "x" * 240
    component = escape_component("x" * 241)
    assert component.startswith("x" * 200 + "%h") and len(component) == 218
    assert escape_component("ä" * 121).startswith("ä" * 100 + "%h")
    assert escape_component("x" * 198 + "." * 20).startswith("x" * 198 + "%h")
    assert escape_component("x" * 197 + "." * 20).startswith("x" * 197 + "%2E%h")


def test_int_key_beside_its_digits():
    assert name_of_path("layers/%i1") == "layers.1"


@pytest.mark.parametrize("component", ["a.b", "%2f", "%41", "", "a%", "%h" + "0" * 16, "%i", "x" * 241])
def test_what_is_not_escaped_is_refused(component):
    with pytest.raises(InvalidError, match="path component"):
        unescape_component(component)


def test_lone_surrogate_is_refused():
    with pytest.raises(InvalidError, match="not valid Unicode"):
        path_of_name("a.\ud800")
