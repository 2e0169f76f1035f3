"""Prints whether a launcher and an own address are there: python reach.py LAUNCHER OWN."""

import socket
import sys

said = []
for name, address in zip(("launcher", "own address"), sys.argv[1:], strict=True):
    with socket.socket() as connection:
        connection.settimeout(30)
        try:
            connection.connect((address, 9))  # where nobody listens
        except ConnectionRefusedError:
            said.append(f"{name} refuses")
print(", ".join(said), end="")
