"""Errors across the wire: what a handler raised, and the exception that its caller sees."""

from __future__ import annotations

import traceback

from relax_rt.transport.rpc.errors import Refused, RelaxError, RemoteError
from relax_rt.transport.rpc.wire import TEXT_MAX_CHARS, TRACE_MAX_CHARS, Fault


def _name(kind: type[BaseException]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def fault_of(error: BaseException, request: int, where: str) -> Fault:
    """Describe an exception for its remote caller; texts are cut to a bound."""
    if isinstance(error, RemoteError):
        # A handler that called on: the caller learns where the error began, not where it passed through.
        return Fault(request, kind=error.kind, message=error.message, where=error.where, trace=error.trace)
    trace = "".join(traceback.format_exception(error))[-TRACE_MAX_CHARS:]
    if not isinstance(error, RelaxError):
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return Fault(request, kind=name, message=str(error)[:TEXT_MAX_CHARS], where=where, trace=trace)
    return Fault(
        request,
        kinds=tuple(_name(kind) for kind in type(error).__mro__ if issubclass(kind, RelaxError)),
        # A subclass may have passed anything for them, or nothing.
        what=str(getattr(error, "what", error))[:TEXT_MAX_CHARS],
        why=str(getattr(error, "why", ""))[:TEXT_MAX_CHARS],
        hint=str(getattr(error, "hint", ""))[:TEXT_MAX_CHARS],
        where=where,
        # What was refused on purpose is told by its own words, not by where in the server they stand.
        trace="" if isinstance(error, Refused) else trace,
    )


def error_of(fault: Fault) -> RelaxError:
    """The exception to raise for a fault: the same RelaxError class, or its nearest known base, or RemoteError.

    A subclass keeps `what`, `why` and `hint`; fields of its own do not cross. Where it was raised is a note on it.
    """
    if not fault.kinds:
        remote = RemoteError(fault.kind, fault.message, where=fault.where, trace=fault.trace)
        if fault.trace:
            remote.add_note(f"traceback at {fault.where}:\n{fault.trace.rstrip()}")
        return remote
    kind = next((known for name in fault.kinds if (known := _known_kind(name)) is not None), RelaxError)
    error = kind.__new__(kind)
    RelaxError.__init__(error, fault.what, why=fault.why, hint=fault.hint)
    error.add_note(f"raised by {fault.where}" + (f"\n{fault.trace}" if fault.trace else ""))
    return error


_kinds: dict[str, type[RelaxError]] = {}


def _known_kind(name: str) -> type[RelaxError] | None:
    if name not in _kinds:
        # Classes may have been defined since the last look.
        todo: list[type[RelaxError]] = [RelaxError]
        while todo:
            kind = todo.pop()
            _kinds[_name(kind)] = kind
            todo.extend(kind.__subclasses__())
    return _kinds.get(name)
