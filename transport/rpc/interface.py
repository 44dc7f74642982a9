"""Interfaces: classes of `async def` methods whose annotations are the contract between two processes.

A method that yields (`async def … -> AsyncIterator[T]`, in a Protocol plainly `def … -> AsyncIterator[T]`) is answered
by a stream of items. A class that is more than an interface says by `__relax_interface__` which of its methods are one.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

import msgspec

from relax_rt.transport.rpc import wire
from relax_rt.transport.rpc.errors import ProtocolError, Refused, did_you_mean

F = TypeVar("F", bound=Callable[..., Any])

_IDEMPOTENT = "__relax_idempotent__"
_TELL = "__relax_tell__"
_EAGER = "__relax_eager__"
_STREAMS = (AsyncIterator, AsyncGenerator, AsyncIterable)


def idempotent(fn: F) -> F:
    """Mark a method of an interface: carrying it out twice does no harm, so it is sent again after a reconnect."""
    setattr(fn, _IDEMPOTENT, True)
    return fn


def eager(fn: F) -> F:
    """Mark an implementation whose calls rarely wait: the server runs them without a task up to their first await.

    Until then the call runs in whatever read its request: over a unix socket outside of any task, over ZeroMQ in the
    task that reads for all peers. So use neither `asyncio.timeout` nor `asyncio.current_task` there: they fail, or
    cancel that reader. Context variables set there belong to the connection, and its later calls see them.
    """
    setattr(fn, _EAGER, True)
    return fn


def is_eager(fn: Callable[..., Any]) -> bool:
    """Whether an implementation is marked as eager."""
    return getattr(fn, _EAGER, False)


def tell(fn: F) -> F:
    """Mark a method of an interface as one-way: it returns None as soon as it is written, and may be lost.

    An error of the handler is logged and counted at the server, never reported to the caller.
    """
    setattr(fn, _TELL, True)
    return fn


@dataclasses.dataclass(frozen=True)
class Method:
    """One method of an interface, with the codecs of its annotations.

    Attributes:
        api, name: how it is called on the wire.
        parameters: names, in the order of the wire; keyword_only of them, at the end, are passed by name.
        idempotent, one_way: its marks.
        stream: it yields items; `result` decodes one of them.
        wait_index: place of the parameter named wait_s; -1: there is none.
    """

    api: str
    name: str
    signature: inspect.Signature
    parameters: tuple[str, ...]
    keyword_only: int
    idempotent: bool
    one_way: bool
    stream: bool
    arguments: msgspec.msgpack.Decoder[Any]
    result: msgspec.msgpack.Decoder[Any]
    wait_index: int = -1

    def __str__(self) -> str:
        return f"{self.api}.{self.name}"

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments in the order of the wire, defaults filled in.

        Raises:
            TypeError: the call does not fit the signature, as for any Python function.
        """
        if not kwargs and not self.keyword_only and len(args) == len(self.parameters):
            return args
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments[name] for name in self.parameters)

    def wait_s(self, values: tuple[Any, ...]) -> float:
        """The argument named wait_s, by which the call's deadline is extended; 0 without one."""
        if self.wait_index < 0:
            return 0.0
        value = values[self.wait_index]
        return max(0.0, float(value)) if isinstance(value, int | float) else 0.0

    def encode_arguments(self, values: tuple[Any, ...]) -> bytes:
        """Raises: Refused, when a value has no place in a message."""
        return wire.encode(values, f"arguments of {self}")

    def decode_arguments(self, raw: msgspec.Raw) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments for the implementation.

        Raises:
            Refused: they are not what the annotations say.
        """
        try:
            values = self.arguments.decode(raw)
        except wire.UNDECODABLE as error:
            raise Refused(f"arguments of {self}", why=self._named(str(error)), hint=f"it takes {self.takes}") from error
        if not self.keyword_only:
            return values, {}
        cut = len(self.parameters) - self.keyword_only
        return values[:cut], dict(zip(self.parameters[cut:], values[cut:], strict=True))

    @property
    def takes(self) -> str:
        """Its parameters with their types, for messages."""
        shown = []
        for name, parameter in self.signature.parameters.items():
            kind = parameter.annotation
            shown.append(f"{name}: {kind if isinstance(kind, str) else inspect.formatannotation(kind)}")
        return ", ".join(shown) or "nothing"

    def _named(self, message: str) -> str:
        """msgspec's message with the argument's name in place of its position: ``$[1].x`` is ``point.x``."""

        def name(place: re.Match[str]) -> str:
            index = int(place[1])
            return f"`{self.parameters[index]}" if index < len(self.parameters) else place[0]

        return re.sub(r"`\$\[(\d+)\]", name, message)

    def decode_result(self, raw: msgspec.Raw) -> Any:
        """Raises: ProtocolError, when the result is not what the annotation says."""
        try:
            return self.result.decode(raw)
        except wire.UNDECODABLE as error:
            raise ProtocolError(
                f"result of {self}", why=str(error), hint="the implementation does not keep to its annotation"
            ) from error


def methods_of(api: type) -> dict[str, Method]:
    """The methods of an interface by name: every public one of the class and its bases, or those it names itself.

    Raises:
        Refused: a public method is not `async def`, or an annotation is missing or cannot cross the wire.
    """
    return _methods_of(api)


@functools.cache
def _methods_of(api: type) -> dict[str, Method]:
    own = getattr(api, "__relax_interface__", None)
    names = own() if own is not None else [name for name in dir(api) if not name.startswith("_")]
    methods: dict[str, Method] = {}
    for name in names:
        function = inspect.getattr_static(api, name)
        if inspect.isfunction(function):
            methods[name] = _method(api.__name__, name, function)
    if not methods:
        raise Refused(f"interface {api.__name__}", why="it has no public `async def` method")
    return methods


def _item_type(label: str, function: Callable[..., Any], result: Any) -> Any:
    """What a stream yields; None when the method is no stream.

    Raises:
        Refused: it is neither a coroutine function nor a stream.
    """
    streams = typing.get_origin(result) in _STREAMS or result in _STREAMS
    if inspect.iscoroutinefunction(function):
        if streams:
            raise Refused(label, why="it is to give a stream and yields nothing", hint="in a Protocol, write `def`")
        return None
    if not streams:
        if inspect.isasyncgenfunction(function):
            raise Refused(label, why=f"it yields, and its result is {result}", hint="annotate it `-> AsyncIterator[…]`")
        raise Refused(label, why="it is not `async def`")
    items = typing.get_args(result)
    if not items:
        raise Refused(label, why="its annotation does not say what it yields", hint="write `AsyncIterator[str]`")
    return items[0]


def _method(api: str, name: str, function: Callable[..., Any]) -> Method:
    label = f"method {api}.{name}"
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise Refused(
            label, why=f"an annotation cannot be resolved: {error}", hint="import it outside TYPE_CHECKING"
        ) from error
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise Refused(label, why=f"it takes {parameter}", hint="name every parameter")
        if parameter.name not in hints:
            raise Refused(label, why=f"its parameter {parameter.name} has no annotation")
    if "return" not in hints:
        raise Refused(label, why="its result has no annotation")
    one_way = getattr(function, _TELL, False)
    result = hints["return"]
    item = _item_type(label, function, result)
    if one_way and result is not type(None):
        raise Refused(label, why="a one-way method has no result", hint="annotate it `-> None`")
    names = tuple(p.name for p in parameters)
    # Built at run time, so it is spelled as a call: tuple[int, str] for (int, str), tuple[()] for none.
    kinds: Any = types.GenericAlias(tuple, tuple(hints[n] for n in names))
    return Method(
        api=api,
        name=name,
        signature=signature.replace(parameters=parameters),
        parameters=names,
        keyword_only=sum(p.kind is p.KEYWORD_ONLY for p in parameters),
        idempotent=getattr(function, _IDEMPOTENT, False),
        one_way=one_way,
        stream=item is not None,
        arguments=wire.decoder_for(kinds, f"arguments of {label}"),
        result=wire.decoder_for(result if item is None else item, f"result of {label}"),
        wait_index=names.index("wait_s") if "wait_s" in names else -1,
    )


def check_implementation(api: type, implementation: object) -> None:
    """Raises: Refused, when the object lacks a method of the interface or has one that is not `async def`."""
    for name, method in methods_of(api).items():
        candidate = getattr(implementation, name, None)
        if candidate is None:
            raise Refused(f"offering {api.__name__}", why=f"{type(implementation).__name__} has no method {name}")
        if method.stream:
            if inspect.iscoroutinefunction(candidate):
                raise Refused(f"offering {api.__name__}", why=f"{type(implementation).__name__}.{name} does not yield")
        elif not inspect.iscoroutinefunction(candidate):
            raise Refused(f"offering {api.__name__}", why=f"{type(implementation).__name__}.{name} is not `async def`")


def name_hint(name: str, known: Iterable[str]) -> str:
    """A hint that names the nearest known name, and what there is."""
    names = sorted(known)
    there = f"there is {', '.join(names[:20])}" if names else "there is none"
    return f"{did_you_mean(name, names)} {there}".lstrip()
