"""What Tenplex's clients ask: ``/query``, ``/upload``, ``/delete``, ``/peers``.

Source: mlfs ``web.go``; what its clients rely on is kept, what it leaves half done is not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import trio

from tenplexfs.core.snapshot import NodeName
from tenplexfs.errors import ConflictError, InvalidError, NotFoundError, PreconditionError
from tenplexfs.formats.tenplex_request import Place, parse_place
from tenplexfs.http.message import Request, Response, text
from tenplexfs.http.queries import Queries
from tenplexfs.http.uploads import Uploads
from tenplexfs.runtime.incoming import Incoming
from tenplexfs.runtime.member import Member

__all__ = ["Edge"]

_MAX_PEERS_BYTES = 64 << 10

Answerer = Callable[[Request], Awaitable[Response]]


class Edge:
    """Answers requests. Implements `http.server.Handler`.

    Args:
        here: This node.
        endpoints: Returns where the nodes are that are known.
    """

    def __init__(
        self,
        member: Member,
        incoming: Incoming,
        here: NodeName,
        endpoints: Callable[[], Mapping[NodeName, str]],
    ) -> None:
        self._incoming = incoming
        self._here = here
        self._endpoints = endpoints
        self._routes: Mapping[str, Mapping[str, Answerer]] = {
            "/query": {"GET": Queries(member, incoming)},
            "/upload": {"POST": Uploads(incoming)},
            "/delete": {"DELETE": self._delete},
            "/peers": {"GET": self._get_peers, "POST": self._post_peers},
        }

    async def __call__(self, request: Request) -> Response:
        """Returns the answer.

        Raises:
            TenplexError: It is refused.
        """
        methods = self._routes.get(request.path)
        if methods is None:
            raise NotFoundError(f"{request.path[:200]}: there are {', '.join(self._routes)}")
        answer = methods.get(request.method)
        if answer is None:
            allowed = ", ".join(methods)
            return text(405, f"{request.method} {request.path}: use {allowed}", allow=allowed)
        return await answer(request)

    async def _delete(self, request: Request) -> Response:
        place = parse_place(request.parameter("path"))
        if place.section != "save":
            self._incoming.base(place.job)
            raise PreconditionError(f"{place.text}: only what is below /job/{place.job}/save can be deleted")
        if place.rank is not None:
            files, directories = await self._incoming.delete(place.job, place.rank, place.name)
        else:
            files, directories = await self._delete_all(place)
        return text(200, f"{files} {directories}\n")

    async def _delete_all(self, place: Place) -> tuple[int, int]:
        ranks = list(self._incoming.found(place.job))
        if not ranks:
            raise NotFoundError(f"{place.text}: nothing was uploaded")
        counts = [await self._incoming.delete(place.job, rank, "") for rank in ranks]
        return sum(files for files, _ in counts), 1 + sum(directories for _, directories in counts)

    async def _get_peers(self, request: Request) -> Response:
        await trio.lowlevel.checkpoint()
        known = self._endpoints()
        names = sorted(known, key=lambda name: (name != self._here, name))
        return text(200, ",".join(known[name] for name in names))

    async def _post_peers(self, request: Request) -> Response:
        data = await request.content("peers", _MAX_PEERS_BYTES)
        wanted = [each.strip() for each in data.decode(errors="replace").split(",") if each.strip()]
        if not wanted or not all(_is_address(each) for each in wanted):
            raise InvalidError("peers: need HOST:PORT, ...")
        strange = sorted(set(wanted) - set(self._endpoints().values()))
        if strange:
            raise ConflictError(
                f"peers: {', '.join(strange)[:500]}: not known here; --peer or --join tells daemons of others"
            )
        return text(200, "")


def _is_address(each: str) -> bool:
    host, _, port = each.rpartition(":")
    return bool(host) and port.isdecimal() and int(port) < 65536
