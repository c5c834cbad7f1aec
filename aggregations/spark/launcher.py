"""What Spark runs for Python where `aggregations.spark.python_ahead` serves: asks for a fork, or becomes Python itself.

Run as `python -IS launcher.py DIRECTORY -m MODULE ...`, so that it starts within milliseconds: it imports nothing of ours.
"""

import json
import os
import resource
import socket
import struct
import sys

SIZE = struct.Struct("!i")
"""Length of a request, and the exit code that answers it."""
STREAMS = (0, 1, 2)
_START_SECONDS = 120.0
"""Longest time until the fork runs: on its first run a machine compiles code, for half a minute or more."""


def main() -> None:
    """Have the module run in a fork that has this process's streams, environment and directory, and end with its exit code."""
    directory, *arguments = sys.argv[1:]
    if len(arguments) > 1 and arguments[0] == "-m":
        _ask(f"{directory}/{arguments[1]}", arguments[1:])
        _ask(f"{directory}/any", arguments[1:])
    os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 - no shell is wanted


def _ask(address: str, arguments: "list[str]") -> None:
    """End with the fork; return if there is none to be had."""
    try:
        about = {
            "environment": dict(os.environ),
            "directory": os.getcwd(),
            "arguments": arguments,
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        }
        body = json.dumps(about).encode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.settimeout(_START_SECONDS)
            channel.connect(address)
            socket.send_fds(channel, [SIZE.pack(len(body))], STREAMS)
            channel.sendall(body)
            if not channel.recv(1):
                return
            channel.settimeout(None)
            code = channel.recv(SIZE.size)
    except OSError:
        return
    os._exit(SIZE.unpack(code)[0] if len(code) == SIZE.size else 1)


if __name__ == "__main__":
    main()
