import os
import re
import subprocess
import sys
import urllib.request

import numpy as np
import obstore
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import S3Store

from tenplexfs.errors import CorruptError, InvalidError, NotFoundError, TimedOutError
from tenplexfs.storage.samples.objects import join_ranges
from tenplexfs.storage.samples.reader import FileRanges, read_ranges

DATA = np.random.default_rng(5).bytes(200_000)


def ranges(parts, file="x"):
    begin, end = np.asarray(parts, np.int64).reshape(-1, 2).T
    edges = np.concatenate([[0], np.cumsum(end - begin)])
    return FileRanges(file, begin, end, edges[:-1]), memoryview(bytearray(int(edges[-1])))


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 90)), max_size=20),
    st.integers(0, 60),
    st.integers(1, 120),
)
def test_joined_ranges_hold_what_was_asked(parts, gap, longest):
    wanted, out = ranges([(begin, begin + size) for begin, size in parts])
    blocks = join_ranges(wanted, gap_bytes=gap, request_bytes=longest)
    for block in blocks:
        assert 0 < block.end - block.begin <= longest
        data = DATA[block.begin : block.end]
        for _, offset, at, count in block.takes:
            assert offset + count <= len(data)
            out[at : at + count] = data[offset : offset + count]
    assert bytes(out) == b"".join(DATA[begin : begin + size] for begin, size in parts)


def test_near_ranges_are_one_request(server, objects):
    server.files["/x"] = DATA
    reader = objects(gap_bytes=1000)
    parts = [(begin, begin + 100) for begin in range(0, 50_000, 1000)]
    np.random.default_rng(1).shuffle(parts)
    found = read_ranges(reader, f"{server.url}/x", parts)
    assert [bytes(part) for part in found] == [DATA[begin:end] for begin, end in parts]
    assert server.requests == [("/x", "bytes=0-49099")]
    assert (reader.requests, reader.received_bytes) == (1, 49_100)


def test_far_ranges_and_long_ones_are_several(server, objects):
    server.files["/x"] = DATA
    reader = objects(gap_bytes=10, request_bytes=50_000)
    parts = [(0, 10), (1000, 1010), (20_000, 180_000), (7, 7)]
    found = read_ranges(reader, f"{server.url}/x", parts)
    assert [bytes(part) for part in found] == [DATA[begin:end] for begin, end in parts]
    assert reader.requests == 2 + 4


def test_names_are_taken_as_urls_write_them(server, objects):
    server.files |= {"/a b/ü%.bin": b"strange", "/plain": b""}
    reader = objects()
    assert bytes(read_ranges(reader, f"{server.url}/a%20b/%C3%BC%25.bin", [(0, 7)])[0]) == b"strange"
    assert bytes(read_ranges(reader, f"{server.url}/a b/ü%25.bin", [(1, 3)])[0]) == b"tr"
    assert reader.sizes([f"{server.url}/plain", f"{server.url}/a b/ü%25.bin"]) == [0, 7]
    assert bytes(read_ranges(reader, f"{server.url}/plain", [(0, 0)])[0]) == b""


@pytest.mark.parametrize("trouble", [500, 503, 429, "cut"])
def test_trouble_that_passes_is_tried_through(server, objects, trouble):
    server.files["/x"] = DATA
    server.trouble = lambda path, number: trouble if number < 3 else None
    reader = objects()
    assert bytes(read_ranges(reader, f"{server.url}/x", [(5, 1005)])[0]) == DATA[5:1005]
    assert reader.requests == 4


@pytest.mark.parametrize("trouble", [500, "cut", "ignore range"])
def test_trouble_that_stays_ends_by_the_deadline(server, objects, trouble):
    server.files["/x"] = DATA
    server.trouble = lambda path, number: trouble
    reader = objects(deadline_s=0.4)
    with pytest.raises((TimedOutError, InvalidError), match=r"/x: bytes \[5, 1005\): ") as caught:
        read_ranges(reader, f"{server.url}/x", [(5, 1005)])
    assert "\n" not in caught.value.message


def test_a_server_that_stalls_costs_one_request_time(server, objects):
    server.files["/x"] = DATA
    server.trouble = lambda path, number: "stall" if number == 0 else None
    reader = objects(request_s=0.3)
    assert bytes(read_ranges(reader, f"{server.url}/x", [(5, 1005)])[0]) == DATA[5:1005]
    assert reader.requests == 2


def test_a_short_object_fails_its_ranges_only(server, objects):
    server.files |= {"/x": DATA[:1000], "/y": DATA}
    reader = objects()
    short, out = ranges(
        [(0, 10), (990, 1000), (990, 1001), (1000, 1010), (500_000, 500_001)], f"{server.url}/x"
    )
    whole = FileRanges(f"{server.url}/y", np.array([7]), np.array([17]), np.array([20]))
    failures = reader.read([short, whole], out)
    assert [(failure.batch, failure.number) for failure in failures] == [(0, 2), (0, 3), (0, 4)]
    assert all(isinstance(failure.error, CorruptError) for failure in failures)
    assert failures[0].error.message.endswith(
        "/x: bytes [990, 1001): the object has 1000 bytes, fewer than its index says"
    )
    assert bytes(out[:20]) == DATA[:10] + DATA[990:1000]


def test_what_will_not_pass_is_not_tried_again(server, objects):
    reader = objects()
    server.files["/secret"] = DATA
    server.trouble = lambda path, number: 403 if path == "/secret" else None
    with pytest.raises(NotFoundError, match=r"/none: bytes \[0, 1\): no such object"):
        read_ranges(reader, f"{server.url}/none", [(0, 1)])
    with pytest.raises(NotFoundError, match="/none: no such object"):
        reader.sizes([f"{server.url}/none"])
    with pytest.raises(InvalidError, match="403"):
        read_ranges(reader, f"{server.url}/secret", [(0, 1)])
    assert reader.requests == 2


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/x", "need s3://, gs://, az://, https:// or http://"),
        ("s3:///x", "and a bucket or host"),
        ("https://host/x?signature=1", "a query cannot be used"),
    ],
)
def test_urls_that_cannot_be_used(objects, url, message):
    with pytest.raises(InvalidError, match=message):
        objects().sizes([url])


def test_http_cannot_list(objects):
    assert objects().find("https://host/x.bin") == ["https://host/x.bin"]
    with pytest.raises(InvalidError, match="https cannot list"):
        objects().find("https://host/*.bin")


@pytest.fixture(scope="module")
def s3():
    """moto's server, and a bucket in it."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    endpoint = next(
        found[0] for line in process.stderr if (found := re.search(r"http://127.0.0.1:\d+", line))
    )
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"), timeout=10).close()
    yield {
        "aws_endpoint": endpoint,
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
        "aws_region": "us-east-1",
    }
    process.terminate()
    process.communicate(timeout=10)


def test_s3(s3, objects):
    store = S3Store("bucket", client_options={"allow_http": True}, **s3)
    names = [
        "train/a b/ü%20.bin",
        "train/part-0.npy",
        "train/part-1.npy",
        "train/sub/part-2.npy",
        "training/x",
    ]
    for name in names:
        obstore.put(store, name, DATA[:5000] + name.encode())
    reader = objects(s3)
    urls = [f"s3://bucket/{name}" for name in names]
    assert reader.find("s3://bucket/train") == urls[:4]
    assert reader.find("s3://bucket/train/part-*.npy") == urls[1:3]
    assert reader.find("s3://bucket/**/*.npy") == urls[1:4]
    assert reader.find("s3://bucket/train/**") == urls[:4]
    assert reader.find(urls[0]) == [urls[0]]
    with pytest.raises(NotFoundError, match="s3://bucket/none"):
        reader.find("s3://bucket/none")
    with pytest.raises(NotFoundError, match="s3://bucket/none"):
        reader.find("s3://bucket/none*")
    for url, name in zip(urls, names, strict=True):
        size = 5000 + len(name.encode())
        assert reader.sizes([url]) == [size]
        first, last = read_ranges(reader, url, [(10, 20), (5000, size)])
        assert (bytes(first), bytes(last)) == (DATA[10:20], name.encode())
    with pytest.raises(CorruptError, match="has 5016 bytes, fewer than its index says"):
        read_ranges(reader, urls[1], [(5000, 6000)])
    with pytest.raises(CorruptError, match="has 5016 bytes, fewer than its index says"):
        read_ranges(reader, urls[1], [(6000, 6001)])
