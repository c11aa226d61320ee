"""What is refused, and that it changes nothing."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.http.jobs import ONE

pytestmark = [pytest.mark.cluster, pytest.mark.mount]


@pytest.mark.parametrize(
    ("method", "target", "kind", "body", "status"),
    [
        ("GET", "/nothing", "", "", 404),
        ("POST", "/query?path=/job/JOB/iter", "", "", 405),
        ("GET", "/upload?path=x", "", "", 405),
        ("PUT", "/upload?path=x", "", "x", 405),
        ("POST", "/delete?path=/job/JOB/save/0", "", "", 405),
        ("DELETE", "/peers", "", "", 405),
        ("GET", "/query", "", "", 400),
        ("GET", "/query?path=/job/nosuch/iter", "", "", 404),
        ("GET", "/query?path=/job/nosuch/load/0", "x-dir", "", 404),
        ("GET", "/query?path=/job/.x/load/0", "x-dir", "", 400),
        ("GET", "/query?path=/etc/passwd", "", "", 404),
        ("GET", "/query?path=/job/JOB/load/0/../../x", "", "", 400),
        ("GET", "/query?path=/job/JOB/load/7/w", "", "", 404),
        ("GET", "/query?path=/job/JOB/load/0/w", "", "", 404),
        ("GET", "/query?path=/job/JOB/load/0/optimizer", "", "", 404),
        ("GET", "/query?path=/job/JOB/load/0", "", "", 404),
        ("GET", "/query?path=/job/JOB/load/0/nothing", "x-dir", "", 404),
        ("GET", "/query?path=/job/JOB/save/0/big.numpy.ndarray", "x-tensor", "", 404),
        ("GET", "/query?path=/job/JOB/load/0/iteration", "x-tensor", "", 400),
        ("GET", "/query?path=/job/JOB/load/0/big&range=0:9999", "x-tensor", "", 400),
        ("GET", "/query?path=/job/JOB/load/0/big&range=3:2", "x-tensor", "", 400),
        ("GET", "/query?path=/job/JOB/load/0/big&range=:,:,:", "x-tensor", "", 400),
        ("GET", "/query?path=/job/JOB/load/0/big&range=x", "x-tensor", "", 400),
        ("POST", "/upload", "", "x", 400),
        ("POST", "/upload?path=/job/nosuch/save/0/a.int", "", "1", 404),
        ("POST", "/upload?path=/job/JOB/save/9/a.int", "", "1", 404),
        ("POST", "/upload?path=/job/JOB/save/0", "", "1", 400),
        ("POST", "/upload?path=/job/JOB/save/0/../../x.int", "", "1", 400),
        ("POST", "/upload?path=/job/JOB/load/0/a.int", "", "1", 409),
        ("POST", "/upload?path=/other/a.int", "", "1", 404),
        ("POST", "/upload?path=/job/JOB/save/0/a.int", "", "one", 400),
        ("POST", "/upload?path=/job/JOB/save/0/l/dir.meta", "", "list", 400),
        ("POST", "/upload?path=/job/JOB/save/0/big.numpy.ndarray", "x-tensor", "", 400),
        (
            "POST",
            "/upload?path=/job/JOB/save/0/big.numpy.ndarray&dtype=f32&dims=600,512",
            "x-tensor",
            "",
            400,
        ),
        (
            "POST",
            "/upload?path=/job/JOB/save/0/big.numpy.ndarray&dtype=f64&dims=600,1024",
            "x-tensor",
            "",
            400,
        ),
        (
            "POST",
            "/upload?path=/job/JOB/save/0/big.numpy.ndarray&dtype=f64&dims=600,512",
            "x-tensor",
            "x",
            400,
        ),
        (
            "POST",
            "/upload?path=/job/JOB/save/0/other.numpy.ndarray&dtype=f64&dims=1",
            "x-tensor",
            "12345678",
            400,
        ),
        (
            "POST",
            "/upload?path=/job/JOB/save/0/rng.numpy.ndarray&dtype=f64&dims=2",
            "x-tensor",
            "12345678",
            400,
        ),
        (
            "POST",
            "/upload?path=/job/JOB/save/0/rng.numpy.ndarray&dtype=f64&dims=9999999",
            "x-tensor",
            "",
            413,
        ),
        ("POST", "/upload?path=/job/JOB/save/0/x.int&path=/job/JOB/save/0/y.int", "", "z", 400),
        ("POST", "/upload?path=/job/JOB/iter", "", "three", 400),
        ("POST", "/upload?path=/job/JOB/iter", "", "4", 409),
        ("POST", "/upload?path=/job/JOB/iter", "", "2", 409),
        ("POST", "/upload?path=/job/JOB/iter", "", "1" * 100, 413),
        ("DELETE", "/delete", "", "", 400),
        ("DELETE", "/delete?path=/job/JOB/save/1", "", "", 404),
        ("DELETE", "/delete?path=/job/JOB/save", "", "", 404),
        ("DELETE", "/delete?path=/job/JOB/load/0", "", "", 409),
        ("DELETE", "/delete?path=/job/JOB", "", "", 409),
        ("DELETE", "/delete?path=/job/nosuch", "", "", 404),
        ("POST", "/peers", "", "x", 400),
        ("POST", "/peers", "", "10.0.0.9:1", 409),
    ],
)
def test_refusals_are_a_line_and_change_nothing(node, job, method, target, kind, body, status):
    headers = {"content_type": kind} if kind else {}
    found, _, line = node.http.request(method, target.replace("JOB", job), body or None, **headers)
    assert found == status, line
    assert line and b"\n" not in line
    assert node.daemon.job(job)["step"] == 3
    assert node.http.listing(f"/job/{job}/save") is None
    assert node.http.delete(f"/job/{job}/save")[0] == 404


WORDS = st.text(max_size=12) | st.sampled_from(
    ["", "0", "1", "save", "load", "iter", "job", "..", ".", "/", "//", "%", "%2f", "\0", "\n", "é" * 200,
     "a" * 5000, "dir.meta", "big.numpy.ndarray", "x.numpy.ndarray.meta", "x.int", "[", ":", "9:", "O"]
)  # fmt: skip
PATHS = st.one_of(
    WORDS,
    st.builds(lambda job, rest: f"/job/{job}/{rest}", st.sampled_from(["JOB", "x", ""]), WORDS),
    st.builds(
        lambda section, rank, name: f"/job/JOB/{section}/{rank}/{name}",
        st.sampled_from(["save", "load"]),
        st.sampled_from(["0", "1", "2", "x", "99999999999999999999"]),
        WORDS,
    ),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(
        ["GET /query", "POST /upload", "DELETE /delete", "POST /peers", "PATCH /query", "GET /x"]
    ),
    st.fixed_dictionaries(
        {}, optional={"path": PATHS, "range": WORDS, "dtype": WORDS, "dims": WORDS, "prefix": PATHS}
    ),
    st.sampled_from(["", "x-tensor", "x-dir", "application/x-tar", "text/plain"]),
    st.binary(max_size=2000) | st.sampled_from([b"1", b"list\n2", b"None"]),
    st.booleans(),
)
def test_whatever_is_asked_gets_an_answer(node, job, what, query, kind, body, replace):
    method, path = what.split()
    fields = {name: value.replace("JOB", job) for name, value in query.items()}
    target = f"{path}?{urlencode(fields, errors='surrogatepass')}"
    headers = {"content_type": kind, "x_replace": str(replace)}
    status, _, line = node.http.request(method, target, body if method == "POST" else None, **headers)
    assert status in (200, 400, 404, 405, 409, 413, 431), line
    assert status == 200 or (line and b"\n" not in line)
    assert node.daemon.job(job)["step"] == 3


def test_no_room_is_said_before_anything_comes(node):
    name = node.job({**ONE, "tensors": {"w": {"shape": [1 << 30], "dtype": "int8"}}, "nodes": {"node0": [0]}})
    status, line = node.http.put(f"/job/{name}/save/0/a.int", "1")
    assert status == 507 and b"needed" in line
    limited = node.job(
        {**ONE, "tensors": {"w": {"shape": [8 << 20], "dtype": "int8"}}, "nodes": {"node0": [0]}},
        memory="4MiB",
    )
    assert node.http.put(f"/job/{limited}/save/0/a.int", "1")[0] == 507


def test_values_have_a_limit(node):
    name = node.job({**ONE, "nodes": {"node0": [0]}})
    base = f"/job/{name}/save/0"
    assert node.http.put(f"{base}/a.str", b"x" * ((16 << 20) + 1))[0] == 413
    for n in range(3):
        assert node.http.put(f"{base}/{n}.str", b"x" * (16 << 20))[0] == 200
    status, line = node.http.put(f"{base}/3.str", b"x")
    assert status == 413 and b"belongs into the layout" in line
    assert node.http.delete(base) == (200, b"3 1\n")
