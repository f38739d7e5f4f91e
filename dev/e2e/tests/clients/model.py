"""Random requests through libnbd's Python binding, against a model in memory: any offset, any length, any kind.

Usage: model.py URI SEED STOP_FILE. Works until STOP_FILE exists, compares the whole disk, and prints what it has done.
Two connections take turns, so that each must see what the other has written.
"""

import json
import os
import random
import sys

import nbd

uri, seed, stop_file = sys.argv[1:]
chance = random.Random(int(seed))
connections = [nbd.NBD() for _ in range(2)]
for connection in connections:
    connection.connect_uri(uri)
size = connections[0].get_size()
model = bytearray(size)
done = {}


def place(length_max):
    """An offset and a length; half of them end or begin in the middle of a sector."""
    length = chance.randrange(1, length_max)
    offset = chance.randrange(0, size - length)
    if chance.random() < 0.5:
        offset -= offset % 4096
        length = max(512, length - length % 512)
    return offset, min(length, size - offset)


def read(connection):
    offset, length = place(1 << 16)
    found = connection.pread(length, offset)
    expected = model[offset : offset + length]
    if found != expected:
        wrong = next(index for index in range(length) if found[index] != expected[index])
        sys.exit(f"byte {offset + wrong} is {found[wrong]} instead of {expected[wrong]}, read {offset}+{length}")


def write(connection):
    offset, length = place(1 << 16)
    data = chance.randbytes(length)
    flags = nbd.CMD_FLAG_FUA if chance.random() < 0.05 else 0
    connection.pwrite(data, offset, flags)
    model[offset : offset + length] = data


def zero(connection):
    offset, length = place(1 << 18)
    flags = nbd.CMD_FLAG_NO_HOLE if chance.random() < 0.5 else 0
    connection.zero(length, offset, flags)
    model[offset : offset + length] = bytes(length)


def trim(connection):
    offset, length = place(1 << 18)
    connection.trim(length, offset)
    # Sterna promises more than the protocol: what was discarded reads as zeroes.
    model[offset : offset + length] = bytes(length)


def flush(connection):
    connection.flush()


kinds = [read] * 40 + [write] * 40 + [zero] * 9 + [trim] * 9 + [flush] * 2
while not os.path.exists(stop_file):
    kind = chance.choice(kinds)
    kind(chance.choice(connections))
    done[kind.__name__] = done.get(kind.__name__, 0) + 1
step = 1 << 20
for offset in range(0, size, step):
    length = min(step, size - offset)
    if connections[1].pread(length, offset) != model[offset : offset + length]:
        sys.exit(f"in the end, the disk differs within {offset}+{length}")
for connection in connections:
    connection.shutdown()
print(json.dumps(done))
