"""The page of a plan is well formed, needs nothing else, lets nobody in, and stays small."""

import json
import re
from html.parser import HTMLParser

import pytest

from tenplexfs.core.build import build_ptc
from tenplexfs.core.planner import plan
from tenplexfs.core.presets import preset_layout
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.formats.plan_html import plan_html

VOID = {"meta", "br", "hr", "link", "img", "input"}


class Page(HTMLParser):
    """Checks that tags close in order, and collects what is asked about."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


def preset(name, **sizes):
    return build_ptc(parse_layout(json.dumps(preset_layout(name, **sizes))))


def small(nodes=("a", "b"), mesh=None, key="w", axis="tp", **entry):
    mesh = mesh or {axis: 4}
    tensors = {key: {"shape": [8, 6], "dtype": "float32", "shard": [{"axis": axis, "dim": 0}], **entry}}
    document = {"format": "tenplexfs-layout", "version": 1, "mesh": mesh, "tensors": tensors}
    size = 1
    for n in mesh.values():
        size *= n
    ranks = {node: list(range(size))[k :: len(nodes)] for k, node in enumerate(nodes)}
    return build_ptc(parse_layout(json.dumps({**document, "nodes": ranks})))


def check_alone(text, page):
    """Nothing is loaded and nothing runs."""
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {"src", "href", "xlink:href"} & names
    assert not [name for name in names if name.startswith("on")]
    assert "@import" not in text
    assert set(re.findall(r"url\((.*?)\)", text)) <= {"#hatch"}
    assert "http" not in text


def test_the_page_tells_the_plan_for_sixteen_ranks():
    four = ["node0", "node1", "node2", "node3"]
    made = plan(
        preset("llama3-8b", tp=4, pp=2, dp=2, nodes=four, optimizer="adam", zero=True),
        preset("llama3-8b", tp=4, pp=1, dp=3, nodes=[*four[:2], "node3"], optimizer="adam", zero=True),
    )
    text = plan_html(made, title="loses node2")
    page = Page(text)
    check_alone(text, page)
    for word in (
        "loses node2",
        "(16 ranks on 4 nodes)",
        "74.8 GiB",
        "8-11 → none",
        "Gbit/s",
    ):
        assert word in page.text, word
    assert page.tags.count("option") == len(re.findall(r'class="cut" id="cut\d+"', text)) > 5
    assert "prefers-color-scheme:dark" in text


def test_names_from_outside_are_text():
    evil = "a<script>alert(1)</script>/\"onload='x'&amp;"
    axis = '<b onclick="x">'
    pair = (small(key=evil, axis=axis), small(key=evil, axis=axis, nodes=("b", "c")))
    text = plan_html(plan(*pair), title=f"</title>{evil}")
    page = Page(text)
    check_alone(text, page)
    assert "alert(1)" in page.text
    assert '<b onclick="x">' in page.text


@pytest.mark.parametrize("size", [1024, 16384])
def test_thousands_of_ranks_make_a_small_page(size):
    nodes = [f"gpu-{n:04}" for n in range(size // 8)]
    dp = size // 64
    made = plan(
        preset("gpt3-175b", tp=8, pp=8, dp=dp, nodes=nodes, optimizer="adam", zero=True),
        preset("gpt3-175b", tp=4, pp=16, dp=dp, nodes=nodes, optimizer="adam", zero=True),
    )
    text = plan_html(made, title="large")
    check_alone(text, Page(text))
    assert len(text) < 1_000_000


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [], "shard": []},
        {"shape": [0, 6], "shard": []},
        {"shape": [8], "shard": [{"axis": "tp", "dim": 0, "pad_to": 12}]},
        {"shape": [2, 4, 8, 4], "shard": [{"axis": "tp", "dim": 2}]},
        {"shape": [5, 3], "shard": [{"axis": "tp", "flat": True}]},
    ],
)
def test_every_kind_of_tensor_can_be_drawn(change):
    whole = {**change, "shard": []}
    for pair in ((small(**change), small(**whole)), (small(**whole), small(**change, nodes=("c",)))):
        Page(plan_html(plan(*pair), title="t"))


def test_a_plan_that_moves_nothing_says_so():
    page = Page(plan_html(plan(small(), small()), title="t"))
    assert "Nothing crosses the network." in page.text
