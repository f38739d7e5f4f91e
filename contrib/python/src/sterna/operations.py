"""The operations of the API, one method each.

Made by generate.py from docs/openapi.json: do not change it by hand.
"""

from __future__ import annotations

from .connection import Connection, segment
from .types import (
    Access,
    AdoptVm,
    AttachVolume,
    DetachVolume,
    DetachedVolume,
    Divergence,
    DivergencePiece,
    Evacuation,
    ExportStandby,
    Grant,
    Health,
    Host,
    Identity,
    Invitation,
    JoinHost,
    MigrateVolume,
    Migration,
    MigrationHistory,
    MigrationPlan,
    NewEvacuation,
    NewGrant,
    NewIdentity,
    NewInvitation,
    NewSnapshot,
    NewStandby,
    NewVm,
    NewVolume,
    NewlyGranted,
    NoticeDestination,
    Overview,
    PageLink,
    Peer,
    PromoteStandby,
    PromoteVolume,
    Readiness,
    RedeemGrant,
    RemovedPeer,
    RemovedVm,
    RemovedVolume,
    Replica,
    ReprotectStandby,
    ResizeVolume,
    RevertVolumes,
    SeedStandby,
    SetGrant,
    SetHost,
    SetMigration,
    SetPeer,
    SetStandby,
    SetVm,
    Standby,
    StopVm,
    Store,
    StoreContent,
    StoreFile,
    SuspendVm,
    TestStandby,
    Vm,
    Volume,
    YieldVolume,
)


class Operations(Connection):
    """All operations of the daemon."""

    def show_health(self) -> Health:
        """Returns that the daemon is alive, without checking anything else."""
        return self.ask("GET", "/health")

    def show_metrics(self) -> str:
        """Returns metrics of volumes, migrations, links, stores and the journal, in Prometheus' text format."""
        return self.ask_text("GET", "/metrics")

    def show_readiness(self) -> Readiness:
        """Returns whether the daemon works completely, and which parts do not."""
        return self.ask("GET", "/ready", statuses=(200, 503))

    def show_access(self) -> Access:
        """Describes who may use the API over TLS, and at which address."""
        return self.ask("GET", "/v1/access")

    def grant_access(self, order: NewGrant) -> NewlyGranted:
        """Grants access to the API over TLS, to a given key or by an access token."""
        return self.ask("POST", "/v1/access", order=order)

    def revoke_access(self, name: str) -> Grant:
        """Revokes a client's access over TLS, in effect from its next request."""
        return self.ask("DELETE", f"/v1/access/{segment(name)}")

    def set_access(self, name: str, order: SetGrant) -> Grant:
        """Changes a client's rights over TLS, in effect from its next request."""
        return self.ask("PATCH", f"/v1/access/{segment(name)}", order=order)

    def list_divergences(self) -> list[Divergence]:
        """Lists what only this host has of volumes that it has given up after a promotion."""
        return self.ask("GET", "/v1/divergences")

    def drop_divergence(self, name: str) -> Divergence:
        """Releases what only this host has of a volume: what is kept of it is deleted."""
        return self.ask("DELETE", f"/v1/divergences/{segment(name)}")

    def export_divergence(self, name: str, *, from_: int | None = None) -> DivergencePiece:
        """Returns a piece of what only this host has of a volume. The answer names where the next piece is. from_:
        What the piece before has named; zero at first.
        """
        return self.ask("GET", f"/v1/divergences/{segment(name)}", query={"from": from_})

    def show_evacuation(self) -> Evacuation:
        """Describes the evacuation that runs, or the last one."""
        return self.ask("GET", "/v1/evacuation")

    def begin_evacuation(self, order: NewEvacuation) -> Evacuation:
        """Begins to empty this host. Answers when the order is durable."""
        return self.ask("POST", "/v1/evacuation", order=order)

    def abort_evacuation(self) -> Evacuation:
        """Aborts the evacuation that runs: nothing more begins, and what moves is cancelled. Answers before that has
        ended.
        """
        return self.ask("POST", "/v1/evacuation/abort")

    def plan_evacuation(self, order: NewEvacuation) -> Evacuation:
        """Returns what an evacuation would do, and what would stay. Changes nothing."""
        return self.ask("POST", "/v1/evacuation/plan", order=order)

    def show_host(self) -> Host:
        """Describes the daemon that answers."""
        return self.ask("GET", "/v1/host")

    def change_this_host(self, order: SetHost) -> Host:
        """Changes this host: whether it takes anything new. Answers when that is durable."""
        return self.ask("PATCH", "/v1/host", order=order)

    def list_hosts(self) -> list[Peer]:
        """Lists the paired hosts by name."""
        return self.ask("GET", "/v1/hosts")

    def join_host(self, order: JoinHost) -> Peer:
        """Redeems another host's invitation. Answers when both hosts know each other."""
        return self.ask("POST", "/v1/hosts", order=order)

    def remove_host(self, name: str, *, force: bool | None = None) -> RemovedPeer:
        """Forgets another host, which is refused from then on. force: Remove it even if migrations or forwarded
        volumes depend on it; they wait until the two hosts are paired again.
        """
        return self.ask("DELETE", f"/v1/hosts/{segment(name)}", query={"force": force})

    def show_other_host(self, name: str) -> Peer:
        """Describes another host and the connections with it."""
        return self.ask("GET", f"/v1/hosts/{segment(name)}")

    def change_host(self, name: str, order: SetPeer) -> Peer:
        """Changes what another host is trusted with, and at which addresses it is reached."""
        return self.ask("PATCH", f"/v1/hosts/{segment(name)}", order=order)

    def show_identity(self) -> Identity:
        """Describes this host's identity for other hosts."""
        return self.ask("GET", "/v1/identity")

    def create_identity(self, order: NewIdentity) -> Identity:
        """Creates this host's identity, once. Other hosts can be paired with it afterwards."""
        return self.ask("POST", "/v1/identity", order=order)

    def invite(self, order: NewInvitation) -> Invitation:
        """Creates a host invitation, by which one other host can be paired with this one."""
        return self.ask("POST", "/v1/invitations", order=order)

    def list_migrations(self) -> list[Migration]:
        """Lists the running migrations and the remembered ones, oldest first."""
        return self.ask("GET", "/v1/migrations")

    def show_migration(self, id: str, *, after: int | None = None, wait_ms: int | None = None) -> Migration:
        """Describes one migration. With `wait_ms`, answers as soon as it has changed. after: The latest `change`
        that the client has seen; the answer waits for a later one.; wait_ms: Longest wait in milliseconds; 0:
        answer at once. Values above 30,000 count as 30,000.
        """
        return self.ask("GET", f"/v1/migrations/{segment(id)}", query={"after": after, "wait_ms": wait_ms})

    def change_migration(self, id: str, order: SetMigration) -> Migration:
        """Changes a running migration. Answers when the change is in effect."""
        return self.ask("PATCH", f"/v1/migrations/{segment(id)}", order=order)

    def cancel_migration(self, id: str) -> Migration:
        """Cancels a migration. Answers when the cancellation is certain, before the migration has ended."""
        return self.ask("POST", f"/v1/migrations/{segment(id)}/cancel")

    def show_history(self, id: str) -> MigrationHistory:
        """Describes one migration with its recorded history."""
        return self.ask("GET", f"/v1/migrations/{segment(id)}/history")

    def pause_migration(self, id: str) -> Migration:
        """Pauses a migration: nothing is copied or handed over meanwhile."""
        return self.ask("POST", f"/v1/migrations/{segment(id)}/pause")

    def resume_migration(self, id: str) -> Migration:
        """Resumes a paused migration."""
        return self.ask("POST", f"/v1/migrations/{segment(id)}/resume")

    def retry_migration(self, id: str) -> Migration:
        """Repeats a failed or cancelled migration with the same options. Answers with the new migration."""
        return self.ask("POST", f"/v1/migrations/{segment(id)}/retry")

    def list_destinations(self) -> list[NoticeDestination]:
        """Lists where notices go, and what waits there."""
        return self.ask("GET", "/v1/notices")

    def test_notices(self) -> list[NoticeDestination]:
        """Sends a notice to each destination at once. Answers when all have taken it, or have failed."""
        return self.ask("POST", "/v1/notices/test")

    def show_overview(self) -> Overview:
        """Returns an overview of the host, at most a second old."""
        return self.ask("GET", "/v1/overview")

    def make_page_link(self) -> PageLink:
        """Returns a link with which one browser signs in to the page."""
        return self.ask("POST", "/v1/page-links")

    def redeem_access(self, order: RedeemGrant) -> Grant:
        """Redeems an access token: replaces the key of the token by the client's own key."""
        return self.ask("POST", "/v1/redemption", order=order)

    def list_replicas(self) -> list[Replica]:
        """Lists the images that migrations kept, by volume."""
        return self.ask("GET", "/v1/replicas")

    def drop_replica(self, volume: str, *, migration: str | None = None) -> Replica:
        """Deletes a kept image and returns it. For a device or an export, only the fence is lifted. migration: The
        migration that has left it, for example `m7`; optional if there is only one image.
        """
        return self.ask("DELETE", f"/v1/replicas/{segment(volume)}", query={"migration": migration})

    def revert_volumes(self, order: RevertVolumes) -> list[Volume]:
        """Reverts volumes to snapshots of them, all or none. Answers when they are served again."""
        return self.ask("POST", "/v1/reverts", order=order)

    def take_snapshots(self, order: NewSnapshot) -> list[Volume]:
        """Takes snapshots of volumes, or of all volumes of a VM, at one instant. Answers when they are served."""
        return self.ask("POST", "/v1/snapshots", order=order)

    def list_standbys(self) -> list[Standby]:
        """Lists the standbys of this host's volumes, and those that it keeps for other hosts."""
        return self.ask("GET", "/v1/standbys")

    def add_standby(self, order: NewStandby) -> Standby:
        """Orders a standby of volumes at another host. Answers when that host has made room; the copying follows."""
        return self.ask("POST", "/v1/standbys", order=order)

    def remove_standby(self, name: str, *, force: bool | None = None) -> Standby:
        """Removes a standby: its images and recovery points are deleted. force: Also if the other host does not
        answer. Its part then has to be removed there.
        """
        return self.ask("DELETE", f"/v1/standbys/{segment(name)}", query={"force": force})

    def show_standby(self, name: str) -> Standby:
        """Describes one standby, with its recovery points if it is kept here."""
        return self.ask("GET", f"/v1/standbys/{segment(name)}")

    def change_standby(self, name: str, order: SetStandby) -> Standby:
        """Changes a standby at the host that has its volumes."""
        return self.ask("PATCH", f"/v1/standbys/{segment(name)}", order=order)

    def check_standby(self, name: str) -> Standby:
        """Has all blocks of a standby compared with those of its volumes, which are here. Answers when that has
        begun; the standby shows how far it is. What differs is sent again.
        """
        return self.ask("POST", f"/v1/standbys/{segment(name)}/check")

    def cancel_export(self, name: str) -> Standby:
        """Cancels the export of a standby: the folder that is being made is deleted."""
        return self.ask("DELETE", f"/v1/standbys/{segment(name)}/export")

    def export_standby(self, name: str, order: ExportStandby) -> Standby:
        """Begins to export a standby that has nothing yet: its first copy goes into a new folder of this host, for
        somebody to carry. Answers once that has begun; the standby shows how far it is. The standby is paused
        from then on.
        """
        return self.ask("POST", f"/v1/standbys/{segment(name)}/export", order=order)

    def promote_standby(self, name: str, order: PromoteStandby) -> Standby:
        """Makes the images of a standby volumes of this host, and serves them. The host that had the volumes must be
        lost.
        """
        return self.ask("POST", f"/v1/standbys/{segment(name)}/promote", order=order)

    def reprotect_standby(self, name: str, order: ReprotectStandby) -> Standby:
        """Turns the direction of a standby round that was promoted here: the host that had the volumes before, and
        has given them up, keeps a standby of them. Answers when that host has accepted it; what its images lack
        is sent afterwards.
        """
        return self.ask("POST", f"/v1/standbys/{segment(name)}/reprotect", order=order)

    def seed_standby(self, name: str, order: SeedStandby) -> Standby:
        """Begins a standby that is kept here with images from its store, which become the standby's. What they have
        already is not sent. The standby must not have a recovery point yet.
        """
        return self.ask("POST", f"/v1/standbys/{segment(name)}/seed", order=order)

    def end_standby_test(self, name: str) -> Standby:
        """Ends the test of a standby: all that belongs to it is deleted."""
        return self.ask("DELETE", f"/v1/standbys/{segment(name)}/test")

    def test_standby(self, name: str, order: TestStandby) -> Standby:
        """Begins a test of a standby: a clone of a recovery point becomes volumes of this host under other names,
        for a time. Answers once the test is recorded; the clone is made afterwards. The standby shows how far it
        is.
        """
        return self.ask("POST", f"/v1/standbys/{segment(name)}/test", order=order)

    def list_stores(self) -> list[Store]:
        """Lists the stores by name."""
        return self.ask("GET", "/v1/stores")

    def show_content(self, name: str) -> StoreContent:
        """Lists the content of a store: images with their owners, half-made targets, kept images, and other files."""
        return self.ask("GET", f"/v1/stores/{segment(name)}/files")

    def drop_half_made(self, name: str, file: str) -> StoreFile:
        """Deletes an unclaimed half-made target and returns it."""
        return self.ask("DELETE", f"/v1/stores/{segment(name)}/files/{segment(file)}")

    def release_store(self, name: str) -> Store:
        """Frees a store that holds one volume: gives up what a migration left there."""
        return self.ask("POST", f"/v1/stores/{segment(name)}/release")

    def start_all_vms(self) -> list[Vm]:
        """Begins to start all VMs that start at a boot of the host and do not run, in their order. Answers with
        these.
        """
        return self.ask("POST", "/v1/vm-starts")

    def list_vms(self) -> list[Vm]:
        """Lists the VMs by name."""
        return self.ask("GET", "/v1/vms")

    def add_vm(self, order: NewVm) -> Vm:
        """Adds a VM without starting it."""
        return self.ask("POST", "/v1/vms", order=order)

    def remove_vm(self, name: str) -> RemovedVm:
        """Forgets a stopped VM; its volumes stay."""
        return self.ask("DELETE", f"/v1/vms/{segment(name)}")

    def show_vm(self, name: str) -> Vm:
        """Describes one VM by its name."""
        return self.ask("GET", f"/v1/vms/{segment(name)}")

    def change_vm(self, name: str, order: SetVm) -> Vm:
        """Changes a VM: its priority in an evacuation, and whether and when it starts after a boot."""
        return self.ask("PATCH", f"/v1/vms/{segment(name)}", order=order)

    def adopt_vm(self, name: str, order: AdoptVm) -> Vm:
        """Adopts the disks of a running VM. Answers when they are served."""
        return self.ask("POST", f"/v1/vms/{segment(name)}/adopt", order=order)

    def release_vm(self, name: str) -> Vm:
        """Gives a VM its disks back as plain files. Answers when it uses them."""
        return self.ask("POST", f"/v1/vms/{segment(name)}/release")

    def resume_vm(self, name: str) -> Vm:
        """Resumes a paused VM. Answers when it runs."""
        return self.ask("POST", f"/v1/vms/{segment(name)}/resume")

    def start_vm(self, name: str, *, discard_memory: bool | None = None) -> Vm:
        """Starts a VM: restores it if it is suspended, or else boots it. Answers when its QEMU does. discard_memory:
        Boot a suspended VM without its memory, as after a power cut, and delete the memory's file.
        """
        return self.ask("POST", f"/v1/vms/{segment(name)}/start", query={"discard_memory": discard_memory})

    def stop_vm(self, name: str, order: StopVm) -> Vm:
        """Stops a VM. Answers when its QEMU has ended."""
        return self.ask("POST", f"/v1/vms/{segment(name)}/stop", order=order)

    def suspend_vm(self, name: str, order: SuspendVm) -> Vm:
        """Suspends a VM to disk: its memory is written to a file, and its QEMU ends. Answers when it has ended."""
        return self.ask("POST", f"/v1/vms/{segment(name)}/suspend", order=order)

    def list_volumes(self) -> list[Volume]:
        """Lists the volumes by name."""
        return self.ask("GET", "/v1/volumes")

    def create_volume(self, order: NewVolume) -> Volume:
        """Creates a volume. Answers when the volume is served, which takes as long as copying a given image."""
        return self.ask("POST", "/v1/volumes", order=order)

    def remove_volume(
        self,
        name: str,
        *,
        force: bool | None = None,
        keep_image: bool | None = None,
        delete_image: bool | None = None,
        only_forwarding: bool | None = None,
    ) -> RemovedVolume:
        """Stops serving a volume and forgets it. Answers when the volume is not served. force: Remove it even while
        clients are connected; they are disconnected.; keep_image: Keep the image, even if Sterna has made it.;
        delete_image: Delete the image from its store, even if a user had it before Sterna.; only_forwarding: Only
        end the forwarding of a volume that another host has. It is refused if this host has the volume.
        """
        return self.ask("DELETE", f"/v1/volumes/{segment(name)}", query={"force": force, "keep_image": keep_image, "delete_image": delete_image, "only_forwarding": only_forwarding})

    def show_volume(self, name: str) -> Volume:
        """Describes one volume by its name."""
        return self.ask("GET", f"/v1/volumes/{segment(name)}")

    def attach_volume(self, name: str, order: AttachVolume) -> Volume:
        """Lets another host offer a volume of this host to its clients, whose requests it forwards. Answers when
        clients can connect there.
        """
        return self.ask("POST", f"/v1/volumes/{segment(name)}/attach", order=order)

    def detach_volume(self, name: str, order: DetachVolume) -> DetachedVolume:
        """Ends an attachment, at the host that gave it or at the one that offers the volume."""
        return self.ask("POST", f"/v1/volumes/{segment(name)}/detach", order=order)

    def migrate(self, name: str, order: MigrateVolume) -> Migration:
        """Begins to move a volume or a VM. Answers when the migration has begun or waits for its turn."""
        return self.ask("POST", f"/v1/volumes/{segment(name)}/migrate", order=order)

    def plan_migration(self, name: str, order: MigrateVolume) -> MigrationPlan:
        """Returns what a migration would do, and everything that is in its way. Changes nothing."""
        return self.ask("POST", f"/v1/volumes/{segment(name)}/plan", order=order)

    def promote_volume(self, name: str, order: PromoteVolume) -> Volume:
        """Promotes a complete copy at this host without its source host."""
        return self.ask("POST", f"/v1/volumes/{segment(name)}/promote", order=order)

    def resize_volume(self, name: str, order: ResizeVolume) -> Volume:
        """Grows a volume, also while it is used or moves. Answers when new connections see the new size."""
        return self.ask("POST", f"/v1/volumes/{segment(name)}/resize", order=order)

    def yield_volume(self, name: str, order: YieldVolume) -> list[RemovedVolume]:
        """Gives up the volumes of a standby that was promoted, at one of the two hosts that have them. Images are
        kept.
        """
        return self.ask("POST", f"/v1/volumes/{segment(name)}/yield", order=order)
