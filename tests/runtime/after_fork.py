"""`python -m tests.runtime.after_fork VERSION`: list what a child of a zygote imports until its first answer.

Prints a JSON object. The client runs in the same process, so its imports count too.
"""

import asyncio
import json
import os
import sys


def main() -> None:
    """Import and fork like the zygote, and run a whole runtime in the child."""
    from runtime.app.settings import from_environment

    settings = from_environment()
    from runtime.app import preload

    control = preload.load()
    from kelvin.ipc.socket_directory import SocketDirectory
    from kelvin.process.log import configure_logging
    from kelvin.process.service_lifecycle import run_service
    from runtime.app import app, standby
    from runtime.app.zygote import count_threads, fork_detached
    from runtime.lifecycle.meter_writer import create_meter_page
    from tests.runtime.in_process import call_every_route

    threads = count_threads()
    reader, writer = os.pipe()
    if fork_detached() is not None:
        os.close(writer)
        with os.fdopen(reader, "rb") as report:
            sys.stdout.buffer.write(report.read())
        return
    before = set(sys.modules)
    standby.detach_process(kept_fds=(writer,))
    configure_logging("runtime-after-fork")
    directory = SocketDirectory(settings.run)
    listener = directory.listen("rt-after-fork.sock")
    meter = create_meter_page(settings.meters, "after-fork")

    async def life(stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            process = app.ReplicaProcess("after-fork", directory, listener, meter, control)
            tasks.create_task(app.serve(process, settings, stop))
            await call_every_route(directory, "rt-after-fork.sock", sys.argv[1])
            stop.set()

    run_service(life, None)
    maps = open("/proc/self/maps").read()  # noqa: SIM115
    facts = {
        "threads": threads,
        "imported": sorted(set(sys.modules) - before),
        "cuda": "libcuda.so" in maps,  # the CUDA driver; PyTorch with CUDA links only its runtime, libcudart.so
        "modules": len(before),
    }
    os.write(writer, json.dumps(facts).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
