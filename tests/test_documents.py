"""What the documents say is so."""

from __future__ import annotations

import errno
import json
import re
import subprocess
from pathlib import Path

import msgspec
import pytest

import tenplexfs.errors
from tenplexfs.core.build import build_ptc
from tenplexfs.core.planner import plan
from tenplexfs.errors import TenplexError
from tenplexfs.formats.layout_json import parse_layout
from tenplexfs.formats.parallelizer_json import _Auto, parse_parallelizer

ROOT = Path(__file__).parents[1]


def json_blocks(document):
    return re.findall(r"```json\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


@pytest.mark.parametrize("document", ["README.md", "docs/architecture.md", "docs/layouts.md"])
def test_every_layout_of_the_documents_is_valid(document):
    layouts = [
        block for block in json_blocks(document) if json.loads(block).get("format") == "tenplexfs-layout"
    ]
    assert layouts
    for layout in layouts:
        build_ptc(parse_layout(layout))


def test_ranks_hold_what_the_page_of_layouts_says():
    text = (ROOT / "docs/layouts.md").read_text()
    examples = re.findall(r"```json\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)
    assert len(examples) == text.count("```json")
    for layout, shown in examples:
        ptc = build_ptc(parse_layout(layout))
        held = [(rank, path) for rank in ptc.ranks() for path in ptc.rank_paths(rank)]
        assert shown.splitlines() == [held_line(ptc, rank, path) for rank, path in held]


def held_line(ptc, rank, path):
    shard = ptc.shard(rank, path)
    pieces = " ".join(str(piece.region) for piece in shard.pieces) or "nothing"
    padding = f" and padding {' '.join(map(str, shard.padding))}" if shard.padding else ""
    return f"rank {rank}  {path}  {list(shard.local_shape)}  {pieces}{padding}"


def test_the_worked_example_costs_what_it_says():
    old, new = (build_ptc(parse_layout(block)) for block in json_blocks("docs/architecture.md"))
    summary = plan(old, new).summary()
    wanted = {"needed": 64, "kept": 0, "local": 32, "moved": 32, "moved_lower_bound": 32, "padding": 0}
    assert summary["bytes"] == wanted
    assert summary["operations"] == {"split": 2, "move": 2, "merge": 2}


def test_the_table_of_errors_is_that_of_the_code():
    text = (ROOT / "docs/architecture.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \| (\w+) \| (\w+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE))
    kinds = [kind for kind in vars(tenplexfs.errors).values() if isinstance(kind, type)]
    assert rows == {
        (
            kind.__name__,
            errno.errorcode[kind.errno],
            kind.code,
            str(kind.exit_status),
            str(kind.http_status),
        )
        for kind in kinds
        if issubclass(kind, TenplexError) and kind is not TenplexError
    }


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


@pytest.mark.parametrize("document", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_every_script_of_the_documents_parses(document):
    text = (ROOT / "docs" / document).read_text()
    for script in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, capture_output=True)
    assert document != "scheduling.md" or text.count("```bash") == 3


def test_every_setting_of_a_parallelizer_in_the_documents_is_valid():
    blocks = [json.loads(block) for block in json_blocks("docs/scheduling.md")]
    settings = [block for block in blocks if "kind" in block]
    assert {each["kind"] for each in settings} == {"table", "command", "auto"}
    for each in settings:
        parse_parallelizer(each)


def test_the_documents_name_every_setting_of_auto():
    text = (ROOT / "docs/scheduling.md").read_text()
    names = {
        field
        for row in re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
        for field in re.findall(r"`(\w+)`", row)
    }
    assert {field.name for field in msgspec.structs.fields(_Auto)} - {"kind"} <= names
