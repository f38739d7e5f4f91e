"""What the API takes and answers. Fields that may be left out are NotRequired.

Made by generate.py from docs/openapi.json: do not change it by hand.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class Access(TypedDict):
    """Who may use the API over TLS, and where."""

    # The keys that may use the API, by name.
    grants: list[Grant]
    # Digest of the daemon's public key, 64 hexadecimal digits, by which clients know it. null: it does not listen.
    key: NotRequired[str | None]
    # Where the daemon listens, by its configuration; null: nowhere.
    listen: NotRequired[str | None]
    # Why no client can connect; null if clients can.
    problem: NotRequired[str | None]


class Activity(TypedDict):
    """The load of a volume's guests between the latest two measurements."""

    # Bytes that guests read a second.
    bytes_read_per_second: float
    # Bytes that guests write a second.
    bytes_written_per_second: float
    # Flush requests a second.
    flushes_per_second: float
    # Latency that half of the requests did not exceed, in microseconds; null if there was no request.
    median_us: NotRequired[int | None]
    # Latency that 99 of 100 requests did not exceed, in microseconds.
    p99_us: NotRequired[int | None]
    # Read requests a second.
    reads_per_second: float
    # Requests in flight at this moment.
    requests_in_flight: int
    # Writes, discards and zeroing a second.
    writes_per_second: float


class AdoptVm(TypedDict):
    """Adopts disks of a running VM that Sterna has not started."""

    # Its disks, by the names of their devices or nodes, or by libvirt's names (`vda`); empty: all writable disks.
    disks: NotRequired[list[str]]
    # Name or UUID of the domain of libvirt (`qemu:///system`), which copies its disks to new volumes. null: the VM is
    # named by its monitor.
    libvirt: NotRequired[str | None]
    # Absolute path of libvirt's socket; null: the default one.
    libvirt_socket: NotRequired[str | None]
    # Absolute path of its monitor's socket (QMP). No other client may be connected to it meanwhile. null: the VM is a
    # domain of libvirt.
    monitor: NotRequired[str | None]
    # The store of the new volumes of a domain of libvirt; null: the only one.
    store: NotRequired[str | None]


# How much space a new image allocates at the start.
Allocation = Literal[
    "thin",
    "thick",
]


class AttachVolume(TypedDict):
    """Lets another host offer a volume of this host to its clients."""

    # Name of a paired host.
    host: str
    # Clients there may only read.
    read_only: NotRequired[bool]


class Attachment(TypedDict):
    """A host at which a volume is attached."""

    # Name of the host, which offers the volume to its clients.
    host: str
    # Whether the host has confirmed it. If not, the order was interrupted: give it again, or detach.
    is_confirmed: bool
    # Whether its clients may only read.
    read_only: bool


class AwaitedStart(TypedDict):
    """A start of a VM that is still to come."""

    # How many attempts have failed.
    failed_attempts: int
    # Why the last attempt failed; null: none has.
    reason: NotRequired[str | None]


class BootCheck(TypedDict):
    """A text that a test waits for on the serial consoles of its VMs."""

    # Seconds from the start of the VMs until then, or until it was given up.
    seconds: NotRequired[float | None]
    # Whether it has appeared.
    state: BootCheckState
    # The text.
    text: str


# Whether a text has appeared on a console.
BootCheckState = Literal[
    "waiting",
    "passed",
    "failed",
]


class ClientsElsewhere(TypedDict):
    """Clients of a volume that are connected at another host."""

    # Number of clients at this host.
    clients: int
    # Name of the host that forwards them.
    host: str


class ConnectionAtWork(TypedDict):
    """A connection with another host, with its traffic."""

    # Bytes received a second; null as above.
    bytes_received_per_second: NotRequired[float | None]
    # Bytes sent a second; null: there is no recent measurement.
    bytes_sent_per_second: NotRequired[float | None]
    # The connection with its state.
    connection: PeerConnection


class Deadline(TypedDict):
    """The deadline of a migration, and what it demands of guests."""

    # Whether the copying is expected to end later, although nothing is left that would make it faster.
    late: NotRequired[bool]
    # What guests may lose at present because of it, in percent, if that is more than was ordered; 100: it copies at
    # full speed. null: what was ordered suffices.
    raised_to_percent: NotRequired[int | None]
    # When it is to end, in milliseconds since 1970.
    unix_ms: int


class Decisions(TypedDict):
    """Counts of the decisions for writes and chunks."""

    # Bytes that the source has sent after the handover (`post-copy`, `three-phase`), since its start.
    bytes_followed: NotRequired[int]
    # Of these, bytes that a guest at the target waited for (pulled). The others were sent in the background.
    bytes_pulled: NotRequired[int]
    # Number of copied chunks.
    chunks_copied: int
    # Of these, chunks that were copied a second time at once, because guests had written to them meanwhile.
    chunks_copied_again: int
    # Longest time that a write was held, in milliseconds.
    held_longest_ms: float
    # How often the rounds of `tracking` did not converge, and a mirror went on instead.
    rounds_given_up: NotRequired[int]
    # Errors of the source.
    source_faults: int
    # Number of times that mirroring was suspended.
    suspensions: int
    # Errors of the target.
    target_faults: int
    # Flushes of the target before the handover.
    target_flushes: int
    # Mirrored writes that were answered before the target had answered.
    writes_answered_late: int
    # Of all these, writes that were held for a while.
    writes_held: int
    # Guest writes of which only a part was sent to both stores.
    writes_in_part: int
    # Guest writes that were sent to both stores completely.
    writes_mirrored: int
    # Guest writes that were sent to the source only, and copied later.
    writes_source_only: int


class DetachVolume(TypedDict):
    """Ends the attachment of a volume at a host."""

    # Also while clients are connected there; they are disconnected. Also if that host does not answer.
    force: NotRequired[bool]
    # Name of the host at which it is attached; null: this host.
    host: NotRequired[str | None]


class DetachedVolume(TypedDict):
    """An attachment that has ended."""

    # Name of the host that offered it.
    host: str
    # Name of the volume.
    name: str


class Divergence(TypedDict):
    """What only this host has of a volume that it has given up."""

    # The bytes of the blocks that nobody may have received; null: it is not known which they are.
    bytes: NotRequired[int | None]
    # When the volume was given up, in milliseconds since 1970.
    given_up_unix_ms: int
    # The host that has promoted the volume's standby.
    host: str
    # The image, if it is in one.
    image: NotRequired[str | None]
    # Its name: that of the volume. One that is not the only one with its name has a part of an identity in it.
    name: str
    # Why the image is not the standby's yet, although that was ordered.
    reason: NotRequired[str | None]
    # The size of the volume.
    size_bytes: int
    # Where it is.
    state: DivergenceState
    # The volume.
    volume: str


class DivergenceExtent(TypedDict):
    """Successive bytes of a volume."""

    # The bytes as hexadecimal digits; null: zeroes.
    content: NotRequired[str | None]
    # Their number.
    length: int
    # Where they are, in bytes.
    offset: int


class DivergencePiece(TypedDict):
    """A piece of a divergence."""

    extent: NotRequired[DivergenceExtent | None]
    # Where the next piece is; null: there are no more.
    next: NotRequired[int | None]
    # The size of the volume.
    size_bytes: int


# Where a divergence is.
DivergenceState = Literal[
    "in-image",
    "kept",
]


class ErrorBody(TypedDict):
    """Body of every error answer."""

    # The error with its code and message.
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
    "standby_not_found",
    "evacuation_not_found",
    "route_not_found",
    "method_not_allowed",
    "volume_exists",
    "standby_exists",
    "standby_refused",
    "standby_may_be_served",
    "vm_exists",
    "vm_wrong_state",
    "vm_unsuitable",
    "vm_failed",
    "grant_exists",
    "evacuation_runs",
    "host_drained",
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
    """An error with its code and message."""

    # The cause, for programs.
    code: ErrorCode
    # The cause, and what to do next, for users. The text may change at any time.
    message: str


class EvacuatedWorkload(TypedDict):
    """A VM with its volumes, or a volume that belongs to no VM."""

    # Its bytes to send, memory included, as far as they are known beforehand.
    bytes: int
    # When it will have left by forecast, in milliseconds since 1970; null: unknown, or it has ended.
    expected_unix_ms: NotRequired[int | None]
    # The share of it that has been sent, from 0 to 1; null: it is not moving.
    fraction: NotRequired[float | None]
    # Whether it is a VM.
    kind: WorkloadKind
    # Whether it will not have left at the deadline, by forecast.
    late: NotRequired[bool]
    # Its migration: the present one, or the last.
    migration: NotRequired[str | None]
    # Name of the VM or volume.
    name: str
    # What its target had of it beforehand: `standby`, or `kept image`; null: nothing.
    origin: NotRequired[str | None]
    # Whether it runs at its target before all of its memory is there, because the time is short.
    post_copy: NotRequired[bool]
    # A VM's priority; a volume without a VM has the default.
    priority: int
    # Why it stays, or why its last migration failed.
    reason: NotRequired[str | None]
    # Whether it is a VM that ran when it was looked at.
    running: bool
    # What becomes of it.
    state: WorkloadState
    # The host and store where it is, or goes to, as `HOST:STORE`; null: it stays here.
    target: NotRequired[str | None]
    # Names of its volumes.
    volumes: list[str]


class Evacuation(TypedDict):
    """An evacuation: planned, running, or the last one."""

    # Whether it was aborted.
    aborted: NotRequired[bool]
    # When everything is to have left; null: there is no deadline.
    deadline_unix_ms: NotRequired[int | None]
    # When it ended; null: it has not.
    ended_unix_ms: NotRequired[int | None]
    # When the last workload will have left, by forecast; null: unknown, or it has ended.
    expected_unix_ms: NotRequired[int | None]
    # Whether something will not have left at the deadline, or not at all, by forecast.
    misses: bool
    # When it was ordered, in milliseconds since 1970.
    started_unix_ms: int
    # What it does at present.
    state: EvacuationState
    # Whether VMs that will not have left are shut down before the deadline.
    stop_rest: bool
    # The hosts that may take something, as `HOST` or `HOST:STORE`.
    to: list[str]
    # The VMs and volumes of the host, in the order of their turns.
    workloads: list[EvacuatedWorkload]


# What an evacuation does.
EvacuationState = Literal[
    "planned",
    "asking",
    "running",
    "aborting",
    "ended",
]


class Expected(TypedDict):
    """A figure that is not known exactly: of ten outcomes one lies below `least`, and one above `most`."""

    # A tenth of the outcomes lies below it.
    least: float
    # Half of the outcomes lie below it.
    middle: float
    # A tenth of the outcomes lies above it.
    most: float


class ExportSettings(TypedDict):
    """How a volume is offered to its clients."""

    # Largest number of connections at a time; null: that of the configuration.
    connections_max: NotRequired[int | None]
    # Address and port of the volume over TCP, for example `192.0.2.1:10809`; null: only the unix socket.
    listen: NotRequired[str | None]
    # Whether clients may only read.
    read_only: NotRequired[bool]
    # Mode of its unix socket in octal, for example `0660`; null: that of the configuration.
    socket_mode: NotRequired[str | None]
    # Owner of its unix socket, `USER:GROUP`; null: that of the configuration.
    socket_owner: NotRequired[str | None]


class ExportStandby(TypedDict):
    """An order to export a standby that has nothing yet."""

    # The absolute path of a folder of the daemon's host that is not there yet. Its parent is.
    folder: str


# The role of a file in a store.
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


class Forecast(TypedDict):
    """The expected course of a migration."""

    # The bytes that it sends: disks, memory, and what guests write meanwhile.
    bytes: Expected
    # How long guests are held at its end, in milliseconds.
    downtime_ms: Expected
    # How many of a hundred such migrations end by themselves. Below 100 guests may write faster than it copies.
    ends_percent: int
    # The number of earlier migrations of the same way that it was learned from; 0: it rests on a rate alone.
    learned_from: int
    # Whether that rate was measured just now, by reading and writing for a moment.
    probed: NotRequired[bool]
    # Its duration in seconds, without waits for its turn.
    seconds: Expected


class Grant(TypedDict):
    """A key that may use the API over TLS."""

    # When it was granted, in milliseconds since 1970.
    granted_unix_ms: int
    # End of the access token's life, in milliseconds since 1970; null: it was redeemed, or there is none.
    invited_until_unix_ms: NotRequired[int | None]
    # Digest of the public key, 64 hexadecimal digits; null until the access token is redeemed.
    key: NotRequired[str | None]
    # Name of the user, as in the audit log.
    name: str
    # Rights of the user.
    role: Role


class GuestFigures(TypedDict):
    """Figures of guests' requests over a longer time."""

    # Bytes read and written a second.
    bytes_per_second: float
    # Number of requests that failed.
    errors: int
    # Requests a second, of all kinds.
    iops: float
    # Latency that half of the requests did not exceed, in microseconds; null if there was no request.
    median_us: NotRequired[int | None]
    # Latency that 99 of 100 requests did not exceed, in microseconds.
    p99_us: NotRequired[int | None]
    # Length of the time, in seconds.
    seconds: float
    # The longest latency, in microseconds.
    worst_us: NotRequired[int | None]


# The side at which the guest runs.
GuestLocation = Literal[
    "source",
    "target",
    "unknown",
]


class Health(TypedDict):
    """The answer of a daemon that is alive."""

    # Number of the daemon's process.
    pid: int
    # When it began to serve, in milliseconds since 1970.
    started_unix_ms: int


class HistorySample(TypedDict):
    """A sample of the recording: one stretch of time."""

    # Begin of the sample.
    at_ms: float
    # Bytes that were copied to the target.
    bytes_copied: int
    # Bytes of guest writes that were mirrored to the target.
    bytes_mirrored: int
    # Bytes that the target lacked at the end of the sample; null: not recorded, or the migration was not under way.
    bytes_missing: NotRequired[int | None]
    # Bytes that guests have read.
    bytes_read: int
    # Bytes that guests have written.
    bytes_written: int
    # Bytes that were found to be zero.
    bytes_zero: int
    # Guest requests that failed.
    errors: int
    # Guest flushes that ended in it.
    flushes: int
    # Length of the sample, in milliseconds.
    length_ms: float
    # Latency that half of the requests did not exceed, in microseconds; null if there was no request.
    median_us: NotRequired[int | None]
    # Latency that 99 of 100 requests did not exceed, in microseconds.
    p99_us: NotRequired[int | None]
    # Guest reads that ended in it.
    reads: int
    # The longest latency, in microseconds.
    worst_us: NotRequired[int | None]
    # Guest writes, discards and zeroing that ended in it.
    writes: int


class Host(TypedDict):
    """The daemon that answers."""

    # Absolute path of the folder that holds its journal.
    data_dir: str
    # Whether it takes nothing new: no volumes and VMs, neither made here nor from other hosts.
    drained: NotRequired[bool]
    # The configured I/O engine: `auto`, `io_uring` or `threads`. `auto` is decided for each volume.
    engine: str
    # Whether everything is leaving it.
    evacuating: NotRequired[bool]
    # Number of migrations under way.
    migrations_running: int
    # Number of the daemon's process.
    pid: int
    # Absolute path of the folder that holds the sockets of its volumes.
    runtime_dir: str
    # When it began to serve, in milliseconds since 1970.
    started_unix_ms: int
    # Version of the daemon's program.
    version: str
    # Number of volumes at this host.
    volumes: int


class Identity(TypedDict):
    """The identity of the daemon's host for other hosts."""

    # Digest of its public key, 64 hexadecimal digits, by which other hosts know it.
    id: str
    # Addresses on which it listens for other hosts.
    listening: list[str]
    # Name of the host.
    name: str
    # Why it cannot be reached or reach others; null if it can.
    problem: NotRequired[str | None]
    # The latest refused connections, oldest first, each with its reason.
    refused: NotRequired[list[str]]


# What a host does with its volumes after a start if the host of their standby does not say whether that was promoted.
IfSilent = Literal[
    "wait",
    "serve",
]


# The fate of the image of a removed volume.
ImageFate = Literal[
    "deleted",
    "kept",
    "elsewhere",
]


# The format of an image.
ImageFormat = Literal[
    "raw",
    "qcow2",
]


# The kind of an image.
ImageKind = Literal[
    "file",
    "device",
    "nbd",
]


class ImageLocation(TypedDict):
    """An image and its place."""

    # The format of the volume's content.
    format: NotRequired[ImageFormat]
    # Absolute path of the file or device, or the URI of the export.
    image: str
    # Whether it is a file, a device or an export.
    kind: NotRequired[ImageKind]
    # Name of the store; null for an image that is served in place.
    store: NotRequired[str | None]


class Invitation(TypedDict):
    """A host invitation, which pairs one other host with this one."""

    # Addresses at which the other host can reach this one, the best first.
    addresses: list[str]
    # End of its life, in milliseconds since 1970.
    expires_unix_ms: int
    # The token for the other host. **It holds a secret.**
    token: str


class JoinHost(TypedDict):
    """Redeems another host's invitation."""

    # Address and port of the other host; null: those in the token.
    address: NotRequired[str | None]
    # Whether the other host may bring VMs, which run on this one; null: as before, or no for a new host.
    allow_machines: NotRequired[bool | None]
    # The token that the other host has made.
    token: str


class KeepPoints(TypedDict):
    """Which recovery points are kept beside the standby's images."""

    # The newest point of each of the last days that have one.
    daily: NotRequired[int]
    # The newest point of each of the last hours that have one.
    hourly: NotRequired[int]
    # The newest points.
    last: NotRequired[int]


# Why the image of a removed volume was kept without an order to keep it.
KeptBecause = Literal[
    "given",
    "unknown",
]


# What limits the copying.
LimitedBy = Literal[
    "source-disk",
    "target-disk",
    "source-guests",
    "target-guests",
    "link",
    "bandwidth",
    "measuring",
]


class MachineDowntime(TypedDict):
    """Downtime of a VM, measured at the source. The parts add up to the total."""

    # The rest: the handover of its disks and its first step at the target, in milliseconds.
    handover_ms: float
    # Time until the last memory and the devices were loaded at the target, in milliseconds.
    memory_ms: float
    # From the pause at the source until the target has reported that the VM runs, in milliseconds.
    total_ms: float


class MachineMove(TypedDict):
    """A VM that moves with its volumes."""

    downtime: NotRequired[MachineDowntime | None]
    memory: NotRequired[MemoryMove | None]


# When a moving VM may begin to run at the other host.
Memory = Literal[
    "pre-copy",
    "post-copy",
]


class MemoryMove(TypedDict):
    """Progress of the copying of a VM's memory."""

    # Rate at which memory is sent, in bytes a second.
    bytes_per_second: int
    # Rate at which the guest writes memory, in bytes a second.
    dirty_bytes_per_second: int
    # Whether the VM runs at the target before all of its memory has arrived (post-copy).
    post_copy: NotRequired[bool]
    # Bytes that must still be sent, as far as it is known.
    remaining_bytes: int
    # Number of rounds over pages that the guest has written.
    rounds: int
    # Bytes sent so far; pages that the guest writes are sent again.
    sent_bytes: int
    # Number of streams that carry it.
    streams: int
    # By how much the guest's processors are slowed down, in percent, so that the guest writes less.
    throttle_percent: int
    # Size of the memory in bytes.
    total_bytes: int


class MigrateVolume(TypedDict):
    """Moves a volume to another store."""

    # How much space the new image allocates at the start.
    allocation: NotRequired[Allocation]
    # Limit of the copying in bytes a second, of all volumes and a VM's memory together, at least 1; null: no limit.
    # Guest writes are not limited.
    bandwidth_bytes_per_second: NotRequired[int | None]
    # It begins at this time, in milliseconds since 1970, and waits in the queue until then. null: in its turn.
    begin_unix_ms: NotRequired[int | None]
    # It is to end by this time, in milliseconds since 1970. If it would end later, guests lose more than the ordered
    # impact, as far as it must be. null: there is no such time.
    deadline_unix_ms: NotRequired[int | None]
    format: NotRequired[ImageFormat | None]
    # Copies everything, even if the other host has kept an image of the volume.
    full: NotRequired[bool]
    # With `tracking`, and with `mirror` to another host: copies blocks that guests write again and again like all
    # others, and does not put them off. Only for comparison.
    ignore_hot_blocks: NotRequired[bool]
    # What guests of the disks may lose to the copying, in percent of their throughput: 1 to 90, or 100: it does not
    # give way to guests. null: the daemon's default. The target's host protects its own guests by its own default.
    impact_percent: NotRequired[int | None]
    # Gives the new qcow2 image the backing file of the present one, and copies only the present image's own data.
    # Otherwise everything is copied.
    keep_chain: NotRequired[bool]
    # Keeps the source's image afterwards, under another name.
    keep_source: NotRequired[bool]
    # Longest downtime of a VM, or longest hold of a volume's guests at the handover, in milliseconds. null: 300 for a
    # VM and for rounds, 500 for other volumes.
    max_downtime_ms: NotRequired[int | None]
    # When the VM may begin to run at the other host.
    memory: NotRequired[Memory]
    # Number of streams for a VM's memory, 1 to 16; null: chosen by the daemon. It is one if either hypervisor supports
    # only one.
    memory_streams: NotRequired[int | None]
    # Whether the name means a volume or a VM, if both have it.
    named: NotRequired[Named]
    # With `tracking`: a block that is written before a round has reached it is copied again by the next round. Only for
    # comparison.
    not_incremental: NotRequired[bool]
    # With `tracking`: if the rounds do not converge, the volume is mirrored from then on. Without it the migration
    # fails. The daemon does so by itself if it has chosen `tracking`.
    or_mirror: NotRequired[bool]
    # The largest number of rounds with `three-phase`; null: 4.
    rounds: NotRequired[int | None]
    # Keeps serving the volume at this host as well, also to new clients. Otherwise only connected clients are
    # forwarded, until they leave.
    serve_here: NotRequired[bool]
    # Whether blocks are written directly to the other host's store if this host can open it as well.
    shared_target: NotRequired[SharedTarget]
    # Also if the host of a standby cannot note that the volumes leave. Until it has noted it, nobody may promote the
    # standby there.
    standby_untold: NotRequired[bool]
    # How volumes are copied while their guests write. Without it the daemon chooses.
    strategy: NotRequired[Strategy]
    # Name of the target store, or `HOST:STORE` of another host; `HOST` alone: its only store.
    to: str
    # Names of further volumes that move in the same migration to another host: all of them, or none.
    together_with: NotRequired[list[str]]


class Migration(TypedDict):
    """A migration, under way or ended."""

    # Number of the present attempt at the handover, 0 before the first; the number of attempts once it has ended.
    attempt: int
    # Bytes that share their blocks with the old image, and were neither read nor written.
    bytes_cloned: NotRequired[int]
    # Bytes that the mover has written to the target.
    bytes_copied: int
    # Bytes of guest writes that were sent to the target as well.
    bytes_mirrored: int
    # Bytes that the target still lacks; null: unknown, as after a restart of the source while a volume is filled.
    bytes_missing: NotRequired[int | None]
    # Bytes written to the target: copied and mirrored.
    bytes_moved: int
    # Present rate of synchronising, in bytes a second; 0 once the migration has ended.
    bytes_per_second: float
    # Bytes that were found to be zero, and not written.
    bytes_zero: int
    # Number of the latest change, for `after` of a later request. It begins anew with the daemon.
    change: int
    deadline: NotRequired[Deadline | None]
    # When it ended, in milliseconds since 1970; null while it is under way.
    ended_unix_ms: NotRequired[int | None]
    # Cause of a failure, for programs: `target-full`, `target-faulty`, `target-hung`, `source-unreadable`, `handover-
    # refused`, `daemon-stopped`, `host-refused`, `promoted-elsewhere`, `given-up`, `machine-stayed`, `not-begun`,
    # `hook-failed`, `not-converging` or `internal`.
    failure: NotRequired[str | None]
    forecast: NotRequired[Forecast | None]
    # Progress of the copying, 0 to 1. It never falls, and is 1 only when nothing is missing.
    fraction: float
    # Whether an orderly stop of the daemon has interrupted it. Then the next daemon repeats it, and `retried_as` has
    # the number.
    goes_on: NotRequired[bool]
    # Where the guest runs at present.
    guest: GuestLocation
    # Its identity at this host, for example `m7`.
    id: str
    # Whether the source's image is kept afterwards.
    keep_source: bool
    limited_by: NotRequired[LimitedBy | None]
    machine: NotRequired[MachineMove | None]
    # The outcome with its reason, as text.
    message: NotRequired[str | None]
    # Whether rounds did not converge, and a mirror copied what was left. A daemon that has started since reports it in
    # the history of the migration only.
    mirrored_instead: NotRequired[bool]
    # The volume or the VM that was ordered to move; empty: unknown, as for a migration that a former daemon has ended.
    name: NotRequired[str]
    pace: NotRequired[Pace | None]
    # The present step of the migration.
    phase: Phase
    queue: NotRequired[QueuePlace | None]
    remaining_seconds: NotRequired[RemainingSeconds | None]
    replica: NotRequired[ReplicaUsed | None]
    # The latest migration that repeats this one.
    retried_as: NotRequired[str | None]
    # The migration that this one repeats (`migration retry`), for example `m3`.
    retry_of: NotRequired[str | None]
    # The ended rounds, if it is copied in rounds. Rounds of a migration that ended before the daemon's start are only
    # in its history.
    rounds: NotRequired[list[Round]]
    # Seconds since it began, or its whole duration once it has ended.
    seconds: float
    # Whether blocks are written directly to a store that both hosts can open, and the link carries only control
    # messages. `false` until that is proved, and between two stores of this host.
    shared: NotRequired[bool]
    # The image that the volume leaves.
    source: ImageLocation
    # When it began, in milliseconds since 1970.
    started_unix_ms: int
    # Whether it is queued, running or paused, or its outcome.
    state: MigrationState
    strategy: NotRequired[Strategy | None]
    # Why the daemon chose the strategy; empty: it was ordered, or is not chosen yet.
    strategy_reason: NotRequired[str]
    # Why guest writes are not sent to the target at present; null while they are.
    suspended: NotRequired[str | None]
    switch_over: NotRequired[SwitchOver | None]
    # The image that the volume moves to.
    target: ImageLocation
    # The ticket for `volume promote` at the other host, in case this host is lost; null unless the volume is released
    # to that host and it has not answered yet.
    ticket: NotRequired[str | None]
    # Name of the volume, which may have been removed since; of several the names with commas between them.
    volume: str
    waiting_for: NotRequired[WaitingFor | None]


class MigrationAtWork(TypedDict):
    """A migration, with its latest samples."""

    # The migration with its state.
    migration: Migration
    # Whether it has a recording, so that its report has more than the journal.
    recorded: bool
    # The samples of its last seconds; empty if it has ended, or is recorded at the other host.
    samples: list[HistorySample]


class MigrationHistory(TypedDict):
    """A migration and its recording. All times are in milliseconds since it began, negative before that."""

    # The migration with its present state.
    migration: Migration
    recording: NotRequired[Recording | None]


class MigrationPlan(TypedDict):
    """The expected effects of a migration, and its obstacles."""

    # Largest number of bytes of volumes and memory to copy, without guest writes meanwhile.
    bytes_max: int
    # Expected rate in bytes a second; null: unknown.
    bytes_per_second: NotRequired[int | None]
    # Whether it would begin now or be queued; false if there are `refusals`.
    can_begin: bool
    forecast: NotRequired[Forecast | None]
    # Name of the target host; null: this host.
    host: NotRequired[str | None]
    # The connections that would carry it; empty on one host.
    links: NotRequired[list[PlannedLink]]
    machine: NotRequired[PlannedMachine | None]
    # Name of the volume or the VM.
    name: str
    queue: NotRequired[QueuePlace | None]
    rate: NotRequired[RateOrigin | None]
    # The obstacles, each with what to do about it.
    refusals: list[ErrorDetail]
    # How it would be copied; `auto`: the daemon does not say.
    strategy: NotRequired[Strategy]
    # Why the daemon would choose this strategy; empty: it is ordered.
    strategy_reason: NotRequired[str]
    # The volumes that would move, each with its target.
    volumes: list[PlannedVolume]
    # Costs besides time, parts that would stay behind, and risks.
    warnings: list[str]


# The state of a migration: under way, or its outcome.
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
    """A missing range of a volume."""

    # Length of the range, in bytes.
    length_bytes: int
    # Begin of the range, in bytes.
    offset_bytes: int


# The kind of object that a name means.
Named = Literal[
    "any",
    "volume",
    "vm",
]


class NewEvacuation(TypedDict):
    """Empties this host."""

    # When everything is to have left, in milliseconds since 1970; null: there is no deadline.
    deadline_unix_ms: NotRequired[int | None]
    # Whether VMs that will not have left are shut down before the deadline. Otherwise they go on running here.
    stop_rest: NotRequired[bool]
    # The hosts that may take something, each as `HOST` or `HOST:STORE`; empty: every host that is connected.
    to: NotRequired[list[str]]


class NewGrant(TypedDict):
    """Grants a user access to the API over TLS."""

    # Digest of the user's public key, 64 hexadecimal digits; null: the answer has an access token, which registers the
    # key.
    key: NotRequired[str | None]
    # Life of the access token, in seconds.
    lifetime_s: NotRequired[int]
    # Name of the user: letters, digits, '.', '-' and '_'.
    name: str
    # Rights of the user.
    role: Role


class NewIdentity(TypedDict):
    """Makes the host's identity."""

    # Name of the host: letters, digits, '.', '-' and '_'.
    name: str


class NewInvitation(TypedDict):
    """Makes an invitation for one other host."""

    # Whether the host that redeems it may bring VMs, which run on this one.
    allow_machines: NotRequired[bool]
    # Life of the invitation, in seconds.
    lifetime_s: int


class NewSnapshot(TypedDict):
    """An order to take snapshots of volumes at one instant. Each is a read-only volume `VOLUME@LABEL`."""

    # The label, of the characters of a volume's name; null: the time in UTC.
    label: NotRequired[str | None]
    # Name of the store, a folder; null: that of each volume.
    store: NotRequired[str | None]
    # The VM all of whose volumes it is about.
    vm: NotRequired[str | None]
    # The names of the volumes; empty with `vm`.
    volumes: NotRequired[list[str]]


class NewStandby(TypedDict):
    """An order to keep a standby of volumes that are served here."""

    # The most bytes a second that it sends; by default there is no limit.
    bandwidth_bytes_per_second: NotRequired[int | None]
    # Seconds between two cuts; 10 by default.
    every_seconds: NotRequired[float | None]
    # The host that keeps the standby.
    host: str
    if_silent: NotRequired[IfSilent | None]
    keep: NotRequired[KeepPoints | None]
    # The age in seconds beyond which the standby is behind; six intervals by default, and a minute at least.
    rpo_seconds: NotRequired[float | None]
    # The store at that host; by default that host chooses.
    store: NotRequired[str | None]
    # The volumes, by name, or one VM: its volumes. All are cut at the same moments.
    volumes: list[str]


class NewVm(TypedDict):
    """Adds a VM without starting it."""

    # Its definition in TOML: the command that starts it, its disks and its files.
    definition: str
    # Its name: letters, digits, '.', '_' and '-'.
    name: str


class NewVolume(TypedDict):
    """Makes a volume, and serves it."""

    # How it is offered to its clients.
    export: NotRequired[ExportSettings]
    # Its name: 1 to 64 letters, digits, `.`, `_` and `-`; the first is a letter or digit.
    name: str
    # Where its content comes from.
    source: VolumeSource


class NewlyGranted(TypedDict):
    """A new grant, with its access token."""

    # The grant that was made.
    grant: Grant
    # Where the daemon listens, by its configuration.
    listen: NotRequired[str | None]
    # The access token for the user; null: the key is known. **It holds a secret.**
    token: NotRequired[str | None]


class NoticeDestination(TypedDict):
    """A program or webhook that notices go to."""

    # When it last took one, in milliseconds since 1970; null: not since the daemon's start.
    delivered_unix_ms: NotRequired[int | None]
    # Why it does not take the present one; null: it does, or there is none.
    fault: NotRequired[str | None]
    # Number of notices that it never got since the daemon's start: they were too many, or a day old.
    lost: int
    # The path of the program, or the address of the webhook.
    to: str
    # Number of notices that wait for it.
    waiting: int


class Overview(TypedDict):
    """The host at one instant. The daemon collects it at most once a second; requests in between get the latest one."""

    # The daemon with its version.
    host: Host
    # Queued migrations, migrations under way and the latest ended ones, oldest first; without tickets.
    migrations: list[MigrationAtWork]
    # Number of ended migrations that the daemon knows; `migrations` may have fewer.
    migrations_ended: int
    # Its name for other hosts, or else the system's host name.
    name: str
    # The other hosts, by name.
    peers: list[PeerAtWork]
    # The daemon's problems.
    readiness: Readiness
    # The standbys of both roles, by name, without recovery points and tests; some seconds old.
    standbys: NotRequired[list[Standby]]
    # The stores, by name; some seconds old.
    stores: list[Store]
    # When it was taken, in milliseconds since 1970.
    taken_unix_ms: int
    # The VMs, by name, without their definitions; some seconds old.
    vms: list[Vm]
    # The volumes, by name.
    volumes: list[VolumeAtWork]


class Pace(TypedDict):
    """What the pacers of a migration's disks do at present."""

    # The rate of all copies of the disk together while guests are active, in bytes a second.
    bytes_per_second: float
    # The part of their throughput, in percent, that guests of these disks lose to copies which wait for each answer;
    # for other guests an upper bound.
    guests_lose_percent: float


class PageLink(TypedDict):
    """A link with which one browser signs in to the page, and then has its buttons."""

    # How long the key can be used, in seconds.
    lifetime_s: int
    # The rights of the browser: those of the client that asks, and at most `operate`.
    role: Role
    # How long the browser stays signed in, in seconds.
    session_s: int
    # The address of the page, with a key that works once. **It holds a secret.**
    url: str


# A part of a daemon.
Part = Literal[
    "daemon",
    "journal",
    "volume",
    "hosts",
    "access",
    "migration",
    "vm",
    "standby",
    "store",
    "data-folder",
]


class Peer(TypedDict):
    """Another host that this one is paired with."""

    # Present rate of receiving over all connections, in bytes a second.
    bytes_received_per_second: NotRequired[int]
    # Present rate of sending over all connections, in bytes a second.
    bytes_sent_per_second: NotRequired[int]
    # Its own name, if that was used here already.
    calls_itself: NotRequired[str | None]
    # Whether there is at least one connection.
    connected: bool
    # Every connection, and every pair of links that is being dialled.
    connections: NotRequired[list[PeerConnection]]
    # Digest of its public key, 64 hexadecimal digits.
    id: str
    # Why a connection was last lost.
    last_error: NotRequired[str | None]
    # The addresses at which it is dialled.
    links: list[PeerLink]
    # Whether it may bring VMs, which run on this host.
    machines: NotRequired[bool]
    # Its name at this host.
    name: str
    # Version of its program; null: not yet known.
    program_version: NotRequired[str | None]
    # Version of the protocol that both speak; null before the first connection.
    protocol_version: NotRequired[int | None]
    # Bytes that are queued for it.
    queued_bytes: NotRequired[int]
    # Number of its requests that were refused since the daemon began, because no migration gave it the right.
    refused_requests: NotRequired[int]
    # Milliseconds since the first connection was made, or the last one was lost; null while it is not dialled.
    since_ms: NotRequired[int | None]
    # Bytes that were sent and not acknowledged.
    unacknowledged_bytes: NotRequired[int]


class PeerAtWork(TypedDict):
    """Another host, with the traffic over its connections."""

    # Every connection with it.
    connections: list[ConnectionAtWork]
    # The other host, without its connections.
    peer: Peer


class PeerConnection(TypedDict):
    """A connection to another host, or a pair of links that should have one."""

    # Its rate in bytes a second when it was last fully used.
    bytes_per_second: NotRequired[int | None]
    # Bytes received on the wire so far.
    bytes_received: int
    # Present rate of receiving in bytes a second; null as above.
    bytes_received_per_second: NotRequired[int | None]
    # Bytes sent on the wire so far.
    bytes_sent: int
    # Present rate of sending in bytes a second; null while there is no connection, or it has just begun.
    bytes_sent_per_second: NotRequired[int | None]
    # Whether the other host has dialled it.
    inbound: bool
    # Why the connection was last lost, or could not be made.
    last_error: NotRequired[str | None]
    # Address at this host.
    local: str
    # Size of the data after compression, in thousandths of its size before.
    packed_per_mille: int
    # Address at the other host.
    remote: str
    # The latest round trip, in microseconds.
    round_trip_us: NotRequired[int | None]
    # Milliseconds since it went up or down.
    since_ms: int
    # Whether the connection is up.
    up: bool


class PeerLink(TypedDict):
    """An address of another host."""

    # Address and port of the link.
    address: str
    # Speed of its network in bits a second, if known.
    speed_bits_per_second: NotRequired[int | None]


# The step of a migration.
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
    """The begin of a phase."""

    # When the phase began.
    at_ms: float
    # The phase that began.
    phase: Phase


class PlannedLink(TypedDict):
    """A connection that would carry a migration."""

    # Its rate in bytes a second when it was last fully used.
    bytes_per_second: NotRequired[int | None]
    # Address at this host.
    local: str
    # Address at the other host.
    remote: str
    # The latest round trip, in microseconds.
    round_trip_us: NotRequired[int | None]


class PlannedMachine(TypedDict):
    """A VM that would move with its volumes."""

    # Least downtime of an idle VM, by the measured round trip, in milliseconds.
    least_downtime_ms: NotRequired[float | None]
    # Longest downtime that it may have, in milliseconds; null: it is stopped.
    max_downtime_ms: NotRequired[int | None]
    # Its memory in bytes; null: its QEMU does not report it, or it is stopped.
    memory_bytes: NotRequired[int | None]
    # Name of the VM.
    name: str
    # Whether it is stopped; it then moves without memory, and stays stopped.
    stopped: NotRequired[bool]


class PlannedVolume(TypedDict):
    """A volume that would move."""

    # Whether the new image would share its blocks with the old one, so that nothing is read or written.
    cloned: NotRequired[bool]
    # Why it would be copied between two stores of this host, and not cloned; null: it would be cloned, or goes to
    # another host.
    copied_because: NotRequired[str | None]
    # Free bytes at the target now; null: the store does not report it.
    free_bytes: NotRequired[int | None]
    # Allocated bytes of its image: the most that would be copied.
    held_bytes: int
    # Name of the volume.
    name: str
    # Whether the target has a kept image of the volume, so that only later writes would be sent.
    replica: NotRequired[bool]
    # Whether this host can open the target's folder, so that blocks would be written there directly.
    shared: NotRequired[bool]
    # Size of the volume in bytes.
    size_bytes: int
    # The image that it leaves.
    source: ImageLocation
    target: NotRequired[ImageLocation | None]


class Problem(TypedDict):
    """Something that a daemon should do and does not."""

    # The problem with its reason, as text.
    message: str
    # Name of the volume, VM, store or host, or number of the migration; null for other parts.
    name: NotRequired[str | None]
    # The part of the daemon with the problem.
    part: Part


class PromoteStandby(TypedDict):
    """An order to promote a standby that is kept here."""

    # Leave its VMs stopped.
    leave_stopped: NotRequired[bool]
    # Other names that its volumes get here, by their own.
    names: NotRequired[dict[str, str]]
    # The age in seconds that is accepted; by default an hour.
    older_than_ok_seconds: NotRequired[float | None]
    # The recovery point; by default the newest.
    point: NotRequired[str | None]
    # Name of the host that had the volumes, and is off: it does not serve them, and will not. While it is not certain
    # at which of two hosts they are, the names of both, with a comma between them.
    source_is_off: NotRequired[str | None]


class PromoteVolume(TypedDict):
    """Makes this host the owner of a volume whose source or former owner does not answer."""

    # Of a volume that is not served because another file or device has the name of its image: that is the volume's
    # image from now on (a backup that was put back, a store that was copied to another disk). Also of a complete copy
    # that waits for its source, and of a volume that has left and whose new host has not ended its migration; with
    # `force` it is promoted or taken back as well. **N.B.** What the volume had before is not looked for.
    exchanged: NotRequired[bool]
    # Promotes without a ticket. **N.B.** If the other host keeps serving the volume, there are two copies of it. With
    # `without_missing`: even while missing blocks still arrive.
    force: NotRequired[bool]
    # For an `unconfirmed` volume of a restored journal: it belongs to this host. **N.B.** If another host has it, there
    # are two copies of it. With `force`: even if another host or the image contradicts.
    restored: NotRequired[bool]
    # With `restored`, for a volume on a device or an export: its size in bytes. It may have grown since the backup, and
    # the device may be larger.
    size_bytes: NotRequired[int | None]
    # The ticket that the other host prints once it has released the volume. It proves that no other host has the
    # volume.
    ticket: NotRequired[str | None]
    # Of a volume that waits for the host of its standby to say that it has not promoted it: serve it. With `force`:
    # although that host says that it has. **N.B.** Then both hosts have the volume.
    unasked: NotRequired[bool]
    # For an incomplete volume whose former host is lost: reads of missing blocks become I/O errors instead of waiting.
    # **N.B.** This is final: the blocks are never fetched.
    without_missing: NotRequired[bool]


class QueuePlace(TypedDict):
    """A place in the queue of migrations that wait for their turn."""

    # When it begins, in milliseconds since 1970, if it waits for that time; otherwise null.
    begins_unix_ms: NotRequired[int | None]
    # Its place in the queue, where 1 is the first.
    place: int
    # The limit of the configuration that it waits for, with the migrations that have reached it.
    reason: str
    # Number of migrations in the queue.
    waiting: int


# The origin of a rate.
RateOrigin = Literal[
    "ordered",
    "measured",
    "stated",
]


class Readiness(TypedDict):
    """The problems of a daemon."""

    # Everything that the daemon should do and does not.
    problems: list[Problem]
    # Whether there are no problems.
    ready: bool
    # Conditions that need attention, but leave the daemon ready.
    warnings: NotRequired[list[Problem]]


class Recording(TypedDict):
    """The recording of a migration."""

    after: NotRequired[GuestFigures | None]
    # Limit of the copying in bytes a second; null: no limit.
    bandwidth_bytes_per_second: NotRequired[int | None]
    before: NotRequired[GuestFigures | None]
    # Counts of the decisions for writes and chunks.
    decisions: Decisions
    during: NotRequired[GuestFigures | None]
    # When it ended; null while it is under way, or if the daemon ended first.
    ended_ms: NotRequired[float | None]
    # Longest time that a guest's write might be held, in milliseconds.
    mirror_wait_max_ms: float
    # The phases in their order; copying begins at 0.
    phases: list[PhaseEntered]
    # The ended rounds, if it was copied in rounds.
    rounds: NotRequired[list[Round]]
    # Guests' requests and copied bytes, in order of time. A long migration has longer samples, not more.
    samples: list[HistorySample]
    # Size of the volume in bytes.
    size_bytes: int
    # The strategy, for example `mirror` or `tracking`.
    strategy: str
    # Times in which guest writes were not sent to the target.
    suspensions: list[Suspension]
    # The reasons of waits in which nothing was written to the target, with their total time.
    waits: list[Waited]


class RecoveryPoint(TypedDict):
    """A recovery point of a standby."""

    # The moment of the source whose state it has, by the clock of the standby's host, in milliseconds since 1970.
    as_of_unix_ms: int
    # Its name, for a promotion.
    name: str


class RedeemGrant(TypedDict):
    """Redeems an access token."""

    # Digest of the client's own public key, 64 hexadecimal digits, which has the role from now on.
    key: str


class RemainingSeconds(TypedDict):
    """Expected time until the copying ends, counted from now."""

    # Earliest expected end, in seconds.
    earliest: float
    # Latest expected end, in seconds.
    latest: float


class RemovedPeer(TypedDict):
    """A host that was removed."""

    # Digest of its public key, 64 hexadecimal digits.
    id: str
    # Its former name at this host.
    name: str


class RemovedVm(TypedDict):
    """A VM that was removed."""

    # Name of the removed VM.
    name: str
    # Names of the volumes that were its disks; they stay.
    volumes: list[str]


class RemovedVolume(TypedDict):
    """A removed volume, and what was done with its image."""

    # The host that has the volume, if this host only forwarded clients.
    host: NotRequired[str | None]
    # Absolute path of its image, or the URI of the export that holds it; empty if that is at another host.
    image: str
    # The fate of its image.
    image_fate: ImageFate
    kept_because: NotRequired[KeptBecause | None]
    # Name of the removed volume.
    name: str
    # Names of its snapshots, which stay.
    snapshots: NotRequired[list[str]]


class Replica(TypedDict):
    """A kept image that a volume has left when it moved. It is fenced: nothing is served from it."""

    # Bytes that it takes in its store; null for a device or an export.
    allocated_bytes: NotRequired[int | None]
    # The format of the image.
    format: ImageFormat
    # Absolute path of the file or device, or the URI of the export.
    image: str
    # When the volume has left it, in milliseconds since 1970; null if that is not known.
    kept_unix_ms: NotRequired[int | None]
    # Whether it is a file, a device or an export.
    kind: ImageKind
    # The migration that has left it, for example `m7`. It holds the volume's content at that handover.
    migration: str
    # Whether a return of the volume can reuse it, so that only later writes are sent.
    shortens_return: bool
    # Size of the volume in bytes; null if that is not known.
    size_bytes: NotRequired[int | None]
    # Name of the store that it is in; null for an image that was served in place.
    store: NotRequired[str | None]
    # Name of the volume that has left it.
    volume: str
    # Where the volume went: a store, or `HOST:STORE` of another host; null if the daemon has forgotten that.
    went_to: NotRequired[str | None]


class ReplicaUsed(TypedDict):
    """A kept image of the volume at the other host, which the migration reuses."""

    # Allocated bytes of the volume at the beginning: what would have been copied otherwise.
    bytes_held: int
    # Of these, the bytes that the other host had already. Guest writes during the migration reduce them.
    bytes_spared: int


class ReprotectStandby(TypedDict):
    """An order to turn the direction of a promoted standby round: the host that had the volumes before keeps a
    standby of them.
    """

    # The most bytes a second that it sends; by default there is no limit.
    bandwidth_bytes_per_second: NotRequired[int | None]
    # Seconds between two cuts; 10 by default.
    every_seconds: NotRequired[float | None]
    if_silent: NotRequired[IfSilent | None]
    keep: NotRequired[KeepPoints | None]
    # The age in seconds beyond which the standby is behind; six intervals by default, and a minute at least.
    rpo_seconds: NotRequired[float | None]


class ResizeVolume(TypedDict):
    """Makes a volume larger; it never becomes smaller."""

    # Accepts a size that is larger than the whole store; without it, such a size is taken for a slip of the pen.
    beyond_store: NotRequired[bool]
    # The new size in bytes, a multiple of 4096. The new part reads as zeroes. An order for the present size succeeds.
    size_bytes: int


class RevertVolumes(TypedDict):
    """An order to revert volumes to snapshots of them, all or none."""

    # Whether a snapshot of the present state is taken first.
    keep_current: NotRequired[bool]
    # The label of the snapshots; for one volume also the name of its snapshot.
    snapshot: str
    # The VM all of whose volumes it is about.
    vm: NotRequired[str | None]
    # The names of the volumes; empty with `vm`.
    volumes: NotRequired[list[str]]


# The rights of a user of the API over TLS. Each role includes the roles before it.
Role = Literal[
    "read",
    "operate",
    "admin",
]


class Round(TypedDict):
    """An ended round of a volume that is copied in rounds."""

    # Number of blocks that were copied in this round.
    blocks: int
    # Bytes that were written to the target for these blocks.
    bytes: int
    # Bytes of blocks that guests have written meanwhile, which are left to the next round.
    dirtied: int
    # Bytes of hot blocks, which guests write again and again, that were put off to a later round.
    put_off: NotRequired[int]
    # Duration of the round in seconds.
    seconds: float
    # Position of the volume in the migration, counted from 0.
    volume: int


class SeedImage(TypedDict):
    """An image for a volume of a standby."""

    # The name of a raw image in the folder of the standby's store. It becomes the standby's.
    file: str
    # The volume; by default the only one of the standby.
    volume: NotRequired[str | None]


class SeedStandby(TypedDict):
    """An order to begin a standby that is kept here with images, so that only the difference is sent."""

    # Instead of images: the name of an exported folder in the folder of the standby's store. Only what was written
    # since is sent.
    exported: NotRequired[str | None]
    # The images. A volume without one is sent as a whole.
    images: NotRequired[list[SeedImage]]


class SetGrant(TypedDict):
    """Changes the role of a user."""

    # The new role of the user.
    role: Role


class SetHost(TypedDict):
    """Changes this host."""

    # Whether the host takes nothing new: no volumes and VMs, neither made here nor from other hosts.
    drained: bool


class SetMigration(TypedDict):
    """Changes a migration that is under way."""

    # New limit of the copying in bytes a second, of volumes and memory together; an explicit `null` removes the limit,
    # and without the field it stays.
    bandwidth_bytes_per_second: NotRequired[int | None]
    # New impact on guests, as in `MigrateVolume::impact_percent`; without it, it stays.
    impact_percent: NotRequired[int | None]


class SetPeer(TypedDict):
    """Changes what this host knows of another one. What is left out stays."""

    # Addresses and ports at which it can be reached, the best first; none: it has to connect to this host.
    addresses: NotRequired[list[str] | None]
    # Whether it may bring VMs, which run on this one.
    allow_machines: NotRequired[bool | None]


class SetStandby(TypedDict):
    """A change of a standby at its source. Only the given fields change."""

    # The most bytes a second that it sends; zero: no limit.
    bandwidth_bytes_per_second: NotRequired[int | None]
    # Seconds between two cuts.
    every_seconds: NotRequired[float | None]
    if_silent: NotRequired[IfSilent | None]
    # Whether it is paused.
    paused: NotRequired[bool | None]
    # The age in seconds beyond which the standby is behind.
    rpo_seconds: NotRequired[float | None]


class SetVm(TypedDict):
    """Changes a VM. What is null stays as it is."""

    # Its priority in an evacuation: a higher one leaves first.
    priority: NotRequired[int | None]
    # Whether it is started when its host has booted.
    start_at_boot: NotRequired[bool | None]
    # VMs with a lower order start first, and stop last.
    start_order: NotRequired[int | None]
    # What VMs of a higher order wait for: `tcp:HOST:PORT`, `console:TEXT`, or `nothing`.
    wait_for: NotRequired[str | None]
    # The longest that they wait for it, in seconds.
    wait_max_s: NotRequired[int | None]


# Whether a store of another host may be written to directly.
SharedTarget = Literal[
    "auto",
    "never",
]


class SnapshotOf(TypedDict):
    """What a volume is a snapshot of."""

    # The same for all snapshots of one instant.
    group: str
    # The label of the snapshot.
    label: str
    # When it was ordered, in milliseconds since 1970.
    taken_unix_ms: int
    # The name of the volume when the snapshot was taken.
    volume: str
    # The identity of the volume, which may have left or be gone.
    volume_id: str


class Standby(TypedDict):
    """A standby, as one of its two hosts sees it."""

    # Seconds since the state that a promotion would bring back; null: there is none, or it is not known here.
    age_seconds: NotRequired[float | None]
    # The most bytes a second that it sends. At the source only.
    bandwidth_bytes_per_second: NotRequired[int | None]
    # Bytes that the other host had already, and that were only compared, since the daemon began. At the source only.
    bytes_found: NotRequired[int | None]
    # Bytes that were sent since the daemon began. At the source only.
    bytes_sent: NotRequired[int | None]
    # Bytes that the standby lacks. At the source only.
    bytes_waiting: NotRequired[int | None]
    check: NotRequired[StandbyCheck | None]
    compared: NotRequired[StandbyCompared | None]
    # Seconds between two cuts. At the source only.
    every_seconds: NotRequired[float | None]
    export: NotRequired[StandbyExport | None]
    # The other host.
    host: str
    # Its identity, the same at both hosts: 32 hexadecimal digits.
    id: str
    if_silent: NotRequired[IfSilent | None]
    # Its name at this host: that of the volume or VM, and that of the other host.
    name: str
    # The recovery points, the oldest first. At the standby's host only.
    points: NotRequired[list[RecoveryPoint]]
    # What it waits for, or why it is in that state.
    reason: NotRequired[str | None]
    # The part of this host.
    role: StandbyRole
    # The age in seconds beyond which it is behind. At the source only.
    rpo_seconds: NotRequired[float | None]
    # Its state.
    state: StandbyState
    # The store at the standby's host.
    store: str
    test: NotRequired[StandbyTest | None]
    # How often everything is compared by itself, in seconds; null: only if it is ordered. At the source only.
    verify_seconds: NotRequired[float | None]
    # The VMs whose volumes are all in it: a promotion starts them.
    vms: NotRequired[list[StandbyVm]]
    # Its volumes, by name.
    volumes: list[str]


class StandbyCheck(TypedDict):
    """A comparison of all blocks of a standby with those of its source."""

    # When it was begun, in milliseconds since 1970.
    begun_unix_ms: int
    # Bytes that differ without such a reason. They are sent again.
    bytes_differing: int
    # Bytes that were compared.
    bytes_done: int
    # Bytes of these that the standby lacked just then, or that guests wrote meanwhile: they are sent anyway.
    bytes_left_out: int
    # Bytes of the volumes.
    bytes_total: int
    # When it has ended, in milliseconds since 1970; null: it is under way.
    ended_unix_ms: NotRequired[int | None]
    # Whether it was interrupted because blocks cannot be read.
    failed: NotRequired[bool]
    # Why it has ended before everything was compared.
    interrupted: NotRequired[str | None]
    # Whether an administrator has ordered it; else the configuration has.
    ordered: NotRequired[bool]


class StandbyCompared(TypedDict):
    """A comparison of everything that has reached its end."""

    # Bytes that differed. They were sent again.
    bytes_differing: int
    # When it ended, in milliseconds since 1970.
    unix_ms: int


class StandbyExport(TypedDict):
    """An export of a standby into a folder, which somebody carries to the standby's host."""

    # When it was begun, in milliseconds since 1970.
    begun_unix_ms: int
    # How far the last image is hashed, in bytes.
    bytes_hashed: int
    # Bytes that were written.
    bytes_written: int
    # When it has ended, in milliseconds since 1970; null: it is under way.
    ended_unix_ms: NotRequired[int | None]
    # Why there is no folder.
    failed: NotRequired[str | None]
    # The folder.
    folder: str


# The part of this host in a standby.
StandbyRole = Literal[
    "source",
    "standby",
]


# The state of a standby.
StandbyState = Literal[
    "seeding",
    "current",
    "behind",
    "paused",
    "no-recovery-point",
    "promoted",
    "diverged",
    "used",
    "waiting",
]


class StandbyTest(TypedDict):
    """A test of a standby: volumes of the standby's host that are a clone of a recovery point."""

    # When it was ordered, in milliseconds since 1970.
    begun_unix_ms: int
    boot_check: NotRequired[BootCheck | None]
    # Bytes that were copied for it, while it is made.
    bytes_done: NotRequired[int | None]
    # Bytes that have to be copied, while it is made; null: it shares blocks with the standby.
    bytes_total: NotRequired[int | None]
    # When it ends at the latest, in milliseconds since 1970.
    ends_unix_ms: int
    # Its name.
    name: str
    # The recovery point, once the clone is made.
    point: NotRequired[str | None]
    # Why it ends, or cannot be deleted.
    reason: NotRequired[str | None]
    # How far it is.
    state: StandbyTestState
    # Its VMs.
    vms: NotRequired[list[StandbyTestVm]]
    # Its volumes.
    volumes: list[StandbyTestVolume]


# How far a test of a standby is.
StandbyTestState = Literal[
    "making",
    "running",
    "ending",
    "ended",
]


class StandbyTestVm(TypedDict):
    """A VM of a test."""

    # Its name.
    name: str
    # The VM of which it is a second instance.
    of: str


class StandbyTestVolume(TypedDict):
    """A volume of a test."""

    # Its name.
    name: str
    # The volume of which it is a clone.
    of: str
    # The URI at which it is served while the test is running.
    uri: str


class StandbyVm(TypedDict):
    """A VM of a standby."""

    # When the standby's host received what starting it takes, in milliseconds since 1970; null: never, or it is not
    # known here.
    described_unix_ms: NotRequired[int | None]
    # The name of the VM.
    name: str
    # Why it could not be started at the standby's host, or why it does not run after a promotion.
    problem: NotRequired[str | None]


class StopVm(TypedDict):
    """Stops a VM that runs."""

    # Cut its power at once, instead of pressing its power button.
    now: NotRequired[bool]
    # Seconds that its guest may take to shut down; after that the order fails, and the VM runs on. null: 60.
    wait_s: NotRequired[int | None]


class Store(TypedDict):
    """A place for images. A folder holds any number of images; a device, and the export of another NBD server, one."""

    # Advice that would make guests faster there, as text; null: there is none.
    advice: NotRequired[str | None]
    # Bytes that volumes may still use; 0 while the store has a problem, and of an export.
    bytes_free: int
    # Total size of its volumes, as their clients see it. If it exceeds `bytes_total`, the store cannot hold all of
    # their data.
    bytes_provisioned: NotRequired[int]
    # Size of the file system or device in bytes; 0 while the store has a problem, and of an export.
    bytes_total: int
    # Images of the same kind that programs use without Sterna, such as a released VM: each with its users, as text.
    images_in_use: NotRequired[list[str]]
    # How the configuration slows the store down or makes it fail on purpose, as text; null: it does not.
    impairment: NotRequired[str | None]
    # Whether it is a folder, a device or an export.
    kind: NotRequired[StoreKind]
    # Its name in the configuration.
    name: str
    # Why a device or an export cannot take a volume; null: it can, or it is a folder.
    occupied: NotRequired[str | None]
    # Absolute path of the folder or device, or the URI of the export.
    path: str
    # Why the store cannot be used; null if it can.
    problem: NotRequired[str | None]
    # Names of images in the folder that belong to no known volume, migration or kept copy. Either the data folder was
    # lost, or a user has put them there.
    unknown_images: NotRequired[list[str]]
    # Number of volumes whose image is here.
    volumes: int


class StoreContent(TypedDict):
    """The content of a store."""

    # The files, by name. The content of a device or an export counts as one file.
    files: list[StoreFile]
    # Number of files that were left out, because there are too many.
    files_left_out: int
    # Whether the store is a folder, a device or an export.
    kind: StoreKind
    # Absolute path of the folder or device, or the URI of the export.
    path: str
    # Why the store could not be read; null: it was read.
    problem: NotRequired[str | None]
    # Its name in the configuration.
    store: str


class StoreFile(TypedDict):
    """A file in a store."""

    # Bytes that it takes in the store; null for devices and exports.
    allocated_bytes: NotRequired[int | None]
    format: NotRequired[ImageFormat | None]
    # The migration that fills it, or that has left it.
    migration: NotRequired[str | None]
    # When it was last written to, in milliseconds since 1970; null if that is not known.
    modified_unix_ms: NotRequired[int | None]
    # Its name in the folder, with replacements for bytes that are not UTF-8. For a device or an export its path or URI.
    name: str
    # Further information about it, as text.
    note: NotRequired[str | None]
    # The role of the file.
    role: FileRole
    # Size of the disk in bytes, as a guest would see it; null if that is not known.
    size_bytes: NotRequired[int | None]
    # Name of the volume that it belongs to, if that is known.
    volume: NotRequired[str | None]


# The kind of a store.
StoreKind = Literal[
    "folder",
    "device",
    "nbd",
]


# How a volume is copied while its guests write.
Strategy = Literal[
    "auto",
    "mirror",
    "tracking",
    "three-phase",
    "post-copy",
]


class SuspendVm(TypedDict):
    """Suspends a VM to disk."""

    # Seconds that writing its memory may take, while it is paused; after that the order fails, and the VM runs on.
    # null: 600.
    timeout_s: NotRequired[int | None]


class Suspension(TypedDict):
    """A time in which guest writes were not sent to the target, by the samples."""

    # Begin of its first sample.
    at_ms: float
    # Its end; null if it did not end.
    ended_ms: NotRequired[float | None]
    # The reason, as text.
    reason: str


class SwitchOver(TypedDict):
    """How long the guest was held at the switch-over, in milliseconds. The parts add up to the total."""

    # Time until the guest requests in flight had ended.
    drain_ms: float
    # Total time, from the first held request to the opening of the gate.
    gate_closed_ms: float
    # Time to make the new ownership durable.
    own_ms: float
    # Time to flush both stores and to make *prepared* durable at the target.
    prepare_ms: float
    # Time to make the release durable: the commit point.
    release_ms: float
    # Time to change the store below the gate, try a read, and open the gate.
    start_ms: float


# The networks of the VMs of a test.
TestNetworks = Literal[
    "none",
    "keep",
]


class TestStandby(TypedDict):
    """An order to test a standby that is kept here."""

    # Wait for this text on a serial console of its VMs.
    boot_check: NotRequired[str | None]
    # Seconds that this may take from the start of the VMs; 120 by default.
    boot_check_timeout_seconds: NotRequired[float | None]
    # Seconds after which it ends; an hour by default. With a `boot_check`, it ends with that unless this is given.
    for_seconds: NotRequired[float | None]
    # The name of the test; by default that of the standby with `-test` at its end. One volume alone has this name;
    # several have it before their own.
    name: NotRequired[str | None]
    # The networks of its VMs.
    networks: NotRequired[TestNetworks]
    # The recovery point; by default the newest state.
    point: NotRequired[str | None]


class Vm(TypedDict):
    """A VM of the host."""

    # When it was added here, in milliseconds since 1970.
    added_unix_ms: int
    awaited_start: NotRequired[AwaitedStart | None]
    # Its definition as it was written, or, for an adopted VM, as another host would get it; null: it has none.
    definition: NotRequired[str | None]
    # Its hypervisor with the version, such as `QEMU 10.0.2` or `libvirt 9.0.0`; null while it does not run.
    hypervisor: NotRequired[str | None]
    # Paths of the images of these volumes that are at this host.
    images: NotRequired[list[str]]
    # Name of its domain in libvirt; null: it is not a domain of libvirt.
    libvirt_domain: NotRequired[str | None]
    # Absolute path of the file with QEMU's output; null: Sterna has not started it.
    log: NotRequired[str | None]
    # The reason of its state, or QEMU's last output; null if there is none.
    message: NotRequired[str | None]
    # Absolute path of its monitor's socket, or of libvirt's. The daemon is connected to a monitor; QEMU serves one
    # client at a time.
    monitor: str
    # Its name, unique at this host.
    name: str
    # Its priority in an evacuation: a higher one leaves first.
    priority: NotRequired[int]
    # Number of QEMU's process; null while there is none.
    process: NotRequired[int | None]
    start: NotRequired[VmStart | None]
    # Whether the VM runs at present.
    state: VmState
    # Names of the volumes that are its disks.
    volumes: list[str]
    whole_move: NotRequired[WholeMove | None]


class VmStart(TypedDict):
    """Whether and when a VM starts after a boot of its host. It moves with the VM."""

    # Whether it is started when the host has booted.
    at_boot: bool
    # VMs with a lower order start first, and stop last.
    order: int
    # What VMs of a higher order wait for: `tcp:HOST:PORT` until something accepts connections there, or `console:TEXT`
    # until a log in the VM's folder has this text; null: for its start alone.
    wait_for: NotRequired[str | None]
    # The longest that VMs of a higher order wait for this one, in seconds.
    wait_max_s: int


# The state of a VM.
VmState = Literal[
    "stopped",
    "starting",
    "running",
    "paused",
    "io_error",
    "shut_down",
    "crashed",
    "suspended",
    "arriving",
    "leaving",
    "unknown",
]


class Volume(TypedDict):
    """A volume of the host."""

    # When it was added to the host, in milliseconds since 1970.
    added_unix_ms: int
    # Bytes that its image takes in the store; null if the store does not report it.
    allocated_bytes: NotRequired[int | None]
    # The host by which it is attached here; null: it is not.
    attached_by: NotRequired[str | None]
    # The other hosts at which it is attached: they offer it to their clients.
    attachments: NotRequired[list[Attachment]]
    # Block size of its chronicle and its migrations, in bytes.
    block_size_bytes: int
    # Clients that are connected at other hosts, which forward them here.
    clients_elsewhere: NotRequired[list[ClientsElsewhere]]
    creation: NotRequired[VolumeCreation | None]
    filling: NotRequired[VolumeFilling | None]
    # The format of its image.
    format: ImageFormat
    # Number of handovers of the volume, counted from 0.
    generation: int
    # The other host that has the volume, if it is only forwarded here.
    host: NotRequired[str | None]
    # Its identity, 32 hexadecimal digits, the same at every host. Empty while the volume is being created.
    id: str
    # Absolute path of its image, or the URI of the export that holds it.
    image: str
    # Whether its image is a file, a device or an export.
    kind: ImageKind
    # Why it is not served; null while it is.
    message: NotRequired[str | None]
    # Identity of its migration under way.
    migration: NotRequired[str | None]
    # Its name, which is also the name of its export.
    name: str
    # Whether clients may only read.
    read_only: bool
    # Its size in bytes, as clients see it.
    size_bytes: int
    snapshot_of: NotRequired[SnapshotOf | None]
    # Absolute path of the unix socket in `uri`; it stays the same across moves and restarts.
    socket: str
    # Whether it is served, or why not.
    state: VolumeState
    statistics: NotRequired[VolumeStatistics | None]
    # The store that holds its image; null for an image that is served in place, or if another host has it.
    store: NotRequired[str | None]
    # The URI for NBD clients of other machines; null: the volume has no port.
    tcp_uri: NotRequired[str | None]
    # The URI that NBD clients connect to.
    uri: str


class VolumeAtWork(TypedDict):
    """A volume, with the present load of its guests."""

    activity: NotRequired[Activity | None]
    # Bytes that its image takes in the store, some seconds old; null: unknown.
    allocated_bytes: NotRequired[int | None]
    # Number of clients that other hosts forward here.
    clients_elsewhere: int
    # NBD connections at this host.
    connections: int
    creation: NotRequired[VolumeCreation | None]
    # Requests that failed since the daemon began to serve it.
    errors: int
    filling: NotRequired[VolumeFilling | None]
    # The format of its image.
    format: ImageFormat
    # The other host that has the volume.
    host: NotRequired[str | None]
    # Absolute path of its image, or the URI of the export that holds it.
    image: str
    # Whether its image is a file, a device or an export.
    kind: ImageKind
    # The latest error of a request.
    last_error: NotRequired[str | None]
    # Why it is not served; null while it is.
    message: NotRequired[str | None]
    # Identity of its migration under way.
    migration: NotRequired[str | None]
    # Name of the volume.
    name: str
    # Whether clients may only read.
    read_only: bool
    # Its size in bytes.
    size_bytes: int
    # Whether it is served, or why not.
    state: VolumeState
    # The store that holds its image; null for one that is served in place, or if another host has it.
    store: NotRequired[str | None]


class VolumeCreation(TypedDict):
    """Progress of the creation of a volume."""

    # Bytes of the given image that were read so far, holes included.
    bytes_done: int
    # Size of the given image in bytes.
    bytes_total: int


class VolumeFilling(TypedDict):
    """An incomplete volume that is served here, after `post-copy` or `three-phase`."""

    # Bytes that were missing when it was handed over.
    bytes_at_handover: int
    # Bytes that are still missing.
    bytes_missing: int
    # Bytes that need not be fetched, because clients have overwritten them.
    bytes_overwritten: int
    # Bytes that were fetched because a client waited for them.
    bytes_pulled: int
    # Bytes that were fetched in the background.
    bytes_pushed: int
    # Missing bytes that the other host cannot read. Clients that read them get I/O errors. They are tried again.
    bytes_unreadable: int
    # Name of the host that has the missing blocks. If that host or its image is lost, they are lost.
    host: str
    # Whether the missing blocks were given up (`volume promote --without-missing`).
    is_given_up: bool
    # The first 256 missing ranges, in order.
    ranges: list[MissingRange]
    # Reads that got an I/O error because the other host did not answer in time. QEMU stops the VM on such errors, and
    # Sterna resumes it by itself.
    reads_refused: NotRequired[int]
    # Requests of clients that wait for missing blocks.
    requests_waiting: int
    # Why nothing is fetched at present; null while blocks arrive.
    waits_for: NotRequired[str | None]


class VolumeSourceCreate(TypedDict):
    """A new image in a store. Removing the volume deletes the image, but not the content of a device or an export."""

    format: NotRequired[ImageFormat | None]
    # Absolute path of an image that is copied in, in any format; null: the volume reads as zeroes.
    image: NotRequired[str | None]
    kind: Literal["create"]
    # Size in bytes, a multiple of 512; null: that of `image`, rounded up to 4,096.
    size_bytes: NotRequired[int | None]
    # Name of the store; null: the only one.
    store: NotRequired[str | None]


class VolumeSourceClone(TypedDict):
    """A copy of another volume of this host as it is at one instant, also while it is used: with every write that
    was acknowledged before the order, as after a power cut at that instant. Removing the volume deletes the
    image.
    """

    format: NotRequired[ImageFormat | None]
    kind: Literal["clone"]
    # Name of the store, a folder; null: that of the other volume.
    store: NotRequired[str | None]
    # Name of the volume to copy.
    volume: str


class VolumeSourceAdd(TypedDict):
    """An existing image that is served in place. Removing the volume leaves the image. Exactly one of `image`,
    `device` and `nbd` is given.
    """

    # Absolute path of a block device.
    device: NotRequired[str | None]
    # Allow a device or an export that holds an old copy which a migration has left.
    fenced: NotRequired[bool]
    format: NotRequired[ImageFormat | None]
    # Absolute path of an image file.
    image: NotRequired[str | None]
    kind: Literal["add"]
    # URI of the export of another NBD server.
    nbd: NotRequired[str | None]


class VolumeSourceImport(TypedDict):
    """An unclaimed image in a store. It becomes the volume's image, and its file gets the volume's name; nothing is
    copied. Removing the volume leaves it.
    """

    # Name of the file in it.
    file: str
    format: NotRequired[ImageFormat | None]
    kind: Literal["import"]
    # Name of the store, a folder.
    store: str


# Whether a volume is served, or why not.
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
    """Requests of a volume's guests since the daemon began to serve it."""

    # Bytes that guests have read.
    bytes_read: int
    # Bytes that guests have written.
    bytes_written: int
    # NBD connections at this moment.
    connections: int
    # Name of the I/O engine: `io_uring` or `threads`.
    engine: str
    # Number of requests that failed.
    errors: int
    # Number of flush requests.
    flushes: int
    # The latest error of a request; null: no request has failed.
    last_error: NotRequired[str | None]
    # Number of read requests.
    reads: int
    # Requests in flight at this moment.
    requests_in_flight: int
    # Number of writes, discards and zeroing.
    writes: int


class Waited(TypedDict):
    """A reason for which a migration waited, by the samples."""

    # The reason of the waits, as text.
    reason: str
    # Total time of these waits, in milliseconds.
    total_ms: float


class WaitingFor(TypedDict):
    """The reason why a migration waits."""

    # The reason as text.
    reason: str
    # Milliseconds until the wait is given up; null: it has no limit.
    remaining_ms: NotRequired[int | None]


class WholeMove(TypedDict):
    """Whether an adopted VM can move to another host as a whole."""

    # Parts of its command that would stay behind; its guest does not notice them.
    left_behind: list[str]
    # The obstacle, with what to do about it; null: the VM can move.
    obstacle: NotRequired[str | None]


# The kind of a workload.
WorkloadKind = Literal[
    "vm",
    "volume",
]


# What becomes of a workload.
WorkloadState = Literal[
    "waiting",
    "moving",
    "held",
    "stopping",
    "left",
    "stopped",
    "stays",
]


class YieldVolume(TypedDict):
    """How the volumes of a promoted standby are given up."""

    # Also while clients are connected; they are disconnected.
    force: NotRequired[bool]
    # At the first host: also if the host that has promoted the standby has not agreed. It may have given the volumes
    # up, too.
    unasked: NotRequired[bool]


# Where the content of a new volume comes from.
VolumeSource = VolumeSourceCreate | VolumeSourceClone | VolumeSourceAdd | VolumeSourceImport
