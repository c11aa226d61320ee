"""Which calls a gRPC server lets in: with the token, meant for this node, not too many at a time."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from tenplexfs.errors import UnavailableError
from tenplexfs.rpc.connection import NODE_KEY

__all__ = ["Admission", "NodeCheck", "TokenCheck"]


class Admission:
    """Lets so many calls run at a time."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._places = threading.BoundedSemaphore(count)

    def admit(self, context: grpc.ServicerContext) -> None:
        """Takes a place for the call, until it is over.

        Raises:
            UnavailableError: None is free.
        """
        if not self._places.acquire(blocking=False):
            raise UnavailableError(
                f"{self._count} calls run already, watchers of jobs above all; ask again later"
            )
        if not context.add_callback(self._places.release):
            self._places.release()


class TokenCheck(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls that do not carry the token."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()

        def refuse(_: Message, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")

        self._refuse = grpc.unary_unary_rpc_method_handler(refuse)

    def intercept_service(
        self, continuation: Callable[[Any], Any], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        """Returns the handler of the call, or one that refuses."""
        given = str(dict(details.invocation_metadata).get("authorization", ""))
        return continuation(details) if hmac.compare_digest(given.encode(), self._wanted) else self._refuse


class NodeCheck(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls that are meant for another node: somewhere an address is wrong."""

    def __init__(self, node: str) -> None:
        self._node = node

    def intercept_service(
        self, continuation: Callable[[Any], Any], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        """Returns the handler of the call, or one that refuses."""
        meant = dict(details.invocation_metadata).get(NODE_KEY, self._node)
        if meant == self._node:
            return continuation(details)

        def refuse(_: Message, context: grpc.ServicerContext) -> None:
            text = f"this is {self._node}, not {meant}: check the address of {meant}"
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)

        return grpc.unary_unary_rpc_method_handler(refuse)
