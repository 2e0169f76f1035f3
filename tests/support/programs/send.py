"""Prints how many seconds bytes take until they are there: python send.py ADDRESS PORT BYTES."""

import socket
import sys
import time

with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as connection:
    begin_s = time.perf_counter()
    connection.sendall(bytes(int(sys.argv[3])))
    connection.recv(1)
    print(time.perf_counter() - begin_s)
