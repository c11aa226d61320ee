"""Tenplex's side of the protocol, written from what its clients do: save and load of a rank."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np

from tenplexfs.core.dtypes import dtype_of

DTYPES = {
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{
        f"{short}{bits}": f"{kind}{bits}"
        for bits in (8, 16, 32, 64)
        for short, kind in (("i", "int"), ("u", "uint"))
    },
}


class Server:
    """Where requests go; each has a connection of its own, as Tenplex's have."""

    def __init__(self, port: int, **headers: str) -> None:
        self.port = port
        self.headers = headers

    def request(
        self, method: str, target: str, body: Any = None, **headers: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            named = {name.replace("_", "-"): value for name, value in {**self.headers, **headers}.items()}
            connection.request(method, target, body, named)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def ok(self, *arguments: Any, **headers: str) -> tuple[Mapping[str, str], bytes]:
        status, found, data = self.request(*arguments, **headers)
        assert status == 200, (arguments[:2], status, data)
        return found, data

    # One request.

    def query(self, path: str, kind: str | None = None, **more: str) -> tuple[int, Mapping[str, str], bytes]:
        headers = {} if kind is None else {"content_type": kind}
        return self.request("GET", f"/query?{urlencode({'path': path, **more})}", **headers)

    def listing(self, path: str) -> list[str] | None:
        status, _, data = self.query(path, "x-dir")
        assert status in (200, 404), data
        return sorted(data.decode().split("\n")) if status == 200 else None

    def tensor(self, path: str, **more: str) -> np.ndarray:
        status, headers, data = self.query(path, "x-tensor", **more)
        assert status == 200, data
        dims = [int(size) for size in headers["x-tensor-dims"].split(",") if size]
        dtype = headers["x-tensor-dtype"]
        return np.frombuffer(data, dtype_of(DTYPES.get(dtype, dtype))).reshape(dims)

    def put(
        self, path: str, data: Any, kind: str = "text/plain", *, replace: bool = False
    ) -> tuple[int, bytes]:
        headers = {"content_type": kind, **({"x_replace": "true"} if replace else {})}
        status, _, answer = self.request("POST", f"/upload?path={quote(path)}", data, **headers)
        return status, answer

    def put_tensor(self, path: str, array: np.ndarray, dtype: str = "", **headers: str) -> tuple[int, bytes]:
        dims = ",".join(map(str, array.shape))
        target = f"/upload?dtype={dtype or array.dtype}&dims={dims}&path={quote(path)}"
        status, _, answer = self.request("POST", target, array.tobytes(), content_type="x-tensor", **headers)
        return status, answer

    def delete(self, path: str) -> tuple[int, bytes]:
        status, _, answer = self.request("DELETE", f"/delete?{urlencode({'path': path})}")
        return status, answer

    # A rank.

    def save(self, state: object, job: str, step: int, rank: int) -> str:
        """Saves a rank, and says that it is done; returns what became of it."""
        path = f"/job/{job}/save/{rank}"
        if self.listing(path):
            assert self.delete(path)[0] == 200
        self.bring(state, path)
        return self.done(job, step)

    def done(self, job: str, step: int) -> str:
        status, line = self.put(f"job/{job}/iter", str(step), replace=True)
        assert status == 200, line
        return line.decode()

    def bring(self, value: object, path: str) -> None:
        """Uploads what is below ``path``."""
        if isinstance(value, dict):
            for key, child in value.items():
                self.bring(child, f"{path}/{key}")
        elif isinstance(value, list | tuple):
            self._put(f"{path}/dir.meta", f"list\n{len(value)}", replace=True)
            for index, child in enumerate(value):
                self.bring(child, f"{path}/{index}")
        elif isinstance(value, np.ndarray):
            status, line = self.put_tensor(f"{path}.numpy.ndarray", value)
            assert status == 200, (path, line)
        elif isinstance(value, Pickle):
            self._put(f"{path}.argparse.Namespace", value)
        else:
            kind = "none" if value is None else type(value).__name__
            self._put(f"{path}.{kind}", str(value).encode())

    def _put(self, path: str, data: Any, *, replace: bool = False) -> None:
        status, line = self.put(path, data, replace=replace)
        assert status == 200, (path, line)

    def load(self, job: str, rank: int) -> tuple[Any, int]:
        """Returns the state of a rank, and its step."""
        step = int(self.query(f"/job/{job}/iter", "text")[2])
        base = f"/job/{job}/load/{rank}"
        root: dict[Any, Any] = {}
        lists = []
        for file in self.listing(base) or ():
            *parents, last = file.removeprefix(f"{base}/").split("/")
            at = root
            for name in parents:
                at = at.setdefault(name, {})
            if last == "dir.meta":
                lists.append(parents)
            elif last.endswith(".numpy.ndarray"):
                at[last.removesuffix(".numpy.ndarray")] = self.tensor(file)
            else:
                stem = file.removesuffix(".argparse.Namespace")
                stem = stem if stem != file else file.rpartition(".")[0]
                status, headers, data = self.query(stem, "x-file")
                assert status == 200, data
                at[stem.rpartition("/")[2]] = value_of(headers["dtype"], data)
        for parents in sorted(lists, key=len, reverse=True):
            at = root
            for name in parents[:-1]:
                at = at[name]
            made = at.setdefault(parents[-1], {})
            at[parents[-1]] = [made[str(i)] for i in range(len(made))]
        return root, step


class Pickle(bytes):
    """A namespace that was pickled."""


def value_of(kind: str, data: bytes) -> object:
    if kind.endswith("argparse.Namespace"):
        return Pickle(data)
    word = kind.rpartition(".")[2]
    return {
        "none": lambda text: None,
        "str": str,
        "int": int,
        "float": float,
        "bool": lambda text: text == "True",
    }[word](data.decode())


def listed(value: object) -> object:
    """Returns a state as `Server.load` gives it: lists for tuples, and names for keys."""
    if isinstance(value, dict):
        return {str(key): listed(child) for key, child in value.items()}
    return [listed(child) for child in value] if isinstance(value, list | tuple) else value


def same(one: object, other: object) -> bool:
    """Returns whether two states are the same, bit by bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return type(one) is type(other) and one == other
