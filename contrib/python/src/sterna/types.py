"""What the API takes and answers. Fields that may be left out are NotRequired.

Made by generate.py from docs/openapi.json: do not change it by hand.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class Access(TypedDict):
    """Who may use the API over TLS, and where."""

    # The keys, by name.
    grants: list[Grant]
    # Digest of the daemon's public key, 64 hexadecimal digits: what clients know it by. null: it does not listen.
    key: NotRequired[str | None]
    # Where the daemon listens, as the configuration says; null: nowhere.
    listen: NotRequired[str | None]
    # Why nobody is let in; null if nothing is wrong.
    problem: NotRequired[str | None]


class Activity(TypedDict):
    """What guests did between the latest two looks at a volume."""

    # Bytes read a second.
    bytes_read_per_second: float
    # Bytes written a second.
    bytes_written_per_second: float
    # Flushes a second.
    flushes_per_second: float
    # Latency that half of the requests did not exceed, in microseconds; null if there was no request.
    median_us: NotRequired[int | None]
    # Latency that 99 of 100 requests did not exceed.
    p99_us: NotRequired[int | None]
    # Reads a second.
    reads_per_second: float
    # Requests in flight at this moment.
    requests_in_flight: int
    # Writes, discards and zeroing a second.
    writes_per_second: float


class AdoptVm(TypedDict):
    """Takes over disks of a VM that somebody else has started."""

    # Its disks, by the names of their devices or nodes, or by libvirt's (`vda`); none: all that can be written.
    disks: NotRequired[list[str]]
    # The domain of libvirt (`qemu:///system`), by its name or UUID: libvirt copies its disks to new volumes. null: it
    # is named by its monitor.
    libvirt: NotRequired[str | None]
    # Absolute path of libvirt's socket; null: the usual one.
    libvirt_socket: NotRequired[str | None]
    # Absolute path of its monitor's socket (QMP). Nobody else may be connected to it meanwhile. null: it is a domain of
    # libvirt.
    monitor: NotRequired[str | None]
    # The store of the new volumes of a domain of libvirt; null: the only one.
    store: NotRequired[str | None]


# How much of its space a new image takes at once.
Allocation = Literal[
    "thin",
    "thick",
]


class ClientsElsewhere(TypedDict):
    """Clients of a volume that are connected at another host."""

    # How many there are.
    clients: int
    # The host that they are at, by name.
    host: str


class ConnectionAtWork(TypedDict):
    """A connection with another host, and what goes over it."""

    # Bytes received a second.
    bytes_received_per_second: NotRequired[float | None]
    # Bytes sent a second; null: nobody has looked a moment ago.
    bytes_sent_per_second: NotRequired[float | None]
    # The connection.
    connection: PeerConnection


class Decisions(TypedDict):
    """What was decided, counted."""

    # Bytes that followed after the handover (`post-copy`, `three-phase`), as far as the source has sent them since its
    # start.
    bytes_followed: NotRequired[int]
    # Of these, those that a guest waited for at the target: pulled. The others came in the background.
    bytes_pulled: NotRequired[int]
    # Chunks that were copied.
    chunks_copied: int
    # Of these, those copied a second time at once, because guests wrote to them meanwhile.
    chunks_copied_again: int
    # Longest that one was held, in milliseconds.
    held_longest_ms: float
    # Errors of the source.
    source_faults: int
    # How often mirroring was suspended.
    suspensions: int
    # Errors of the target.
    target_faults: int
    # Flushes of the target before the handover.
    target_flushes: int
    # Mirrored writes that were answered before the target had answered.
    writes_answered_late: int
    # Of all these, those that were held for a while.
    writes_held: int
    # Guest writes of which a part went to both stores.
    writes_in_part: int
    # Guest writes that went to both stores in whole.
    writes_mirrored: int
    # Guest writes that went to the source only, to be copied later.
    writes_source_only: int


class ErrorBody(TypedDict):
    """Body of every answer that is no success."""

    # The error.
    error: ErrorDetail


# Causes of errors. Within a version of the API codes are only added.
ErrorCode = Literal[
    "volume_not_found",
    "store_not_found",
    "migration_not_found",
    "host_not_found",
    "vm_not_found",
    "image_not_found",
    "replica_not_found",
    "grant_not_found",
    "route_not_found",
    "method_not_allowed",
    "volume_exists",
    "vm_exists",
    "vm_wrong_state",
    "vm_unsuitable",
    "vm_failed",
    "grant_exists",
    "identity_exists",
    "no_identity",
    "target_exists",
    "target_too_small",
    "cannot_shrink",
    "cannot_grow",
    "same_store",
    "store_occupied",
    "place_fenced",
    "not_half_made",
    "no_space",
    "too_many_files",
    "already_migrating",
    "not_migrating",
    "too_late",
    "cannot_retry",
    "queue_full",
    "not_prepared",
    "ticket_refused",
    "volume_in_use",
    "volume_busy",
    "volume_unavailable",
    "image_in_use",
    "image_unsuitable",
    "not_permitted",
    "invitation_refused",
    "host_unreachable",
    "host_refused",
    "host_in_use",
    "invalid_request",
    "request_too_large",
    "shutting_down",
    "journal_failed",
    "storage_failed",
    "internal",
    "unknown",
]


class ErrorDetail(TypedDict):
    """One error."""

    # The cause, for programs.
    code: ErrorCode
    # The cause, and what to do next, for people. Its words may change at any time.
    message: str


class ExportSettings(TypedDict):
    """How a volume is offered to its clients."""

    # Connections at a time; null: what the configuration says.
    connections_max: NotRequired[int | None]
    # Address and port where the volume is served over TCP besides its unix socket, for example `192.0.2.1:10809`; null:
    # nowhere.
    listen: NotRequired[str | None]
    # Clients may only read.
    read_only: NotRequired[bool]
    # Mode of its unix socket in octal, for example `0660`; null: that of the configuration.
    socket_mode: NotRequired[str | None]
    # Owner of its unix socket, `USER:GROUP`; null: that of the configuration.
    socket_owner: NotRequired[str | None]


# What a file in a store is.
FileRole = Literal[
    "volume",
    "backing",
    "target",
    "replica",
    "stale-replica",
    "half-made",
    "unsettled",
    "unclaimed",
    "other",
]


class Grant(TypedDict):
    """A key that may use the API over TLS."""

    # When it was granted, in milliseconds since 1970.
    granted_unix_ms: int
    # Until when the invitation can be redeemed, in milliseconds since 1970; null: it was, or there is none.
    invited_until_unix_ms: NotRequired[int | None]
    # Digest of the public key, 64 hexadecimal digits; null until the invitation is redeemed.
    key: NotRequired[str | None]
    # Whose key it is, as the audit log names him.
    name: str
    # What he may do.
    role: Role


class GuestFigures(TypedDict):
    """What guests did in a longer time."""

    # Bytes read and written a second.
    bytes_per_second: float
    # Requests that failed.
    errors: int
    # Requests a second.
    iops: float
    # Latency that half of the requests did not exceed, in microseconds; null if there was no request.
    median_us: NotRequired[int | None]
    # Latency that 99 of 100 requests did not exceed.
    p99_us: NotRequired[int | None]
    # How long it was, in seconds.
    seconds: float
    # The longest latency.
    worst_us: NotRequired[int | None]


# Where the guest runs.
GuestLocation = Literal[
    "source",
    "target",
    "unknown",
]


class Health(TypedDict):
    """A daemon that is alive."""

    # Its process.
    pid: int
    # When it began to serve, in milliseconds since 1970.
    started_unix_ms: int


class HistorySample(TypedDict):
    """One stretch of time."""

    # When it began.
    at_ms: float
    # Bytes that were copied to the target.
    bytes_copied: int
    # Bytes of guest writes that the target took.
    bytes_mirrored: int
    # Bytes that the target still missed at its end; null: that was not recorded, or the migration was not under way.
    bytes_missing: NotRequired[int | None]
    # Bytes that guests read.
    bytes_read: int
    # Bytes that guests wrote.
    bytes_written: int
    # Bytes that were found to be zero.
    bytes_zero: int
    # Guest requests that failed.
    errors: int
    # Guest flushes that ended in it.
    flushes: int
    # How long it was.
    length_ms: float
    # Latency that half of the requests did not exceed, in microseconds; null if there was no request.
    median_us: NotRequired[int | None]
    # Latency that 99 of 100 requests did not exceed.
    p99_us: NotRequired[int | None]
    # Guest reads that ended in it.
    reads: int
    # The longest latency.
    worst_us: NotRequired[int | None]
    # Guest writes, discards and zeroing that ended in it.
    writes: int


class Host(TypedDict):
    """The daemon that answers."""

    # Absolute path of the folder that holds its journal.
    data_dir: str
    # The I/O engine that was asked for: `auto`, `io_uring` or `threads`. `auto` is decided for each volume.
    engine: str
    # Number of migrations under way.
    migrations_running: int
    # Its process.
    pid: int
    # Absolute path of the folder that holds the sockets of its volumes.
    runtime_dir: str
    # When it began to serve, in milliseconds since 1970.
    started_unix_ms: int
    # Its version.
    version: str
    # Number of volumes.
    volumes: int


class Identity(TypedDict):
    """Who the daemon's host is to others."""

    # Digest of its public key, 64 hexadecimal digits: what other hosts know it by.
    id: str
    # Addresses that it listens on for other hosts.
    listening: list[str]
    # What people call it.
    name: str
    # Why it cannot be reached or call others; null if it can.
    problem: NotRequired[str | None]
    # The latest connections that were refused, oldest first, each with its reason.
    refused: NotRequired[list[str]]


# What was done with the image of a removed volume.
ImageFate = Literal[
    "deleted",
    "kept",
    "elsewhere",
]


# How the bytes of a volume lie in its image.
ImageFormat = Literal[
    "raw",
    "qcow2",
]


# What an image is.
ImageKind = Literal[
    "file",
    "device",
    "nbd",
]


class ImageLocation(TypedDict):
    """An image."""

    # How the volume's bytes lie in it.
    format: NotRequired[ImageFormat]
    # Absolute path of the file or device, or the URI of the export.
    image: str
    # What it is.
    kind: NotRequired[ImageKind]
    # Name of the store; null for an image that is served in place.
    store: NotRequired[str | None]


class Invitation(TypedDict):
    """An invitation: with it one other host can be paired with this one."""

    # Addresses that the other host can call, the best first.
    addresses: list[str]
    # Until when it is good, in milliseconds since 1970.
    expires_unix_ms: int
    # What the other host is given. **It holds a secret.**
    token: str


class JoinHost(TypedDict):
    """Redeems another host's invitation."""

    # Address and port of the other host; null: those in the token.
    address: NotRequired[str | None]
    # Whether the other host may bring VMs, which run on this one; null: as before, and not if it was not known.
    allow_machines: NotRequired[bool | None]
    # The token that the other host has made.
    token: str


# Why the image of a removed volume was kept although nobody asked for that.
KeptBecause = Literal[
    "given",
    "unknown",
]


class MachineDowntime(TypedDict):
    """How long a VM stood still, as its source saw it; the parts add up to the whole."""

    # Its disks' handover, and its first step at the target: the rest.
    handover_ms: float
    # The last of its memory and its devices: until it was loaded at the target.
    memory_ms: float
    # From its stand at the source until it was heard that it runs at the target, in milliseconds.
    total_ms: float


class MachineMove(TypedDict):
    """A VM that goes along with its volumes."""

    downtime: NotRequired[MachineDowntime | None]
    memory: NotRequired[MemoryMove | None]


# When a VM that moves may run at the other host.
Memory = Literal[
    "pre-copy",
    "post-copy",
]


class MemoryMove(TypedDict):
    """How far a VM's memory is."""

    # Bytes a second that are sent.
    bytes_per_second: int
    # Bytes a second that the guest writes.
    dirty_bytes_per_second: int
    # Whether the VM ran at the target before all of it was there (post-copy).
    post_copy: NotRequired[bool]
    # What must still be sent, as far as it is known, in bytes.
    remaining_bytes: int
    # Rounds over what the guest has written.
    rounds: int
    # What was sent so far, in bytes: what the guest writes is sent again.
    sent_bytes: int
    # Streams that carry it.
    streams: NotRequired[int]
    # How much of their time is taken from the guest's processors, in percent, so that it writes less.
    throttle_percent: int
    # All of it, in bytes.
    total_bytes: int


class MigrateVolume(TypedDict):
    """Moves a volume to another store."""

    # How much of its space the new image takes at once.
    allocation: NotRequired[Allocation]
    # Bytes a second that may be copied, at least 1; null: as fast as it goes. Guest writes are not slowed.
    bandwidth_bytes_per_second: NotRequired[int | None]
    format: NotRequired[ImageFormat | None]
    # Copies everything, also if the other host keeps an image of an earlier stay of the volume.
    full: NotRequired[bool]
    # Of `Strategy::Tracking`, and of `Strategy::Mirror` to another host: copies blocks that guests write again and
    # again as all others, rather than put them off; only for comparison.
    ignore_hot_blocks: NotRequired[bool]
    # Lets the new image, which is qcow2, stand on the same backing file as the present one: only what the present one
    # has itself is copied. Otherwise the new image has everything.
    keep_chain: NotRequired[bool]
    # Keeps the source's image afterwards, under another name.
    keep_source: NotRequired[bool]
    # How long a VM may stand still, or, if a volume is tracked, its guests may be held at the handover, in
    # milliseconds; null: 300, of a volume 500.
    max_downtime_ms: NotRequired[int | None]
    # When a VM may run at the other host.
    memory: NotRequired[Memory]
    # Streams that carry a VM's memory, 1 to 16; null: as many as are worth it. It is one where either hypervisor cannot
    # do several.
    memory_streams: NotRequired[int | None]
    # What the name is of, where a volume and a VM have the same.
    named: NotRequired[Named]
    # Of `Strategy::Tracking`: has the next round copy also what was written before this round has come to it, and will
    # copy it anyway; only for comparison.
    not_incremental: NotRequired[bool]
    # Of `Strategy::ThreePhase`: how many rounds at most; none: 4.
    rounds: NotRequired[int | None]
    # Goes on serving the volume here, for good, from the other host's store; otherwise only clients that stay connected
    # are served here, until they leave.
    serve_here: NotRequired[bool]
    # Whether blocks are written straight to the other host's store where this host can open it, too.
    shared_target: NotRequired[SharedTarget]
    # How volumes are copied while their guests write.
    strategy: NotRequired[Strategy]
    # Name of the target store, or `HOST:STORE` of another host; `HOST` alone: its only store.
    to: str
    # Names of more volumes that move in the same migration, to another host: all of them, or none.
    together_with: NotRequired[list[str]]


class Migration(TypedDict):
    """A migration, under way or ended."""

    # Number of the current try at the handover, 0 before the first; the number of tries once it has ended.
    attempt: int
    # Bytes that the mover has written to the target.
    bytes_copied: int
    # Bytes of guest writes that went to the target as well.
    bytes_mirrored: int
    # Bytes that the target still misses; null: that is not known, as when the source of volumes that are filled was
    # restarted.
    bytes_missing: NotRequired[int | None]
    # Bytes written to the target: copied and mirrored.
    bytes_moved: int
    # Bytes a second that were synchronised of late; 0 once it has ended.
    bytes_per_second: float
    # Bytes found to be zero, and not written.
    bytes_zero: int
    # Grows with every change; what `after` refers to. It begins anew when the daemon does.
    change: int
    # When it ended, in milliseconds since 1970; null while it is under way.
    ended_unix_ms: NotRequired[int | None]
    # Cause of a failure, for programs: `target-full`, `target-faulty`, `target-hung`, `source-unreadable`, `handover-
    # refused`, `daemon-stopped`, `host-refused`, `promoted-elsewhere`, `given-up`, `machine-stayed`, `not-begun`,
    # `hook-failed`, `not-converging` or `internal`.
    failure: NotRequired[str | None]
    # Part of the copying that is done, 0 to 1; never falls, and is 1 only when nothing is missing.
    fraction: float
    # Whether a daemon that ended in order has interrupted it: the next one does it once more, and `retried_as` says by
    # which number.
    goes_on: NotRequired[bool]
    # Where the guest runs.
    guest: GuestLocation
    # Its identity, for example `m7`.
    id: str
    # Whether the source's image is kept afterwards.
    keep_source: bool
    machine: NotRequired[MachineMove | None]
    # How it ended, and why, for people.
    message: NotRequired[str | None]
    # What is being done.
    phase: Phase
    queue: NotRequired[QueuePlace | None]
    remaining_seconds: NotRequired[RemainingSeconds | None]
    replica: NotRequired[ReplicaUsed | None]
    # The latest migration that does it once more.
    retried_as: NotRequired[str | None]
    # The migration that it does once more (`migration retry`), for example `m3`.
    retry_of: NotRequired[str | None]
    # The rounds that have ended, if it is copied in rounds; those of a migration that ended before the daemon's start
    # are in its history.
    rounds: NotRequired[list[Round]]
    # Seconds since it began, or that it took.
    seconds: float
    # Whether blocks go straight to a store that both hosts can open, and the link carries control only. `false` for as
    # long as that is not proved, also between two stores of this host.
    shared: NotRequired[bool]
    # Where the volume was.
    source: ImageLocation
    # When it began, in milliseconds since 1970.
    started_unix_ms: int
    # How it stands.
    state: MigrationState
    strategy: NotRequired[Strategy | None]
    # Why guest writes do not go to the target for the time being; null while they do.
    suspended: NotRequired[str | None]
    switch_over: NotRequired[SwitchOver | None]
    # Where it goes.
    target: ImageLocation
    # What `volume promote` at the other host accepts if this host is not heard there any more; null unless the volume
    # is released to it and it has not answered.
    ticket: NotRequired[str | None]
    # Name of the volume; it may be gone by now.
    volume: str
    waiting_for: NotRequired[WaitingFor | None]


class MigrationAtWork(TypedDict):
    """A migration, and what was recorded of it a moment ago."""

    # The migration.
    migration: Migration
    # Whether there is a recording of it, so that its report has more than the journal knows.
    recorded: bool
    # The latest samples of its recording, some seconds' worth; empty if it has ended, or is recorded at the other host.
    samples: list[HistorySample]


class MigrationHistory(TypedDict):
    """A migration and what was recorded of it. All times are in milliseconds since it began, negative before that."""

    # The migration as it stands.
    migration: Migration
    recording: NotRequired[Recording | None]


class MigrationPlan(TypedDict):
    """What a migration would do, as far as it can be seen before it begins."""

    # Bytes that would be copied at most, besides what guests write meanwhile: of volumes and of memory.
    bytes_max: int
    # How fast it would be copied, in bytes a second; null: nobody knows.
    bytes_per_second: NotRequired[int | None]
    # Whether it would begin now, or wait for its turn; false if anything of `refusals` is in the way.
    can_begin: bool
    # The other host; null: it stays at this one.
    host: NotRequired[str | None]
    # The connections that would carry it; none on one host.
    links: NotRequired[list[PlannedLink]]
    machine: NotRequired[PlannedMachine | None]
    # The volume or the VM.
    name: str
    queue: NotRequired[QueuePlace | None]
    rate: NotRequired[RateOrigin | None]
    # Why it would be refused, each with what to do.
    refusals: list[ErrorDetail]
    # How long the copying would take at that rate, in seconds.
    seconds: NotRequired[float | None]
    # What would move, each to where it would be.
    volumes: list[PlannedVolume]
    # What it costs besides time, what would stay behind, and what may go wrong.
    warnings: list[str]


# How a migration stands.
MigrationState = Literal[
    "queued",
    "running",
    "paused",
    "moved",
    "failed",
    "cancelled",
    "handed-back",
]


class MissingRange(TypedDict):
    """A part of a volume that is missing."""

    # How long it is.
    length_bytes: int
    # Where it begins.
    offset_bytes: int


# What a name is of.
Named = Literal[
    "any",
    "volume",
    "vm",
]


class NewGrant(TypedDict):
    """Lets somebody use the API over TLS."""

    # Digest of his public key, 64 hexadecimal digits; null: he is invited, and brings one when he redeems that.
    key: NotRequired[str | None]
    # How long the invitation is good, in seconds.
    lifetime_s: NotRequired[int]
    # What he is called: letters, digits, '.', '-' and '_'.
    name: str
    # What he may do.
    role: Role


class NewIdentity(TypedDict):
    """Makes the host's identity."""

    # What people call the host: letters, digits, '.', '-' and '_'.
    name: str


class NewInvitation(TypedDict):
    """Asks for an invitation."""

    # Whether the host that redeems it may bring VMs, which run on this one.
    allow_machines: NotRequired[bool]
    # How long it is good, in seconds.
    lifetime_s: int


class NewVm(TypedDict):
    """Adds a VM."""

    # Its definition in TOML: the command that starts it, its disks and its files.
    definition: str
    # Its name: letters, digits, '.', '_' and '-'.
    name: str


class NewVolume(TypedDict):
    """Makes a volume."""

    # How it is offered to its clients.
    export: NotRequired[ExportSettings]
    # Its name: 1 to 64 letters, digits, `.`, `_` and `-`, beginning with a letter or digit.
    name: str
    # Where its bytes come from.
    source: VolumeSource


class NewlyGranted(TypedDict):
    """What was granted."""

    # The grant.
    grant: Grant
    # Where the daemon listens, as the configuration says.
    listen: NotRequired[str | None]
    # What he is to be given; null: his key is known. **It holds a secret.**
    token: NotRequired[str | None]


class Overview(TypedDict):
    """The host at one instant. A daemon takes it at most once a second, however many ask; those in between get the
    latest.
    """

    # The daemon.
    host: Host
    # Migrations that wait or are under way, and the latest that have ended, oldest first; without tickets.
    migrations: list[MigrationAtWork]
    # How many migrations are remembered that have ended; not all of them need be among `Overview::migrations`.
    migrations_ended: int
    # What other hosts call it, or what its system does.
    name: str
    # The other hosts, by name.
    peers: list[PeerAtWork]
    # Whether it does all that it is to do.
    readiness: Readiness
    # The stores, by name; some seconds old.
    stores: list[Store]
    # When it was taken, in milliseconds since 1970.
    taken_unix_ms: int
    # The VMs, by name, without their definitions; some seconds old.
    vms: list[Vm]
    # The volumes, by name.
    volumes: list[VolumeAtWork]


# A part of a daemon.
Part = Literal[
    "daemon",
    "journal",
    "volume",
    "hosts",
    "access",
    "migration",
]


class Peer(TypedDict):
    """Another host that this one is paired with."""

    # Bytes received in a second at present, over all connections.
    bytes_received_per_second: NotRequired[int]
    # Bytes sent in a second at present, over all connections.
    bytes_sent_per_second: NotRequired[int]
    # What it calls itself, if another host had that name when it came.
    calls_itself: NotRequired[str | None]
    # Whether there is any connection.
    connected: bool
    # Every connection, and every pair of links that is being dialled.
    connections: NotRequired[list[PeerConnection]]
    # Digest of its public key, 64 hexadecimal digits.
    id: str
    # Why a connection was lost last.
    last_error: NotRequired[str | None]
    # Where it is called.
    links: list[PeerLink]
    # Whether it may bring VMs, which run on this host.
    machines: NotRequired[bool]
    # What it is called here.
    name: str
    # Version of the program that runs there, as it says; null: it has not said; an older one does not.
    program_version: NotRequired[str | None]
    # Version of the protocol that both speak; null before the first connection.
    protocol_version: NotRequired[int | None]
    # Bytes that wait to be sent.
    queued_bytes: NotRequired[int]
    # How many of its requests were refused since this daemon began, because no migration gave it a right to them.
    refused_requests: NotRequired[int]
    # For how long there has been one, or none, in milliseconds; null while it is not called.
    since_ms: NotRequired[int | None]
    # Bytes that were sent and not acknowledged.
    unacknowledged_bytes: NotRequired[int]


class PeerAtWork(TypedDict):
    """Another host, and what goes over the connections with it."""

    # Every connection.
    connections: list[ConnectionAtWork]
    # The host; its connections are beside it.
    peer: Peer


class PeerConnection(TypedDict):
    """One connection to another host, or a pair of links that should have one."""

    # Bytes that the connection can carry in a second: what it did when there was enough to send last.
    bytes_per_second: NotRequired[int | None]
    # Bytes received on the wire.
    bytes_received: int
    # Bytes received in a second at present; as above.
    bytes_received_per_second: NotRequired[int | None]
    # Bytes sent on the wire.
    bytes_sent: int
    # Bytes sent in a second at present; null while there is no connection, or it has just begun.
    bytes_sent_per_second: NotRequired[int | None]
    # Whether the other host has dialled it.
    inbound: bool
    # Why there was no connection the last time.
    last_error: NotRequired[str | None]
    # The end here.
    local: str
    # What compression left of the data, in thousandths.
    packed_per_mille: int
    # The end there.
    remote: str
    # The newest round trip in microseconds.
    round_trip_us: NotRequired[int | None]
    # For how long it has been up or down, in milliseconds.
    since_ms: int
    # Whether there is a connection.
    up: bool


class PeerLink(TypedDict):
    """One address of another host."""

    # Host and port.
    address: str
    # Bits per second, where known.
    speed_bits_per_second: NotRequired[int | None]


# What a migration is doing.
Phase = Literal[
    "queued",
    "copying",
    "memory",
    "closing",
    "preparing",
    "releasing",
    "committing",
    "filling",
    "retiring",
    "taking-back",
    "discarding",
    "ended",
]


class PhaseEntered(TypedDict):
    """That a phase was entered."""

    # When.
    at_ms: float
    # Which.
    phase: Phase


class PlannedLink(TypedDict):
    """A connection that would carry a migration."""

    # Bytes a second that it carried when it had enough to do last.
    bytes_per_second: NotRequired[int | None]
    # The end here.
    local: str
    # The end there.
    remote: str
    # The newest round trip in microseconds.
    round_trip_us: NotRequired[int | None]


class PlannedMachine(TypedDict):
    """A VM that would go along with its volumes."""

    # How long an idle one would stand still at least, by the round trip that was measured, in milliseconds.
    least_downtime_ms: NotRequired[float | None]
    # How long it may stand still, in milliseconds.
    max_downtime_ms: int
    # Its memory in bytes; null: its QEMU does not say.
    memory_bytes: NotRequired[int | None]
    # Its name.
    name: str


class PlannedVolume(TypedDict):
    """A volume that would move."""

    # Bytes that are free there now; null: the store does not say.
    free_bytes: NotRequired[int | None]
    # Bytes of its image that hold something: what would be copied at most.
    held_bytes: int
    # Its name.
    name: str
    # Whether an image of an earlier stay is there, so that only what was written since would be sent.
    replica: NotRequired[bool]
    # Whether this host has the target's folder as well, so that blocks would be written straight there.
    shared: NotRequired[bool]
    # Its size in bytes.
    size_bytes: int
    # Where it is.
    source: ImageLocation
    target: NotRequired[ImageLocation | None]


class Problem(TypedDict):
    """Something that a daemon is to do and does not."""

    # What it is, for people.
    message: str
    # Name of the volume, or number of the migration; null of what there is one of.
    name: NotRequired[str | None]
    # What has it.
    part: Part


class PromoteVolume(TypedDict):
    """Takes over a volume that another host has prepared here, without hearing from that host."""

    # Without a ticket. **N.B.** If the other host goes on with the volume, there are two of it from then on. With
    # `without_missing`: although what is missing still comes.
    force: NotRequired[bool]
    # Of a volume that is `unconfirmed`, for the journal was put back from a backup: it is this host's. **N.B.** If
    # another host has it, there are two of it from then on. With `force`: although another host, or an image, says
    # otherwise.
    restored: NotRequired[bool]
    # With `restored`, of a volume on a device or an export: how many bytes it has. It may have grown since the backup,
    # and the device has room for more.
    size_bytes: NotRequired[int | None]
    # What the other host prints once it has released the volume: nobody else has it then.
    ticket: NotRequired[str | None]
    # Of a volume that works here and whose former host, which has the rest of it, is lost: clients that read what is
    # missing get I/O errors from now on, and wait for it no longer. **N.B.** For good: it is not fetched any more.
    without_missing: NotRequired[bool]


class QueuePlace(TypedDict):
    """A place in the queue of migrations that wait for their turn."""

    # Its place; 1 is the first.
    place: int
    # What it waits for: a limit of the configuration, and what has reached it.
    reason: str
    # How many wait.
    waiting: int


# Where a rate is from.
RateOrigin = Literal[
    "ordered",
    "measured",
    "stated",
]


class Readiness(TypedDict):
    """Whether a daemon does all that it is to do."""

    # What is in the way.
    problems: list[Problem]
    # Whether it does: nothing is in the way.
    ready: bool
    # What somebody should look at: it is in the way of nothing yet, or of what other hosts bring.
    warnings: NotRequired[list[Problem]]


class Recording(TypedDict):
    """What was recorded of a migration."""

    after: NotRequired[GuestFigures | None]
    # Bytes a second that might be copied; null: as fast as it went.
    bandwidth_bytes_per_second: NotRequired[int | None]
    before: NotRequired[GuestFigures | None]
    # What was decided, counted.
    decisions: Decisions
    during: NotRequired[GuestFigures | None]
    # When it ended; null while it is under way, or if the daemon ended first.
    ended_ms: NotRequired[float | None]
    # Longest that a guest's write might be held, or wait for the target.
    mirror_wait_max_ms: float
    # Phases in the order in which they were entered; copying is entered at 0.
    phases: list[PhaseEntered]
    # The rounds that it took, if it was copied in rounds.
    rounds: NotRequired[list[Round]]
    # What guests did and what was copied, in order of time. Those of a long migration are longer, not more.
    samples: list[HistorySample]
    # Size of the volume in bytes.
    size_bytes: int
    # How it was copied: `mirror`, `tracking`.
    strategy: str
    # Times in which guest writes did not go to the target.
    suspensions: list[Suspension]
    # What was waited for while nothing was written to the target, and how long altogether.
    waits: list[Waited]


class RedeemGrant(TypedDict):
    """Redeems an invitation."""

    # Digest of the public key by which the client is known from now on, 64 hexadecimal digits.
    key: str


class RemainingSeconds(TypedDict):
    """When the copying is expected to end, counted from now."""

    # At the earliest.
    earliest: float
    # At the latest.
    latest: float


class RemovedPeer(TypedDict):
    """What has become of a host that was removed."""

    # Digest of its public key.
    id: str
    # What it was called here.
    name: str


class RemovedVm(TypedDict):
    """What has become of a VM that was removed."""

    # What it was called.
    name: str
    # The volumes that were its disks; they stay.
    volumes: list[str]


class RemovedVolume(TypedDict):
    """What has become of a removed volume."""

    # The host that has the volume: only clients were forwarded from here.
    host: NotRequired[str | None]
    # Absolute path of its image, or the URI of the export that holds it; empty if that is at another host.
    image: str
    # What was done with the image.
    image_fate: ImageFate
    kept_because: NotRequired[KeptBecause | None]
    # Its name.
    name: str


class Replica(TypedDict):
    """An image that a volume left behind when it moved, and that was kept. It is fenced: nothing is served from it."""

    # Bytes that it takes in its store; null for a device or an export.
    allocated_bytes: NotRequired[int | None]
    # How the volume's bytes lie in it.
    format: ImageFormat
    # Absolute path of the file or device, or the URI of the export.
    image: str
    # When it was left, in milliseconds since 1970; null if that is not known.
    kept_unix_ms: NotRequired[int | None]
    # What it is.
    kind: ImageKind
    # The migration that left it, for example `m7`: it holds what the volume was then.
    migration: str
    # Whether the volume's way home from another host begins with it: only what was written since is sent then.
    shortens_return: bool
    # Size of the volume in bytes; null if that is not known.
    size_bytes: NotRequired[int | None]
    # Name of the store that it is in; null for an image that was served in place.
    store: NotRequired[str | None]
    # Name of the volume.
    volume: str
    # Where the volume went: a store, or `HOST:STORE` of another host; null if the daemon has forgotten that.
    went_to: NotRequired[str | None]


class ReplicaUsed(TypedDict):
    """An old image of the volume at the other host, with which a migration began."""

    # Bytes that the volume held when it began: what would have been looked at otherwise.
    bytes_held: int
    # Of these, those that the other host had already. Guest writes meanwhile make it less.
    bytes_spared: int


class ResizeVolume(TypedDict):
    """Makes a volume larger; it never becomes smaller."""

    # Its new size in bytes, a multiple of 4096. What is new reads as zeroes. The size that it has is a success.
    size_bytes: int


# What somebody may do who uses the API over TLS. Each role may do what those before it may.
Role = Literal[
    "read",
    "operate",
    "admin",
]


class Round(TypedDict):
    """A round of a volume that is tracked."""

    # Blocks that were copied in it.
    blocks: int
    # Bytes that were written to the target for them.
    bytes: int
    # Bytes of blocks that guests wrote meanwhile, which are left to the next round.
    dirtied: int
    # Bytes of blocks that guests write again and again, which it has put off for a later round.
    put_off: NotRequired[int]
    # How long it took.
    seconds: float
    # Which volume of the migration, from 0.
    volume: int


class SetGrant(TypedDict):
    """Changes what somebody may do."""

    # What he may do from now on.
    role: Role


class SetMigration(TypedDict):
    """Changes a migration that is under way."""

    # How much may be copied, in bytes a second; `null`, which must be said: as fast as it goes.
    bandwidth_bytes_per_second: int | None


class SetPeer(TypedDict):
    """Changes what another host is trusted with."""

    # Whether it may bring VMs, which run on this one.
    allow_machines: bool


# Whether a store of another host is written to over the link only.
SharedTarget = Literal[
    "auto",
    "never",
]


class StopVm(TypedDict):
    """Stops a VM."""

    # Cut its power, rather than pressing its power button.
    now: NotRequired[bool]
    # How long its guest may take to shut down, in seconds; then its power is cut. null: a minute.
    wait_s: NotRequired[int | None]


class Store(TypedDict):
    """A place that holds images. A folder holds any number of them; a device, and the export of another NBD server,
    one.
    """

    # What would serve guests better there, for people; null: nothing is known.
    advice: NotRequired[str | None]
    # Bytes that volumes may still use; 0 while the store has a problem, and of an export.
    bytes_free: int
    # Bytes that its volumes have together as their clients see them. More than `bytes_total`: there is not room for all
    # of them at once.
    bytes_provisioned: NotRequired[int]
    # Size of the file system or device in bytes; 0 while the store has a problem, and of an export.
    bytes_total: int
    # How the configuration slows the store down, or has it fail, on purpose, for people; null: it does not.
    impairment: NotRequired[str | None]
    # What it is.
    kind: NotRequired[StoreKind]
    # Name in the configuration.
    name: str
    # What keeps a device or an export from taking a volume; null: nothing, or it is a folder.
    occupied: NotRequired[str | None]
    # Absolute path of the folder or device, or the URI of the export.
    path: str
    # Why the store cannot be used; null if it can.
    problem: NotRequired[str | None]
    # Names of images in the folder that belong to no volume, migration or kept copy that the daemon knows: its data
    # folder was lost, or somebody put or left them there.
    unknown_images: NotRequired[list[str]]
    # Number of volumes whose image is here.
    volumes: int


class StoreContent(TypedDict):
    """What lies in a store."""

    # What was found, by name; of a device or an export what is in it, as one file.
    files: list[StoreFile]
    # Files that were not looked at, because there are too many.
    files_left_out: int
    # What the store is.
    kind: StoreKind
    # Absolute path of the folder or device, or the URI of the export.
    path: str
    # Why nothing is known of what lies there; null: it was looked at.
    problem: NotRequired[str | None]
    # Name of the store.
    store: str


class StoreFile(TypedDict):
    """A file in a store."""

    # Bytes that it takes in the store; null for what is no file.
    allocated_bytes: NotRequired[int | None]
    format: NotRequired[ImageFormat | None]
    # The migration that fills it, or that left it.
    migration: NotRequired[str | None]
    # When it was last written to, in milliseconds since 1970; null if that is not known.
    modified_unix_ms: NotRequired[int | None]
    # Its name in the folder; what is no UTF-8 is replaced. Of a device or an export its path or URI.
    name: str
    # What else is to be known of it, for people.
    note: NotRequired[str | None]
    # What it is.
    role: FileRole
    # Size of the disk in bytes, as a guest would see it; null if that is not known.
    size_bytes: NotRequired[int | None]
    # The volume that it is of, as far as that is known.
    volume: NotRequired[str | None]


# What a store is.
StoreKind = Literal[
    "folder",
    "device",
    "nbd",
]


# How a volume is copied while its guests write.
Strategy = Literal[
    "mirror",
    "tracking",
    "three-phase",
    "post-copy",
]


class Suspension(TypedDict):
    """A time in which guest writes did not go to the target, as far as the samples show."""

    # When it was seen first.
    at_ms: float
    # When it was over; null if it never was.
    ended_ms: NotRequired[float | None]
    # Why.
    reason: str


class SwitchOver(TypedDict):
    """How long the guest was held at the switch-over, in milliseconds. The parts add up to the whole."""

    # Waiting for the guest requests in flight.
    drain_ms: float
    # From the first request that was held to the opening of the gate.
    gate_closed_ms: float
    # Making the new ownership durable.
    own_ms: float
    # Flushing both stores, and making the target's promise durable.
    prepare_ms: float
    # Making the release durable: the commit point.
    release_ms: float
    # Changing the store below the gate, trying it, and opening the gate.
    start_ms: float


class Vm(TypedDict):
    """A VM."""

    # When it was added here, in milliseconds since 1970.
    added_unix_ms: int
    # Its definition, as it was written, or as another host would be given it; null: it has none.
    definition: NotRequired[str | None]
    # What runs it, with its version, such as `QEMU 10.0.2` or `libvirt 9.0.0`; null while it does not run.
    hypervisor: NotRequired[str | None]
    # What libvirt calls it; null: it is no domain of libvirt.
    libvirt_domain: NotRequired[str | None]
    # Absolute path of the file with what QEMU says; null: Sterna has not started it.
    log: NotRequired[str | None]
    # Why it is so, or what QEMU said last; null if there is nothing to say.
    message: NotRequired[str | None]
    # Absolute path of its monitor's socket, or of libvirt's. The daemon is connected to a monitor; QEMU serves one
    # client at a time.
    monitor: str
    # Its name.
    name: str
    # QEMU's process; null while there is none.
    process: NotRequired[int | None]
    # What it does.
    state: VmState
    # The volumes that are its disks, by name.
    volumes: list[str]
    whole_move: NotRequired[WholeMove | None]


# What a VM does.
VmState = Literal[
    "stopped",
    "starting",
    "running",
    "paused",
    "crashed",
    "arriving",
    "leaving",
    "unknown",
]


class Volume(TypedDict):
    """A volume of the host."""

    # When it was added to the host, in milliseconds since 1970.
    added_unix_ms: int
    # Bytes that its image takes in the store; null if the store does not say.
    allocated_bytes: NotRequired[int | None]
    # Bytes per block of its chronicle and of migrations.
    block_size_bytes: int
    # Clients that are connected at other hosts, which lead them here.
    clients_elsewhere: NotRequired[list[ClientsElsewhere]]
    creation: NotRequired[VolumeCreation | None]
    filling: NotRequired[VolumeFilling | None]
    # How its bytes lie in its image.
    format: ImageFormat
    # How often it has changed hands, counted from 0.
    generation: int
    # The other host that has it, of a volume that is only forwarded here.
    host: NotRequired[str | None]
    # Its identity, 32 hexadecimal digits: the same wherever it moves. Empty while it is being created.
    id: str
    # Absolute path of its image, or the URI of the export that holds it.
    image: str
    # What its image is.
    kind: ImageKind
    # Why it is not being served; null while it is.
    message: NotRequired[str | None]
    # The migration under way.
    migration: NotRequired[str | None]
    # Its name, and that of its export.
    name: str
    # Whether clients may only read.
    read_only: bool
    # Size in bytes.
    size_bytes: int
    # Absolute path of the unix socket in `uri`; it stays the same across moves and restarts.
    socket: str
    # Whether it is being served.
    state: VolumeState
    statistics: NotRequired[VolumeStatistics | None]
    # The store that holds its image; null for an image that is served in place, or if another host has it.
    store: NotRequired[str | None]
    # What NBD clients of other hosts connect to; null: the volume has no port.
    tcp_uri: NotRequired[str | None]
    # What NBD clients connect to.
    uri: str


class VolumeAtWork(TypedDict):
    """A volume, and what its guests do at present."""

    activity: NotRequired[Activity | None]
    # Bytes that its image takes in the store; some seconds old. null: nobody says.
    allocated_bytes: NotRequired[int | None]
    # Clients at other hosts, which lead them here.
    clients_elsewhere: int
    # NBD connections at this host.
    connections: int
    creation: NotRequired[VolumeCreation | None]
    # Requests that failed since the daemon began to serve it.
    errors: int
    filling: NotRequired[VolumeFilling | None]
    # How its bytes lie in its image.
    format: ImageFormat
    # The other host that has it.
    host: NotRequired[str | None]
    # Absolute path of its image, or the URI of the export that holds it.
    image: str
    # What its image is.
    kind: ImageKind
    # What the latest of them failed by.
    last_error: NotRequired[str | None]
    # Why it is not being served; null while it is.
    message: NotRequired[str | None]
    # The migration under way.
    migration: NotRequired[str | None]
    # Its name.
    name: str
    # Whether clients may only read.
    read_only: bool
    # Size in bytes.
    size_bytes: int
    # Whether it is being served.
    state: VolumeState
    # The store that holds its image; null for one that is served in place, or if another host has it.
    store: NotRequired[str | None]


class VolumeCreation(TypedDict):
    """How far a volume's creation has come."""

    # Bytes of the given image that have been looked at, holes included.
    bytes_done: int
    # Size of the given image in bytes.
    bytes_total: int


class VolumeFilling(TypedDict):
    """How far a volume is that works here, and has not come as a whole (`post-copy`, `three-phase`)."""

    # Bytes that were missing when it was handed over.
    bytes_at_handover: int
    # Bytes that have not come.
    bytes_missing: int
    # Bytes that need not come any more: a client has written others.
    bytes_overwritten: int
    # Bytes that have come because a client waited for them.
    bytes_pulled: int
    # Bytes that have come in the background.
    bytes_pushed: int
    # Missing bytes that the other host cannot read: clients that do get I/O errors. They are tried again.
    bytes_unreadable: int
    # The host that has the rest, by name. Without it, and its image, that is lost.
    host: str
    # Whether what is missing was given up (`volume promote --without-missing`).
    is_given_up: bool
    # Where it is missing, in order; the first 256 places.
    ranges: list[MissingRange]
    # Reads of a VM that got an I/O error because the other host did not answer in time: it is stopped by that, and goes
    # on by itself.
    reads_refused: NotRequired[int]
    # Requests of clients that wait for what is missing.
    requests_waiting: int
    # Why nothing comes; null if something does.
    waits_for: NotRequired[str | None]


class VolumeSourceCreate(TypedDict):
    """A new image in a store. Removing the volume deletes it; what is on a device or a server stays there."""

    format: NotRequired[ImageFormat | None]
    # Absolute path of an image that is copied in, in any format; null: the volume reads as zeroes.
    image: NotRequired[str | None]
    kind: Literal["create"]
    # Size in bytes, a multiple of 512; null: that of `image`, rounded up to 4,096.
    size_bytes: NotRequired[int | None]
    # The store; null: the only one there is.
    store: NotRequired[str | None]


class VolumeSourceAdd(TypedDict):
    """An image that is served where it is; removing the volume leaves it. One of `image`, `device` and `nbd` is
    given.
    """

    # Absolute path of a block device.
    device: NotRequired[str | None]
    # Also from a device or an export that holds what a migration left there.
    fenced: NotRequired[bool]
    format: NotRequired[ImageFormat | None]
    # Absolute path of a file.
    image: NotRequired[str | None]
    kind: Literal["add"]
    # URI of the export of another NBD server.
    nbd: NotRequired[str | None]


class VolumeSourceImport(TypedDict):
    """An image that lies in a store and belongs to nothing. It is the volume's from then on, and its file gets the
    volume's name; nothing is copied. Removing the volume leaves it.
    """

    # Name of the file in it.
    file: str
    format: NotRequired[ImageFormat | None]
    kind: Literal["import"]
    # Name of the store, a folder.
    store: str


# Whether a volume is being served.
VolumeState = Literal[
    "creating",
    "waiting",
    "arriving",
    "forwarding",
    "serving",
    "failed",
    "unconfirmed",
    "removing",
]


class VolumeStatistics(TypedDict):
    """What a volume's guest has done since the daemon began to serve it."""

    # Bytes read.
    bytes_read: int
    # Bytes written.
    bytes_written: int
    # NBD connections at this moment.
    connections: int
    # Name of the I/O engine: `io_uring` or `threads`.
    engine: str
    # Requests that failed.
    errors: int
    # Number of flushes.
    flushes: int
    # What the latest of them failed by; null: none has.
    last_error: NotRequired[str | None]
    # Number of reads.
    reads: int
    # Requests in flight at this moment.
    requests_in_flight: int
    # Number of writes, discards and zeroing.
    writes: int


class Waited(TypedDict):
    """What a migration waited for while it stood still, as far as the samples show."""

    # What.
    reason: str
    # How long altogether, in milliseconds.
    total_ms: float


class WaitingFor(TypedDict):
    """Something that is waited for."""

    # What.
    reason: str
    # Milliseconds before something else is done; none: it waits as long as it takes.
    remaining_ms: NotRequired[int | None]


class WholeMove(TypedDict):
    """What a move to another host would make of a VM that somebody else has started."""

    # What would not go along; its guest sees nothing of it.
    left_behind: list[str]
    # What keeps it from moving as a whole, and what to do; null: nothing.
    obstacle: NotRequired[str | None]


# Where a new volume's bytes come from.
VolumeSource = VolumeSourceCreate | VolumeSourceAdd | VolumeSourceImport
