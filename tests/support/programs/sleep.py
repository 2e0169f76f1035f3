"""Says that it has begun, and waits."""

import time

print("here", flush=True)
time.sleep(600)
