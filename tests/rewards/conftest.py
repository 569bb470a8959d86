"""A real HTTP server that a test tells how to behave."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Service:
    """Answers every POST by ``handler``, on a port of its own; may be stopped and started again."""

    def __init__(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.handler: Handler | None = None
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.at_once = self.most_at_once = 0
        self._runner: web.AppRunner | None = None

    async def up(self) -> None:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def down(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            self.requests.append(await request.json())
            self.headers.append(dict(request.headers))
            return await self.handler(request)
        finally:
            self.at_once -= 1


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def serving(service):
    """``serving(test)``: run an async test beside the service."""

    def run(test: Callable[[], Awaitable[None]]) -> None:
        async def beside() -> None:
            await service.up()
            try:
                await asyncio.wait_for(test(), 60)
            finally:
                await service.down()

        asyncio.run(beside())

    return run
