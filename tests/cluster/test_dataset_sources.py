"""Datasets from where they lie, read through a real mount: Megatron's files, object stores, https."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import re
import ssl
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from obstore.store import S3Store

import tenplexfs
from tenplexfs.core.order import Order
from tests.cluster.daemons import Daemon, Daemons
from tests.storage.samples.conftest import RangeServer

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.mount,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse is not there"),
]

RNG = np.random.default_rng(5)
ROWS = RNG.integers(0, 1 << 30, (48, 4, 6), np.int32)
SIZES = [3, 2, 2, 2]  # of a batch of 9 over 4 ranks
DOCUMENTS = [RNG.integers(0, 60_000, n, np.uint16) for n in (5, 0, 17, 1, 40, 8, 23, 3, 12, 9)]


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """moto's server; what the environment of a daemon has to say."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=quiet)
    endpoint = next(
        found[0] for line in process.stderr if (found := re.search(r"http://127.0.0.1:\d+", line))
    )
    yield {
        "AWS_ENDPOINT": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
    process.terminate()
    process.communicate(timeout=10)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "samples")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    base = tmp_path_factory.mktemp("certificate")
    (base / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (base / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return base / "cert.pem", base / "key.pem"


@pytest.fixture(scope="module")
def node(
    tmp_path_factory: pytest.TempPathFactory, s3: dict[str, str], certificate: tuple[Path, Path]
) -> Iterator[Daemon]:
    base = tmp_path_factory.mktemp("sources")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**s3, "SSL_CERT_FILE": str(certificate[0])}.items():
            environment.setenv(name, value)
        with Daemons(base, 1) as daemons:
            yield daemons.nodes[0]


def create(node: Daemon, job: str, mesh: dict[str, int], batch: int, **dataset: object) -> None:
    size = int(np.prod(list(mesh.values())))
    layout = {
        "format": "tenplexfs-layout",
        "version": 1,
        "mesh": mesh,
        "nodes": {"node0": list(range(size))},
        "tensors": {},
        "dataset": {"axis": "dp", "global_batch": batch, **dataset},
    }
    file = node.mount.parent / f"{job}.json"
    file.write_text(json.dumps(layout))
    node.ok("job", "create", job, "--layout", str(file))


def add(node: Daemon, job: str, name: str, source: object, *options: str) -> Path:
    node.ok("dataset", "add", job, name, "--source", str(source), *options)
    return node.mount / job / "dataset" / name / "0"


def ids_of(directory: Path) -> list[int]:
    ids: list[int] = np.load(directory / "order.npy").tolist()
    return ids


def in_turn(parts: Sequence[list[int]], sizes: Sequence[int]) -> list[int]:
    """The rows of all ranks as one stream, batch by batch."""
    rest, stream = [list(part) for part in parts], []
    while any(rest):
        for rank, size in enumerate(sizes):
            stream += rest[rank][:size]
            del rest[rank][:size]
    return stream


def index_of(lengths: Sequence[int]) -> bytes:
    """The .idx file of documents of so many tokens of two bytes, one after another."""
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1])]) * 2
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
    numbers = ((lengths, "<i4"), (pointers, "<i8"), (range(len(lengths) + 1), "<i8"))
    return head + b"".join(np.array(values, code).tobytes() for values, code in numbers)


def test_documents_and_sequences_of_megatron(node):
    base = node.mount.parent / "corpus"
    base.mkdir()
    (base / "text.bin").write_bytes(b"".join(document.tobytes() for document in DOCUMENTS))
    (base / "text.idx").write_bytes(index_of([len(document) for document in DOCUMENTS]))
    create(node, "megatron", {"dp": 2}, 4)
    documents = add(node, "megatron", "documents", base / "text.idx", "--tail", "keep")
    length = ("--sequence-length", "8")
    sequences = add(node, "megatron", "sequences", base / "text", "--kind", "megatron", *length)
    stream = []
    for rank in (0, 1):
        found = list(tenplexfs.Dataset(documents / str(rank)))
        order = ids_of(documents / str(rank))
        assert found == [DOCUMENTS[sample].tobytes() for sample in order]
        stream += order
    assert sorted(stream) == list(range(len(DOCUMENTS)))
    tokens = np.concatenate(DOCUMENTS)
    wanted = np.stack([tokens[at : at + 9] for at in range(0, len(tokens) - 8, 8)])
    for rank in (0, 1):
        found = np.load(sequences / str(rank) / "data.npy")
        assert found.dtype == np.uint16
        np.testing.assert_array_equal(found, wanted[ids_of(sequences / str(rank))])


def test_many_documents_are_listed_and_read_right_after_they_were_added(node):
    count, base = 300_000, node.mount.parent / "many"
    base.mkdir()
    lengths = RNG.integers(0, 6, count)
    tokens = RNG.integers(0, 60_000, int(lengths.sum()), np.uint16)
    (base / "many.bin").write_bytes(tokens.tobytes())
    (base / "many.idx").write_bytes(index_of(lengths.tolist()))
    create(node, "many", {"dp": 2}, 8)
    documents = add(node, "many", "documents", base / "many.idx").parent
    order, edges = Order(count, seed=0, epoch=3), np.concatenate([[0], np.cumsum(lengths)])
    ids = order.span(0, count).reshape(-1, 8)[:, 4:].reshape(-1)
    sizes = lengths[ids] * 2
    with os.scandir(documents / "3/1") as entries:  # an epoch that nobody has looked at
        found = {entry.name: entry.stat().st_size for entry in entries}
    assert list(found) == ["meta.json", "order.npy", "data.bin", "index.npy", "samples"]
    assert found["data.bin"] == sizes.sum() == (documents / "3/1/data.bin").stat().st_size
    ends = np.load(documents / "4/1/index.npy")[:, 1]
    later = Order(count, seed=0, epoch=4).span(0, count).reshape(-1, 8)[:, 4:].reshape(-1)
    np.testing.assert_array_equal(ends, np.cumsum(lengths[later] * 2))
    one, row = (documents / "5/0/samples/7/70001.bin").read_bytes(), 70001 // 4 * 8 + 70001 % 4
    sample = int(Order(count, seed=0, epoch=5).ids(row))
    assert one == tokens[edges[sample] : edges[sample + 1]].tobytes()


def test_an_object_store(node, s3):
    bucket = urllib.request.Request(f"{s3['AWS_ENDPOINT']}/bucket", method="PUT")
    urllib.request.urlopen(bucket, timeout=10).close()
    given = {name.lower(): value for name, value in s3.items() if name != "AWS_ALLOW_HTTP"}
    store = S3Store("bucket", client_options={"allow_http": True}, **given)
    for number, part in enumerate(np.split(ROWS, 4)):
        np.save(node.mount.parent / "part.npy", part)
        store.put(f"train/part {number}.npy", (node.mount.parent / "part.npy").read_bytes())
    create(node, "stored", {"dp": 2}, 8)
    rows = add(node, "stored", "rows", "s3://bucket/train/")
    for rank in (0, 1):
        found = np.load(rows / str(rank) / "data.npy")
        np.testing.assert_array_equal(found, ROWS[ids_of(rows / str(rank))])
    for source in ("s3://bucket/none/", "s3://nobucket/x.npy"):
        status, said, _ = node.run("dataset", "add", "stored", "wrong", "--source", source)
        assert status == 1
        assert source in said["error"]["message"]
    assert not (node.mount / "stored/dataset/wrong").exists()


def test_https_that_answers_ranges(node, certificate):
    server = RangeServer()
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.server.socket = context.wrap_socket(server.server.socket, server_side=True)
        server.files["/rows.bin"] = ROWS.tobytes()
        create(node, "web", {"dp": 1}, 8)
        url = f"{server.url.replace('http:', 'https:')}/rows.bin"
        options = ["--kind", "records", "--record-bytes", "96", "--dtype", "int32"]
        rows = add(node, "web", "rows", url, *options, "--shape", "4,6")
        np.testing.assert_array_equal(np.load(rows / "0/data.npy"), ROWS[ids_of(rows / "0")])
        assert all(asked.startswith("bytes=") for _, asked in server.requests)
        node.ok("job", "remove", "web")
    finally:
        server.close()


@pytest.mark.parametrize(("tail", "count"), [("drop", 45), ("keep", 48)])
def test_batches_that_ranks_do_not_divide(node, tail, count):
    job = f"uneven-{tail}"
    create(node, job, {"dp": 4}, 9, uneven="balanced", tail=tail)
    np.save(node.mount.parent / "rows.npy", ROWS)
    rows = add(node, job, "rows", node.mount.parent / "rows.npy", "--seed", "3")
    single = Order(len(ROWS), seed=3, epoch=0).span(0, count).tolist()
    parts = [ids_of(rows / str(rank)) for rank in range(4)]
    whole = count // 9 * 9
    full = in_turn([part[: whole // 9 * size] for part, size in zip(parts, SIZES, strict=True)], SIZES)
    assert full == single[:whole]
    ends = [part[whole // 9 * size :] for part, size in zip(parts, SIZES, strict=True)]
    assert [sample for end in ends for sample in end] == single[whole:]
    assert max(map(len, ends)) - min(map(len, ends)) <= 1
    meta = json.loads((rows.parent / "meta.json").read_text())
    assert sorted([*single, *meta["dropped"]]) == list(range(48))
    for rank in range(4):
        np.testing.assert_array_equal(np.load(rows / str(rank) / "data.npy"), ROWS[parts[rank]])
    assert node.ok("dataset", "verify", job, "rows")["samples"] == count


@pytest.mark.parametrize(
    ("order", "cuts"),
    [
        ("contiguous", [[0, 1, 2], [3, 4, 5]]),
        ("zigzag", [[0, 3], [1, 2]]),
    ],
)
def test_samples_that_are_cut_along_a_dim(node, order, cuts):
    dim = 1 if order == "contiguous" else 0
    create(node, f"cut-{order}", {"dp": 2, "cp": 2}, 8, context={"axis": "cp", "dim": dim, "order": order})
    np.save(node.mount.parent / "rows.npy", ROWS)
    rows = add(node, f"cut-{order}", "rows", node.mount.parent / "rows.npy")
    for rank in (0, 1):
        for part, places in enumerate(cuts):
            found = np.load(rows / str(rank) / "cp" / str(part) / "data.npy")
            wanted = ROWS[ids_of(rows / str(rank))].take(places, axis=dim + 1)
            np.testing.assert_array_equal(found, wanted)
            dataset = tenplexfs.Dataset(node.mount / f"cut-{order}/dataset/rows", rank=rank, part=part)
            np.testing.assert_array_equal(dataset[5:7], wanted[5:7])


def test_workers_that_are_spawned(node):
    loader = pytest.importorskip("torch.utils.data")
    import tenplexfs.torch

    create(node, "spawned", {"dp": 2}, 8)
    np.save(node.mount.parent / "rows.npy", ROWS)
    rows = add(node, "spawned", "rows", node.mount.parent / "rows.npy")
    dataset = tenplexfs.torch.Dataset(rows / "1")
    dataset[0]  # files that are open here are not theirs
    batches = loader.DataLoader(
        dataset, batch_size=dataset.local_batch, num_workers=1, multiprocessing_context="spawn"
    )
    found = np.concatenate([batch.numpy() for batch in batches])
    np.testing.assert_array_equal(found, ROWS[ids_of(rows / "1")])
