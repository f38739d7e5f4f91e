import errno

h = nbd.NBD()
h.set_opt_mode(True)
h.connect_uri(uri("disk"))
names = []
h.opt_list(lambda name, description: names.append((name, description)))
assert names == [("disk", "a disk for tests"), ("frozen", "a frozen for tests")], names

contexts = []
h.add_meta_context("base:")
h.opt_list_meta_context(contexts.append)
assert contexts == ["base:allocation"], contexts
h.clear_meta_contexts()
h.add_meta_context("x-nobody:knows")
contexts = []
h.opt_list_meta_context(contexts.append)
assert contexts == [], contexts

h.set_export_name("frozen")
h.set_full_info(True)
h.opt_info()
assert h.is_read_only()
assert h.get_canonical_export_name() == "frozen"
assert h.get_export_description() == "a frozen for tests"
assert h.get_block_size(nbd.SIZE_MINIMUM) == 1
assert h.get_block_size(nbd.SIZE_PREFERRED) == 4096
assert h.get_block_size(nbd.SIZE_MAXIMUM) == 32 << 20

h.set_export_name("nobody")
try:
    h.opt_info()
except nbd.Error as error:
    assert error.errnum == errno.ENOENT, error
else:
    raise AssertionError("an export that does not exist was described")

h.set_export_name("disk")
h.clear_meta_contexts()
h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
h.opt_go()
assert not h.is_read_only()
assert h.can_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
h.shutdown()

# TLS is refused, and a client that can do without goes on.
h = nbd.NBD()
h.set_tls(nbd.TLS_ALLOW)
h.connect_uri(uri("disk"))
assert not h.get_tls_negotiated()
h.shutdown()

h = nbd.NBD()
h.set_opt_mode(True)
h.connect_uri(uri("disk"))
h.opt_abort()
