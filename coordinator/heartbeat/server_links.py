"""Asks servers whether they reach other servers, for the faults of a network that no client sees.

    client --"do you reach B?"--> server A --status--> server B
           <------- yes ---------          <---------

A call of a worker to a parameter server whose packets are dropped lasts until the kernel gives the connection up: after
some 950 s. Neither the client nor its heartbeat notices, since both servers answer the client.

The question is TensorFlow's `CreateSession` for a cluster of A and B: to answer it, A asks B for its devices. A does so
on other threads than those that run functions. So the question neither waits for a function that A runs, nor takes the
thread that this function needs: with two processors a second function on A would take the last one. It costs about 8 ms
of both servers together.

Promises: a question that A cannot answer is not asked again before it has been answered, since it occupies a thread of
A until then; what A has made for an answer is freed; no method waits longer than `timeout`; an answer is valid for a
moment, so that many threads may ask.
"""

import concurrent.futures
import contextlib
import functools
import threading
import time
from collections.abc import Collection
from typing import Any, NamedTuple

import grpc

from coordinator.heartbeat.server_rpcs import (
    CLOSE_SESSION,
    CREATE_SESSION,
    CloseSessionRequest,
    CreateSessionRequest,
    CreateSessionResponse,
    channel_options,
)

# Other names than the servers have themselves, which TensorFlow refuses here.
_HERE, _THERE = "coordinator_here", "coordinator_there"
# What a server that reaches another one may not say. Any other error means that it does not answer such questions.
_UNREACHED = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
# How long an answer is valid, in seconds.
_FRESH = 1.0
_CHANNEL_OPTIONS = channel_options(500, detect_dead_host=True)


class Link(NamedTuple):
    """A connection between two servers.

    Attributes:
      source: `host:port` of the server that calls.
      target: `host:port` of the server that is called.
    """

    source: str
    target: str


class ServerLinks:
    """Asks servers whether they reach others. Every method may be called from any thread.

    Args:
      timeout: a server that has not answered for this long, in seconds, does not reach the other one.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        # Guards what follows; nothing is waited for while it is held.
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._asked: dict[Link, tuple[Any, float]] = {}
        # When links were last found to be whole.
        self._whole: dict[Link, float] = {}
        self._is_closed = False
        self._freeing: set[Any] = set()

    def broken(self, links: Collection[Link]) -> dict[Link, str]:
        """Asks about links, all at once.

        Args:
          links: their sources answer the client.

        Returns:
          The links that are broken, each with words. One whose source does not answer such questions is not among them.
        """
        questions = {link: question for link in links if (question := self._ask(link)) is not None}
        # One that was asked before, and has been waited for then, is not waited for again.
        deadline = max((asked_at + self._timeout for _, asked_at in questions.values()), default=0.0)
        concurrent.futures.wait([_done(call) for call, _ in questions.values()], max(0.0, deadline - time.monotonic()))
        found = {link: self._words(link, *question) for link, question in questions.items()}
        return {link: words for link, words in found.items() if words}

    def close(self) -> None:
        """Closes the connections."""
        with self._lock:
            self._is_closed = True
            channels = [*self._channels.values()]
            self._channels.clear()
            self._asked.clear()
        for channel in channels:
            channel.close()

    def _ask(self, link: Link) -> tuple[Any, float] | None:
        """Returns the call of a question, and when it was asked; None after `close`, or if the answer is known."""
        with self._lock:
            if self._is_closed or time.monotonic() - self._whole.get(link, -_FRESH) < _FRESH:
                return None
            known = self._asked.get(link)
            if known is not None:
                return known
            channel = self._channels.get(link.source)
            if channel is None:
                channel = self._channels[link.source] = grpc.insecure_channel(link.source, options=_CHANNEL_OPTIONS)
            request = CreateSessionRequest(target=f"grpc://{link.source}")
            for job, address in ((_HERE, link.source), (_THERE, link.target)):
                request.config.cluster_def.job.add(name=job).tasks.add(key=0, value=address)
            create = channel.unary_unary(CREATE_SESSION, request_serializer=CreateSessionRequest.SerializeToString)
            asked = self._asked[link] = create.future(request), time.monotonic()
        asked[0].add_done_callback(functools.partial(self._free, channel))
        return asked

    def _free(self, channel: grpc.Channel, call: Any) -> None:
        """Frees what a server has made for its answer; called on a thread of gRPC."""
        # The channel may be closed by now.
        with contextlib.suppress(ValueError):
            if call.code() is grpc.StatusCode.OK:
                handle = CreateSessionResponse.FromString(call.result()).session_handle
                close = channel.unary_unary(CLOSE_SESSION, request_serializer=CloseSessionRequest.SerializeToString)
                freeing = close.future(CloseSessionRequest(session_handle=handle), timeout=self._timeout)
                # gRPC cancels a request that is no longer referenced.
                self._freeing.add(freeing)
                freeing.add_done_callback(self._freeing.discard)

    def _words(self, link: Link, call: Any, asked_at: float) -> str:
        """Returns words on a broken link; empty if it is not."""
        if not call.done():
            return f"no answer for {time.monotonic() - asked_at:.0f} s"
        with self._lock:
            if self._asked.get(link, (None,))[0] is call:
                del self._asked[link]
            if call.code() not in _UNREACHED:
                self._whole[link] = time.monotonic()
                return ""
        return f"{call.code().name}: {call.details()}".partition("\n")[0]


def _done(call: Any) -> concurrent.futures.Future[None]:
    """Returns a future that is done when a call of gRPC is, whose own kind `concurrent.futures.wait` does not know."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    call.add_done_callback(lambda _: future.set_result(None))
    return future
