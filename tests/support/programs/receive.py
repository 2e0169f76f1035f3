"""Prints a port, takes so many bytes there, and says so: python receive.py ADDRESS BYTES."""

import socket
import sys

with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    with connection:
        left = int(sys.argv[2])
        while left:
            left -= len(connection.recv(min(left, 1 << 20)))
        connection.sendall(b".")
