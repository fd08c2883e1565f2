"""`kelvin push` as a process that tests can kill. It talks to a snapshotter's socket.

Arguments: the directory of the socket, then those of the command. It prints `begins` to standard error when it starts.
"""

import sys
from pathlib import Path

import httpx

from kelvin.cli.artifacts.push_command import push_command
from kelvin.contracts.serving.control_messages import Principal, Scope
from kelvin.contracts.wire import encode
from kelvin.ipc.socket_directory import SocketDirectory
from tests.snapshotter.unix import unix_transport


class SnapshotterTarget:
    """The CLI's context object, connected to the snapshotter's socket."""

    def __init__(self, directory: SocketDirectory) -> None:
        self._address = directory.address("snapshotter.sock")

    def client(self) -> httpx.Client:
        who = Principal(key_id="k1", tenant="acme", scopes=(Scope.ADMIN,))
        headers = {"x-kelvin-principal": encode(who).decode()}
        return httpx.Client(transport=unix_transport(self._address), base_url="http://snapshotter", headers=headers)


if __name__ == "__main__":
    target = SnapshotterTarget(SocketDirectory(Path(sys.argv[1])))
    print("begins", file=sys.stderr, flush=True)
    push_command.main(sys.argv[2:], obj=target)
