"""With RELAX_COUNT_TASKS set to a folder, SIGUSR2 has a process write its number of asyncio tasks there."""

import os
import signal

FOLDER = os.environ.get("RELAX_COUNT_TASKS")

if FOLDER:

    def count(_number: int, _frame: object) -> None:
        import asyncio

        try:
            tasks = len(asyncio.all_tasks(asyncio.get_running_loop()))
        except RuntimeError:
            return
        path = f"{FOLDER}/{os.getpid()}"
        with open(f"{path}.new", "w") as file:  # noqa: PTH123 nothing is imported before it is needed
            file.write(str(tasks))
        os.replace(f"{path}.new", path)  # noqa: PTH105

    signal.signal(signal.SIGUSR2, count)
