import pytest

from tenplexfs.errors import InvalidError
from tenplexfs.formats.requests import Request, add_request, has_request, without_requests


def test_the_newest_requests_of_a_job_are_known():
    requests = [Request("job", f"r{n}") for n in range(100)]
    settings = b'{"keep_steps": 2}'
    for request in requests:
        settings = add_request(settings, request)
    assert [has_request(settings, each) for each in requests] == [False] * 36 + [True] * 64
    assert without_requests(settings) == b'{"keep_steps": 2}'


def test_a_request_without_an_id_is_never_known():
    request = Request("job", "")
    assert add_request(b"", request) == b""
    assert not has_request(b'{"requests": [""]}', request)
    assert Request("a", "r").key != Request("b", "r").key


def test_an_id_that_is_used_again_for_something_else_is_refused_by_name():
    settings = add_request(b"{}", Request("gpt", "r1", b"dp=4"))
    assert has_request(settings, Request("gpt", "r1", b"dp=4"))
    with pytest.raises(
        InvalidError, match="job gpt: request 'r1' was made before and asked for something else"
    ):
        has_request(settings, Request("gpt", "r1", b"dp=2"))
    assert not has_request(settings, Request("gpt", "r2", b"dp=2"))


def test_requests_of_before_there_were_arguments_are_known():
    key = Request("gpt", "r1").key
    assert has_request(b'{"requests": ["%s"]}' % key.encode(), Request("gpt", "r1", b"dp=2"))
