"""The server process: uvicorn, draining on SIGTERM, and freed memory."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from forerun.errors import ConfigError
from forerun.server.app import make_app, with_middleware
from forerun.server.logs import LOGGER
from forerun.server.middleware import RequestMiddleware
from forerun.server.options import ServerOptions
from forerun.server.service import Service
from forerun.utils.machine import glibc_function

# The C library keeps freed memory, in an arena for each of several threads: after two thousand requests a process
# holds a fifth more than it uses, and more with time. Returning it to the system takes milliseconds.

_EVERY = 30.0
"""Seconds between two returns: returned memory has to be allocated again."""
_GLIBC_ARENAS = -8


def share_one_arena() -> None:
    """Have all threads allocate from one arena, where the C library is glibc. Call it before there are any."""
    mallopt = glibc_function("mallopt")
    if mallopt is not None:
        mallopt(_GLIBC_ARENAS, 1)


class FreedMemory:
    """Returns freed memory to the system now and then, if there were requests since the last time."""

    def __init__(self) -> None:
        self._trim = glibc_function("malloc_trim")
        self._last = time.monotonic()
        self._used = False

    def tick(self, num_active: int) -> None:
        """Return unused memory if it is time, in a thread of its own, for it takes milliseconds.

        num_active: number of active requests.
        """
        self._used |= num_active > 0
        if self._trim is None or not self._used or time.monotonic() < self._last + _EVERY:
            return
        self._last = time.monotonic()
        self._used = num_active > 0
        threading.Thread(target=self._trim, args=(0,), name="malloc_trim", daemon=True).start()


_GRACE = 5.0
"""Seconds that a server has to end when its requests have ended, or by a second signal."""
_log = logging.getLogger(LOGGER)


def end_process_after(seconds: float) -> None:
    """End this process after so many seconds if it lives until then, whatever hangs in it."""

    def end() -> None:
        _log.error({"event": "ended", "reason": f"something in it hung for {seconds:g} seconds after a signal"})
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


class DrainingServer(uvicorn.Server):
    """A server that finishes its requests after a signal; new ones get 503.

    A second signal ends it at once.

    Args:
        drain_timeout: seconds in which requests may finish.
        model: its name in requests.

    Attributes:
        last_resort: called with the seconds after which the process must have ended, with every signal.
    """

    last_resort: Callable[[float], None] = staticmethod(lambda seconds: None)

    def __init__(self, config: uvicorn.Config, middleware: RequestMiddleware, drain_timeout: float, model: str) -> None:
        super().__init__(config)
        self._middleware = middleware
        self._drain_timeout = drain_timeout
        self._model = model
        self._signal = ""
        self._end = math.inf
        self._freed_memory = FreedMemory()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers if self.started else ():
            for each in server.sockets:  # only now do they take connections
                _log.info({"event": "ready", "url": url_of(*each.getsockname()[:2]), "model": self._model})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = self.force_exit = self._middleware.draining
        self._middleware.draining = True
        self._signal = signal.Signals(sig).name
        self.last_resort(_GRACE if self.force_exit else self._drain_timeout + _GRACE)

    async def on_tick(self, counter: int) -> bool:
        num_active = self._middleware.num_active
        now = time.monotonic()
        self._freed_memory.tick(num_active)
        if self._signal and self._end == math.inf:  # here, since a signal may come while a line is written
            self._end = now + self._drain_timeout
            _log.info({"event": "draining", "signal": self._signal, "requests": num_active})
        if num_active and now >= self._end:
            _log.warning({"event": "cut", "requests": num_active})
            self.force_exit = True
        self.should_exit |= self.force_exit or (self._end < math.inf and not num_active)
        return await super().on_tick(counter)


def make_server(service: Service) -> DrainingServer:
    """Make the server of a model, without starting it."""
    options = service.options
    app, middleware = with_middleware(make_app(service, lambda: middleware.draining), options, service.metrics)
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
    )
    return DrainingServer(config, middleware, options.drain_timeout, service.name)


def bound_socket(options: ServerOptions) -> socket.socket:
    """Bind a socket to the address of the options, before a model is loaded.

    Raises:
        ConfigError: the address is in use or invalid.
    """
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        # with the protocol named, asyncio sets TCP_NODELAY: each event is sent at once, whatever is unacknowledged
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        if sys.platform == "win32":  # where SO_REUSEADDR would share the port with whoever listens there already
            made.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((options.host, options.port))
    except OSError as error:
        raise ConfigError(
            f"{options.host} port {options.port} cannot be listened on: {error.strerror or error}. Give another --host "
            "or --port."
        ) from None
    return made


def run_server(service: Service, listening: socket.socket) -> None:
    """Serve until a signal ends it, and with it the process."""
    server = make_server(service)
    server.last_resort = end_process_after
    try:
        server.run(sockets=[listening])
    finally:
        service.close()
        _log.info({"event": "ended"})


def url_of(host: str, port: int) -> str:
    """Return the URL of a server that listens there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
