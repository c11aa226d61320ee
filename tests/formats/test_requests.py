from tenplexfs.formats.requests import add_request, has_request, request_key, without_requests


def test_the_newest_requests_of_a_job_are_known():
    keys = [request_key("job", f"r{n}") for n in range(100)]
    settings = b'{"keep_steps": 2}'
    for key in keys:
        settings = add_request(settings, key)
    assert [has_request(settings, key) for key in keys] == [False] * 36 + [True] * 64
    assert without_requests(settings) == b'{"keep_steps": 2}'


def test_a_request_without_an_id_is_never_known():
    key = request_key("job", "")
    assert add_request(b"", key) == b""
    assert not has_request(b'{"requests": [""]}', key)
    assert request_key("a", "r") != request_key("b", "r")
