"""What Spark runs for Python where `aggregations.spark.python_ahead` serves: asks for a fork, or becomes Python itself.

Run as `python -IS launcher.py DIRECTORY -m MODULE ...`, so that it starts within milliseconds: it imports nothing of ours.
"""

import json
import os
import socket
import struct
import sys

SIZE = struct.Struct("!i")
"""Length of a request, and the exit code that answers it."""
STREAMS = (0, 1, 2)


def main() -> None:
    """Have the module run in a fork that has this process's streams, environment and directory, and end with its exit code."""
    directory, *arguments = sys.argv[1:]
    if len(arguments) > 1 and arguments[0] == "-m":
        _ask(f"{directory}/{arguments[1]}", arguments[1:])
        _ask(f"{directory}/any", arguments[1:])
    os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 - no shell is wanted


def _ask(address: str, arguments: "list[str]") -> None:
    """End with the fork; return if there is none to be had."""
    body = json.dumps({"environment": dict(os.environ), "directory": os.getcwd(), "arguments": arguments}).encode()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.connect(address)
            socket.send_fds(channel, [SIZE.pack(len(body))], STREAMS)
            channel.sendall(body)
            if channel.recv(1):  # it runs
                code = channel.recv(SIZE.size)
                os._exit(SIZE.unpack(code)[0] if len(code) == SIZE.size else 1)
    except OSError:
        return


if __name__ == "__main__":
    main()
