"""An HTTP server that lists and watches pods as the API server of Kubernetes does, in this process."""

import http.server
import json
import pathlib
import ssl
import threading
import time
import urllib.parse
from typing import Any

SELECTOR = "app.kubernetes.io/instance=digits,app.kubernetes.io/component=worker"


def pod(
    index: int, address: str | None = None, *, phase: str = "Running", is_evicted: bool = False, **metadata: Any
) -> dict[str, Any]:
    """Returns a worker's pod: of the StatefulSet `digits-worker`, or at another address `HOST.DOMAIN:PORT`."""
    name = f"digits-worker-{index}"
    host, _, port = (address or f"{name}.digits:2222").rpartition(":")
    hostname, _, subdomain = host.rpartition(".")
    labels = _labels(SELECTOR) | {"apps.kubernetes.io/pod-index": str(index)}
    container = {"name": "worker", "ports": [{"name": "tensorflow", "containerPort": int(port)}]}
    return {
        "metadata": {"name": name, "labels": labels, **metadata},
        "spec": {"hostname": hostname, "subdomain": subdomain, "containers": [container]},
        "status": {"phase": phase, "conditions": [{"type": "DisruptionTarget", "status": str(is_evicted)}]},
    }


class FakeKubernetes:
    """The API server, with a file of a certificate and its key, or by plain HTTP. A context manager."""

    def __init__(self, certificate: pathlib.Path | None = None) -> None:
        # The only one that it accepts; None for any.
        self.token: str | None = None
        # The parameters of each request.
        self.requests: list[dict[str, str]] = []
        # Of the answer to a watch of what is forgotten: 410, or 200 with an event that says so.
        self.gone_status = 410
        self._changed = threading.Condition()
        self._pods: dict[str, dict[str, Any]] = {}
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._version = 100
        self._forgotten = 100
        # Watches that began before it are ended.
        self.ended = 0
        self._is_closed = False
        handler = type("Handler", (_Handler,), {"kubernetes": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = False
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if certificate is not None:
            self.renew(certificate)
            self._server.socket = self._tls.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if certificate is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def renew(self, certificate: pathlib.Path) -> None:
        """Takes another certificate for the connections that follow."""
        self._tls.load_cert_chain(certificate)

    def put(self, changed: dict[str, Any]) -> None:
        """Adds or changes a pod."""
        name = changed["metadata"]["name"]
        # At once: a list of the new version has the change, or it would never be seen.
        with self._changed:
            self._record("MODIFIED" if name in self._pods else "ADDED", changed)
            self._pods[name] = changed

    def delete(self, index: int) -> None:
        """Begins the deletion of a pod."""
        self.put(pod(index, deletionTimestamp="2026-01-01T00:00:00Z"))

    def remove(self, index: int) -> None:
        """Ends the deletion of a pod."""
        with self._changed:
            self._record("DELETED", self._pods.pop(pod(index)["metadata"]["name"]))

    def bookmark(self) -> None:
        """Tells watches of a new version, without a change."""
        self._record("BOOKMARK", {"metadata": {}})

    def forget(self) -> None:
        """Ends all watches and forgets all events: who does not know the present version must list again."""
        with self._changed:
            self._version += 1
            self._forgotten = self._version
            self._events.clear()
            self.ended += 1
            self._changed.notify_all()

    def wait_watched(self, count: int = 1, timeout: float = 30.0) -> None:
        """Waits until so many watches have begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: sum("watch" in each for each in self.requests) >= count, timeout)

    def __enter__(self) -> "FakeKubernetes":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, query: dict[str, str], token: str | None) -> tuple[int, Any]:
        """Returns the status and the object, or the function that waits for the next lines of a watch."""
        with self._changed:
            self.requests.append(query)
            self._changed.notify_all()
            if self.token is not None and token != f"Bearer {self.token}":
                return 401, {"kind": "Status", "code": 401, "message": "Unauthorized"}
            if "watch" not in query:
                wanted = _labels(query["labelSelector"]).items()
                items = [item for item in self._pods.values() if wanted <= item["metadata"]["labels"].items()]
                return 200, {"metadata": {"resourceVersion": str(self._version)}, "items": items}
            if int(query["resourceVersion"]) < self._forgotten:
                status = {"kind": "Status", "code": 410, "message": "too old resource version"}
                return self.gone_status, status if self.gone_status == 410 else {"type": "ERROR", "object": status}
            return 200, None

    def events_after(self, version: int, ended: int, deadline: float) -> list[tuple[int, dict[str, Any]]] | None:
        """Waits for events; None if the watch has ended."""
        with self._changed:
            while not (self._is_closed or self.ended > ended):
                if found := [event for event in self._events if event[0] > version]:
                    return found
                if not self._changed.wait(deadline - time.monotonic()):
                    return None
        return None

    def _record(self, kind: str, changed: dict[str, Any]) -> None:
        with self._changed:
            self._version += 1
            changed["metadata"]["resourceVersion"] = str(self._version)
            self._events.append((self._version, {"type": kind, "object": changed}))
            self._changed.notify_all()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    kubernetes: FakeKubernetes

    def do_GET(self) -> None:
        path, _, text = self.path.partition("?")
        assert path == "/api/v1/namespaces/default/pods"
        query = dict(urllib.parse.parse_qsl(text))
        ended = self.kubernetes.ended
        status, found = self.kubernetes.answer(query, self.headers.get("Authorization"))
        self.send_response(status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            if found is not None:
                self._send(found)
            else:
                self._watch(int(query["resourceVersion"]), ended, time.monotonic() + float(query["timeoutSeconds"]))
            self.wfile.write(b"0\r\n\r\n")
        except ConnectionError:
            self.close_connection = True

    def _watch(self, version: int, ended: int, deadline: float) -> None:
        while (events := self.kubernetes.events_after(version, ended, deadline)) is not None:
            for number, event in events:
                version = number
                self._send(event)

    def _send(self, content: Any) -> None:
        line = json.dumps(content).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))

    def log_message(self, *_: object) -> None:
        pass


def _labels(selector: str) -> dict[str, str]:
    return dict(part.split("=") for part in selector.split(","))
