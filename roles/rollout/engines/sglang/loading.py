"""How a version gets into an idle server, and is shown to be there whole: from a file, in requests, or by handles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from relax_rt.roles.rollout.engines.settings import SglangTable
from relax_rt.roles.rollout.engines.sglang import update
from relax_rt.roles.rollout.engines.sglang.client import Client, ServerRefused
from relax_rt.roles.rollout.engines.sglang.handles import Shown
from relax_rt.roles.rollout.engines.sglang.options import Device
from relax_rt.roles.rollout.engines.sglang.weights import PrivateCopy, Recipe, by_expert, checksums
from relax_rt.transport.rpc.errors import Corrupt, Refused
from relax_rt.transport.weights.source import WeightSource

NotShown = Callable[[int, str], object]
"""Told a version that does not go by handles though it was to, and why."""


class Held(msgspec.Struct, frozen=True):
    """A version and the checksums of a server that holds it."""

    version: int
    expected: dict[str, str]


class Loader:
    """Fetches versions into a private copy, and has the server take them from it as `sglang.weights` says.

    What goes wrong with handles costs only these where the server can say so: it takes the version from the file, in
    whole and verified as ever, and so the ones after it. A server that an attempt has ended cannot: `attempt` is there
    as long as one is under way, and a successor that finds it makes none.

    Args:
        folder: of the copy.
        attempt: a file's path; None: nothing is remembered.
    """

    def __init__(
        self, table: SglangTable, folder: Path, device: Device, attempt: Path | None, not_shown: NotShown
    ) -> None:
        self.copy = PrivateCopy(folder)
        self.recipes: dict[str, Recipe] = {}
        self._table, self._device, self._attempt, self._not_shown = table, device, attempt, not_shown
        self._handles, self._tried = table.weights == "handles", False
        self._shown: Shown | None = None
        if self._handles and attempt is not None and attempt.exists():
            self._give_up(0, "an incarnation before this one, or its server, ended while the server opened handles")

    def fetch(self, source: WeightSource) -> Held:
        """Fill the copy, and have it where the server can open it. Blocks.

        Raises:
            Gone, Corrupt, Refused, OutOfSpace: see PrivateCopy.fill.
        """
        self.hide()
        with self.copy.fill(source) as view:
            layout = by_expert(source.manifest.layout)
            held = Held(source.manifest.version, checksums(self.recipes, layout, view, self._device))
        self._show()
        return held

    def _show(self) -> None:
        """On a device it takes as long as the copy; where it fails, the next version is another try."""
        if not self._handles:
            return
        copy, self._tried = self.copy, True
        assert copy.layout is not None
        with copy.view as view:
            try:
                self._shown = Shown(by_expert(copy.layout), view, copy.path, copy.start, self._device)
            except Refused as error:
                self._not_shown(copy.version, str(error))

    def hide(self) -> None:
        """Give the memory back in which a version is shown."""
        self._tried = False
        if self._shown is not None:
            self._shown.close()
            self._shown = None

    async def load(self, client: Client, held: Held, *, flush: bool) -> None:
        """Have an idle server take what lies in the copy, and verify that it holds it.

        Args:
            flush: drop the prefix cache.

        Raises:
            Corrupt: it holds something else. ServerRefused, Unreachable, DeadlineExceeded: it did not take it.
        """
        if not self._tried:
            await asyncio.to_thread(self._show)
        try:
            if self._shown is None or not await self._load_shown(client, held, self._shown, flush=flush):
                await self._load_copy(client, held, flush=flush)
        finally:
            self.hide()

    async def _load_copy(self, client: Client, held: Held, *, flush: bool) -> None:
        limit = self._table.update_timeout_s
        if self._table.weights == "tensor":
            layout = self.copy.layout
            assert layout is not None
            # Not released here: a thread may still read from it when this is cancelled.
            view = self.copy.view
            await update.load_tensors(client, by_expert(layout), view, held.version, flush=flush, timeout_s=limit)
        else:
            await update.load_file(client, self.copy.folder, held.version, flush=flush, timeout_s=limit)
        await update.verify(client, held.expected, held.version, limit)

    async def _load_shown(self, client: Client, held: Held, shown: Shown, *, flush: bool) -> bool:
        limit = self._table.update_timeout_s
        try:
            message = await asyncio.to_thread(shown.message)
            self._mark()
            await update.load_handles(client, message, held.version, flush=flush, timeout_s=limit)
            await update.verify(client, held.expected, held.version, limit)
        except (ServerRefused, Corrupt, Refused) as error:
            self._unmark()
            self._give_up(held.version, f"{error.what}: {error.why}")
            return False
        self._unmark()
        return True

    def _give_up(self, version: int, why: str) -> None:
        self._handles = False
        self._not_shown(version, f"{why}; handles are tried no more")

    def _mark(self) -> None:
        if self._attempt is not None:
            self._attempt.touch(mode=0o600)

    def _unmark(self) -> None:
        if self._attempt is not None:
            self._attempt.unlink(missing_ok=True)

    def close(self) -> None:
        """Give all memory back."""
        self.hide()
        self.copy.close()
