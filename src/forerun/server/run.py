"""The server's process: uvicorn, a drain on SIGTERM, the end."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from forerun.errors import ConfigError
from forerun.server.app import gated, make_app
from forerun.server.logs import LOGGER
from forerun.server.middleware import RequestMiddleware
from forerun.server.options import ServerOptions
from forerun.server.service import Service

# Memory that requests have freed goes back to the system.
#
# The C library keeps it for later, in an arena for each of several threads: after two thousand requests a process
# holds
# a fifth more than it uses. Giving it back takes milliseconds.

_EVERY = 30.0
"""Seconds between two times: what is given back has to be asked for again."""


class FreedMemory:
    """Gives memory back now and then, if there was anything to do since the last time."""

    def __init__(self) -> None:
        self._give_back = _trim()
        self._last = time.monotonic()
        self._used = False

    def due(self, num_active: int) -> bool:
        """Whether it is time. num_active: requests that are there."""
        self._used |= num_active > 0
        if self._give_back is None or not self._used or time.monotonic() < self._last + _EVERY:
            return False
        self._last, self._used = time.monotonic(), num_active > 0
        return True

    def give_back(self) -> None:
        """Give back what is not used. It takes milliseconds, so not in a thread that others wait for."""
        if self._give_back is not None:
            self._give_back(0)


def _trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; None where there is another C library."""
    try:
        found = ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):
        return None
    found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
    made: Callable[[int], int] = found
    return made


_TICK = 0.05
"""Seconds between two looks at whether all requests have ended."""
_log = logging.getLogger(LOGGER)


class DrainingServer(uvicorn.Server):
    """A server that goes on answering after a signal until its requests have ended; new ones get 503.

    A second signal ends it at once.

    Args:
        drain_timeout: seconds that requests have.
        model: what requests call it.
    """

    def __init__(self, config: uvicorn.Config, gate: RequestMiddleware, drain_timeout: float, model: str) -> None:
        super().__init__(config)
        self._gate, self._drain_timeout, self._model = gate, drain_timeout, model
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._freed_memory = FreedMemory()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for server in self.servers if self.started else ():
            for each in server.sockets:  # only now do they take connections
                _log.info({"event": "ready", "url": url_of(*each.getsockname()[:2]), "model": self._model})

    async def on_tick(self, counter: int) -> bool:
        if self._freed_memory.due(self._gate.num_active):
            await asyncio.to_thread(self._freed_memory.give_back)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._gate.draining or self._loop is None:
            self.should_exit = True
            self.force_exit = self._gate.draining
            return
        self._loop.call_soon_threadsafe(self.drain, signal.Signals(sig).name)

    def drain(self, why: str) -> None:
        """Refuse new requests, and end when those that are there have."""
        if self._draining is None:
            self._gate.draining = True
            _log.info({"event": "draining", "signal": why, "requests": self._gate.num_active})
            self._draining = asyncio.create_task(self._end())

    async def _end(self) -> None:
        end = asyncio.get_running_loop().time() + self._drain_timeout
        while self._gate.num_active and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_TICK)
        if self._gate.num_active:
            _log.warning({"event": "cut", "requests": self._gate.num_active})
            self.force_exit = True
        self.should_exit = True


def make_server(service: Service) -> DrainingServer:
    """The server of a model, not started."""
    options = service.options
    app, gate = gated(make_app(service, lambda: gate.draining), options, service.metrics)
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
    return DrainingServer(config, gate, options.drain_timeout, service.name)


def bound_socket(options: ServerOptions) -> socket.socket:
    """A socket that listens where it is asked to, before a model is loaded.

    Raises:
        ConfigError: it cannot be had.
    """
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        # with the protocol named, asyncio sets TCP_NODELAY: each event is sent at once, whatever is unacknowledged
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((options.host, options.port))
    except OSError as error:
        raise ConfigError(
            f"{options.host} port {options.port} cannot be listened on: {error.strerror or error}. Give another --host "
            "or --port."
        ) from None
    return made


def serve(service: Service, listening: socket.socket) -> None:
    """Serve until a signal ends it."""
    try:
        make_server(service).run(sockets=[listening])
    finally:
        service.close()
        _log.info({"event": "ended"})


def url_of(host: str, port: int) -> str:
    """Where a server that listens there is asked."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
