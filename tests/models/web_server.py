"""A real web server on loopback, in threads, that misbehaves as a test tells it to."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.access.https_servers import Certificate

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WebServer

    def do_GET(self) -> None:  # the name that http.server asks for
        site = self.server.site
        site.asked.append((self.path, self.headers.get("range", "")))
        answer = site.answers.get(self.path)
        queue = site.once.get(self.path)
        if queue:
            answer = queue.pop(0)
        if answer is None:
            self.plain(404, b"")
        else:
            answer(self)

    @property
    def first(self) -> int:
        """The byte that a range asks to begin at."""
        return int((self.headers.get("range") or "bytes=0-")[6:].split("-")[0])

    def plain(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def cut_off(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *arguments: object) -> None:
        pass


def serving(content: bytes, tag: str = '"a"', *, up_to: int | None = None) -> Answer:
    """The content, with ranges; the connection breaks before the byte `up_to`."""

    def answer(handler: Handler) -> None:
        asked = handler.headers.get("range")
        last = len(content) - 1
        if asked is not None and asked.split("-")[1]:
            last = min(last, int(asked.split("-")[1]))
        part = content[handler.first : last + 1]
        if asked is not None and handler.first >= len(content):
            handler.plain(416, b"", content_range=f"bytes */{len(content)}")
            return
        handler.send_response(200 if asked is None else 206)
        if asked is not None:
            handler.send_header("content-range", f"bytes {handler.first}-{last}/{len(content)}")
        handler.send_header("content-length", str(len(part)))
        handler.send_header("etag", tag)
        handler.end_headers()
        if up_to is None:
            handler.wfile.write(part)
        else:
            handler.wfile.write(part[: max(0, up_to - handler.first)])
            handler.cut_off()

    return answer


def without_ranges(content: bytes) -> Answer:
    return lambda handler: handler.plain(200, content, etag='"a"')


def status(code: int, **headers: str) -> Answer:
    return lambda handler: handler.plain(code, b"", **headers)


@dataclass
class Site:
    """Its answers, permanent ones and single ones, and the requests."""

    url: str
    over: threading.Event
    answers: dict[str, Answer] = field(default_factory=dict)
    once: dict[str, list[Answer]] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def silent(self, head: bytes = b"") -> Answer:
        """Sends this, and then nothing until the test is over."""

        def answer(handler: Handler) -> None:
            handler.wfile.write(head)
            handler.wfile.flush()
            self.over.wait()
            handler.close_connection = True

        return answer

    def trickling(self, head: bytes, seconds: float) -> Answer:
        """Sends this, and then a byte now and then."""

        def answer(handler: Handler) -> None:
            handler.wfile.write(head)
            with contextlib.suppress(OSError):
                while not self.over.wait(seconds):
                    handler.wfile.write(b"x")
                    handler.wfile.flush()
            handler.close_connection = True

        return answer


class WebServer(ThreadingHTTPServer):
    daemon_threads = False  # closing the server waits for them
    site: Site

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that did not like us: that is what the test is about

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # without looking up our own name
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]


@contextlib.contextmanager
def web_server(
    folder: Path, certificate: Certificate | None = None, address: str = "127.0.0.1"
) -> Iterator[Site]:
    server = WebServer((address, 0), Handler)
    scheme = "http"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate.written_to(folder))
        server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    server.site = Site(f"{scheme}://{address}:{server.server_port}", threading.Event())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.site
    finally:
        server.site.over.set()
        server.shutdown()
        thread.join()
        server.server_close()
