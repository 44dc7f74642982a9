"""The calling side of actors: a proxy with the actor's methods that routes each call by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from relax_rt.transport.rpc.client import DEFAULT_WINDOW, RemoteStream, check_options, describe
from relax_rt.transport.rpc.interface import Method, did_you_mean, methods_of


class Options(msgspec.Struct, frozen=True):
    """How a reference calls.

    Attributes:
        timeout_s: deadline of a call, and of each item of a stream.
        window: items of a stream that may be in flight.
    """

    timeout_s: float
    window: int = DEFAULT_WINDOW


class Route(Protocol):
    """Sends calls to a slot or to a member of a role."""

    name: str

    async def call(self, method: Method, values: tuple[Any, ...], timeout_s: float) -> Any: ...

    def stream(self, method: Method, values: tuple[Any, ...], timeout_s: float, window: int) -> RemoteStream[Any]: ...

    async def all(self, timeout_s: float) -> list[Route]: ...


class Reference:
    """A proxy with the methods of actor class `api`, created at their first use."""

    def __init__(self, route: Route, api: type, options: Options) -> None:
        check_options(f"a reference to {route.name}", options.timeout_s, options.window)
        methods_of(api)
        self.__dict__["_relax_of"] = (route, api, options)

    def __getattr__(self, name: str) -> Any:
        route, api, options = self.__dict__["_relax_of"]
        method = methods_of(api).get(name)
        if method is None:
            if not name.startswith("_") and callable(getattr(api, name, None)):
                raise AttributeError(
                    f"{api.__name__}.{name} cannot be called from afar: it is not a public async method"
                )
            raise AttributeError(f"{api.__name__} has no method {name}: {did_you_mean(name, methods_of(api))}")
        function = describe(
            _streamer(route, method, options) if method.stream else _caller(route, method, options), method
        )
        self.__dict__[name] = function
        return function

    def with_options(self, *, timeout_s: float | None = None, window: int | None = None) -> Reference:
        route, api, options = self.__dict__["_relax_of"]
        changed = Options(
            options.timeout_s if timeout_s is None else timeout_s, options.window if window is None else window
        )
        return Reference(route, api, changed)

    async def all(self) -> list[Reference]:
        route, api, options = self.__dict__["_relax_of"]
        return [Reference(one, api, options) for one in await route.all(options.timeout_s)]

    def __repr__(self) -> str:
        route, api, _ = self.__dict__["_relax_of"]
        return f"<reference to {api.__name__} {route.name}>"


def _caller(route: Route, method: Method, options: Options) -> Callable[..., Any]:
    timeout_s = options.timeout_s

    async def call(*args: Any, **kwargs: Any) -> Any:
        return await route.call(method, method.bind(args, kwargs), timeout_s)

    return call


def _streamer(route: Route, method: Method, options: Options) -> Callable[..., Any]:
    def stream(*args: Any, **kwargs: Any) -> RemoteStream[Any]:
        return route.stream(method, method.bind(args, kwargs), options.timeout_s, options.window)

    return stream
