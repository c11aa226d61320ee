from tenplexfs.formats.lineage import branch_off, is_past_of, with_past_of
from tenplexfs.formats.requests import without_requests


def past(settings, steps):
    return [step for step in steps if is_past_of(settings, *step)]


def test_a_job_leaves_steps_behind_and_goes_on_from_others():
    first = b'{"keep_steps": 2}'
    steps = [(1, 10), (1, 20), (1, 30), (2, 25), (2, 40), (3, 15)]
    assert past(first, steps) == steps
    back = branch_off(first, 2, 1, 20)
    assert past(back, steps) == [(1, 10), (1, 20), (2, 25), (2, 40), (3, 15)]
    again = branch_off(back, 3, 1, 10)
    assert past(again, steps) == [(1, 10), (3, 15)]
    later = branch_off(back, 3, 2, 25)
    assert past(later, steps) == [(1, 10), (1, 20), (2, 25), (3, 15)]
    outside = branch_off(later, 4, 0, None)
    assert past(outside, steps) == []
    # an import was a mistake: with the state comes its past
    assert past(branch_off(with_past_of(outside, back), 5, 2, 25), steps) == [(1, 10), (1, 20), (2, 25)]
    assert without_requests(outside) == first
    assert with_past_of(outside, first) == first
