"""A tensor drawn with text: every piece is where it belongs."""

from tenplexfs.core.region import Region
from tenplexfs.formats.blocks import pieces_text


def quarters(rows, columns):
    return [
        (Region((a, b), (a + rows // 2, b + columns // 2)), f"{a},{b}")
        for a in (0, rows // 2)
        for b in (0, columns // 2)
    ]


def test_pieces_share_their_edges():
    assert pieces_text((4, 8), quarters(4, 8), width=13, height=4).splitlines() == [
        "┌─────┬─────┐",
        "│ 0,0 │ 0,4 │",
        "├─────┼─────┤",
        "│ 2,0 │ 2,4 │",
        "└─────┴─────┘",
    ]


def test_one_dim_goes_across_and_long_words_are_cut():
    drawn = pieces_text((4,), [(Region((0,), (2,)), "ranks 0, 1"), (Region((2,), (4,)), "2")], width=15)
    assert drawn.splitlines() == ["┌──────┬──────┐", "│ranks…│  2   │", "└──────┴──────┘"]


def test_the_dims_that_are_cut_are_drawn():
    halves = [(Region((0, 0, a, 0), (3, 9, a + 2, 7)), str(a)) for a in (0, 2)]
    lines = pieces_text((3, 9, 4, 7), halves, width=9).splitlines()
    assert len(lines) == 5 or lines[0].count("┬") == 1


def test_scalars_and_empty_pieces_are_no_trouble():
    assert "0" in pieces_text((), [(Region((), ()), "0")], width=5)
    assert pieces_text((0,), [(Region((0,), (0,)), "0")], width=5).strip() == ""
