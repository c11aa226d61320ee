from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from tenplexfs.core.parallelizers import Answer, Auto, Command, Committed, Proposal, Table
from tenplexfs.errors import InvalidError, TenplexError
from tenplexfs.formats.parallelizer_json import parse_answer, parse_parallelizer, resources_text
from tests.fuzz.mutations import json_values, mutated

MODEL = {"layers": 24, "hidden": 2048, "heads": 16, "vocab": 50257}
TABLE = {"kind": "table", "rows": {"16": {"mp_size": 2, "pp_size": 4, "dp_size": 2}, "4": {"tp": 2, "dp": 2}}}
AUTO = {"kind": "auto", "model": MODEL, "global_batch": 64, "inter_node": "100Gbit/s", "axes": {"tp": "t"}}
COMMAND = {"kind": "command", "argv": ["/usr/bin/alpa", "--fast"], "timeout_s": 5}


def test_tables_of_tenplex_and_of_ours():
    assert parse_parallelizer(TABLE) == Table({16: {"tp": 2, "pp": 4, "dp": 2}, 4: {"tp": 2, "dp": 2}})
    by_size = {"kind": "table", "rows": {"16": {"size": 16, "pp_size": 4, "mp_size": 2}}}
    assert parse_parallelizer(by_size) == Table({16: {"tp": 2, "pp": 4, "dp": 2}})


def test_the_other_kinds():
    assert parse_parallelizer(COMMAND) == Command(("/usr/bin/alpa", "--fast"), 5)
    auto = parse_parallelizer(AUTO)
    assert isinstance(auto, Auto)
    assert auto.devices.inter_node_bytes_per_s == 12.5e9
    assert (auto.model.ffn, auto.model.kv_heads) == (8192, 16)
    assert auto.training_of(Committed({}, 8)).global_batch == 64
    named = parse_parallelizer({"kind": "auto", "model": "gpt3-6.7b"})
    assert isinstance(named, Auto) and named.model.layers == 32


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("auto", 'need an object with "kind", one of table, command, auto'),
        ({"kind": "alpa"}, 'need an object with "kind"'),
        ({"kind": "table", "rows": {}}, "rows: need 1 to 10000, got 0"),
        ({"kind": "table", "rows": {"x": {"tp": 1}}}, "row 'x': need a number of devices"),
        ({"kind": "table", "rows": {"4": {"tp": 3}}}, "row '4': its degrees {'tp': 3} give 3 ranks"),
        ({"kind": "table", "rows": {"4": {"mp_size": 2}}}, "give 2 ranks"),
        ({"kind": "table", "rows": {"4": {"mp_size": 2, "tp": 2}}}, "'tp' beside mp_size"),
        ({"kind": "table", "rows": {"4": {"tp": 0}}}, "tp: need a whole number from 1 to 131072, got 0"),
        ({"kind": "table", "rows": {"8": {"size": 8, "mp_size": 3}}}, "size 8 is not that of {'tp': 3}"),
        ({"kind": "table", "file": "x"}, "unknown field 'file'"),
        ({"kind": "command", "argv": ["alpa"]}, "need the absolute path of a program first"),
        ({"kind": "command", "argv": ["/a"], "timeout_s": 0}, "timeout_s: need > 0"),
        ({"kind": "auto", "model": "gpt9"}, "model 'gpt9': need one of bert-large"),
        ({"kind": "auto", "model": "mixtral-8x7b"}, "model 'mixtral-8x7b': need one of"),
        ({"kind": "auto", "model": {**MODEL, "heads": 7}}, "heads 7 do not divide hidden 2048"),
        ({"kind": "auto", "model": {**MODEL, "layers": 0}}, "layers: need a whole number from 1"),
        ({**AUTO, "axes": {"tp": "pp"}}, "axes: need a name of its own"),
        ({**AUTO, "inter_node": "fast"}, "bandwidth 'fast'"),
        ({**AUTO, "flops": 1}, "unknown field `flops`"),
        ({**AUTO, "micro_batch": 3}, "micro_batch 3 does not divide the global batch 64"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(setting, message):
    with pytest.raises(InvalidError) as caught:
        parse_parallelizer(setting)
    assert message.replace("`", "'") in caught.value.message
    assert caught.value.message.startswith("setting 'parallelizer': ")


@settings(max_examples=200, deadline=None)
@given(mutated([TABLE, AUTO, COMMAND]))
def test_settings_with_something_wrong(setting):
    try:
        parse_parallelizer(setting)
    except TenplexError as error:
        assert "\n" not in error.message


def test_what_programs_answer():
    layout = b'{"format": "tenplexfs-layout", "version": 1}'
    assert parse_answer(layout) == Answer((Proposal({}, (), layout),))
    assert parse_answer(b'{"mesh": {"tp": 2}, "keep_together": ["tp"]}') == Answer(
        (Proposal({"tp": 2}, ("tp",)),)
    )
    assert parse_answer(b'{"mp_size": 2, "dp_size": 3}') == Answer((Proposal({"tp": 2, "dp": 3}),))
    assert parse_answer(b'{"tp": 2}') == Answer((Proposal({"tp": 2}),))
    assert parse_answer(b'{"pause": "too few"}') == Answer((), "too few")
    assert parse_answer(b'{"pause": "too\\n  few"}') == Answer((), "too few")
    for wrong in (b"", b"{}", b"3", b'{"mesh": {"tp": 0}}', b'{"mesh": null}', b"[" * 100_000):
        with pytest.raises(InvalidError, match="its answer"):
            parse_answer(wrong)


@given(json_values)
def test_other_answers(value):
    try:
        parse_answer(json.dumps(value).encode())
    except TenplexError as error:
        assert "\n" not in error.message


def test_what_programs_are_told():
    told = json.loads(resources_text("gpt", Committed({"tp": 2}, 8), b'{"mesh": {}}', {"a": 2, "b": 1}, 7))
    assert told == {
        "format": "tenplexfs-resources",
        "version": 1,
        "job": "gpt",
        "step": 7,
        "nodes": {"a": 2, "b": 1},
        "devices": 3,
        "mesh": {"tp": 2},
        "global_batch": 8,
        "layout": {"mesh": {}},
    }
