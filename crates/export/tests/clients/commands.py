import errno

SIZE = 64 << 20


def expect(code, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except nbd.Error as error:
        assert error.errnum == code, (function, error)
    else:
        raise AssertionError((function, arguments, "did not fail"))


h = nbd.NBD()
# The server's own checks are wanted, not those of the library.
h.set_strict_mode(0)
h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
h.connect_uri(uri("disk"))
assert h.get_size() == SIZE
assert h.get_structured_replies_negotiated()
assert h.can_meta_context(nbd.CONTEXT_BASE_ALLOCATION)

# Unaligned ranges, seen again with and without fragments.
data = bytes(1 + n % 251 for n in range(300001))
h.pwrite(data, 4095)
assert h.pread(len(data), 4095) == bytearray(data)
assert h.pread(len(data), 4095, flags=nbd.CMD_FLAG_DF) == bytearray(data)
chunks = []
h.pread_structured(1 << 20, 0, lambda part, offset, status, error: chunks.append((offset, len(part), status)))
assert chunks == [(0, 5 << 16, nbd.READ_DATA), (5 << 16, 11 << 16, nbd.READ_HOLE)], chunks

# Zeroes and trims of more than any payload.
h.zero(SIZE - 4096, 4096, flags=nbd.CMD_FLAG_FUA | nbd.CMD_FLAG_NO_HOLE)
assert h.pread(4096, 4096) == bytearray(4096)
assert h.can_fast_zero()
h.zero(SIZE - 4096, 4096, flags=nbd.CMD_FLAG_FAST_ZERO)
h.pwrite(data, 0, flags=nbd.CMD_FLAG_FUA)
h.trim(SIZE, 0, flags=nbd.CMD_FLAG_FUA)
assert h.pread(4096, 0) == bytearray(4096)
h.flush()
h.cache(1 << 20, 0)

# Allocation.
h.pwrite(b"x" * 8192, 8192)
found = []
h.block_status(1 << 20, 0, lambda context, offset, entries, error: found.append((context, offset, list(entries))))
hole = nbd.STATE_HOLE | nbd.STATE_ZERO
assert found == [("base:allocation", 0, [8192, hole, 8192, 0, (1 << 20) - 16384, hole])], found
found = []
h.block_status(
    1 << 20, 0, lambda context, offset, entries, error: found.append(list(entries)), flags=nbd.CMD_FLAG_REQ_ONE
)
assert found == [[8192, hole]], found

# What is wrong is told, and the connection lives on.
expect(errno.EINVAL, h.pread, 512, SIZE)
expect(errno.ENOSPC, h.pwrite, b"x" * 1024, SIZE - 512)
expect(errno.ENOSPC, h.zero, 1024, SIZE - 512)
expect(errno.EINVAL, h.trim, 1024, SIZE - 512)
expect(errno.EINVAL, h.block_status, 1024, SIZE - 512, lambda *_: 0)
expect(errno.EINVAL, h.pwrite, b"x" * 512, 0, flags=nbd.CMD_FLAG_DF)

# Many requests at a time, on several connections to one device.
others = [nbd.NBD() for _ in range(3)]
for other in others:
    other.connect_uri(uri("disk"))
for number, other in enumerate(others):
    cookies = [other.aio_pwrite(nbd.Buffer.from_bytearray(bytearray([number + 1]) * 4096), (number * 64 + n) * 4096) for n in range(64)]
    while other.aio_in_flight() > 0:
        other.poll(-1)
        for cookie in list(cookies):
            if other.aio_command_completed(cookie):
                cookies.remove(cookie)
h.flush()
for number in range(3):
    assert h.pread(64 * 4096, number * 64 * 4096) == bytearray([number + 1]) * (64 * 4096)

# A client without structured replies.
simple = nbd.NBD()
simple.set_request_structured_replies(False)
simple.connect_uri(uri("disk"))
assert not simple.can_df()
assert simple.pread(4096, 0) == bytearray([1]) * 4096
simple.set_strict_mode(0)
expect(errno.EINVAL, simple.pread, 1 << 20, SIZE - 512)
assert simple.pread(4096, 0) == bytearray([1]) * 4096

# A read-only export of the same device.
frozen = nbd.NBD()
frozen.set_strict_mode(0)
frozen.connect_uri(uri("frozen"))
assert frozen.is_read_only()
assert frozen.pread(4096, 0) == bytearray([1]) * 4096
for command in (lambda: frozen.pwrite(b"x" * 512, 0), lambda: frozen.zero(512, 0), lambda: frozen.trim(512, 0)):
    expect(errno.EPERM, command)
frozen.flush()

for handle in [h, simple, frozen, *others]:
    handle.shutdown()
