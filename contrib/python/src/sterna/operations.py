"""The operations of the API, one method each.

Made by generate.py from docs/openapi.json: do not change it by hand.
"""

from __future__ import annotations

from .connection import Connection, segment
from .types import (
    Access,
    AdoptVm,
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
    NewGrant,
    NewIdentity,
    NewInvitation,
    NewVm,
    NewVolume,
    NewlyGranted,
    Overview,
    Peer,
    PromoteVolume,
    Readiness,
    RedeemGrant,
    RemovedPeer,
    RemovedVm,
    RemovedVolume,
    Replica,
    ResizeVolume,
    SetGrant,
    SetMigration,
    SetPeer,
    StopVm,
    Store,
    StoreContent,
    StoreFile,
    Vm,
    Volume,
)


class Operations(Connection):
    """Everything that the daemon can be asked for."""

    def show_health(self) -> Health:
        """Says that the daemon is alive; asks nobody."""
        return self.ask("GET", "/health")

    def show_metrics(self) -> str:
        """Tells the figures of volumes, migrations, links, stores and the journal, in Prometheus' text format."""
        return self.ask_text("GET", "/metrics")

    def show_readiness(self) -> Readiness:
        """Says whether the daemon does all that it is to do, and what it does not."""
        return self.ask("GET", "/ready", statuses=(200, 503))

    def show_access(self) -> Access:
        """Says who may use the API over TLS, and where."""
        return self.ask("GET", "/v1/access")

    def grant_access(self, order: NewGrant) -> NewlyGranted:
        """Lets somebody use the API over TLS: by his key, or by an invitation."""
        return self.ask("POST", "/v1/access", order=order)

    def revoke_access(self, name: str) -> Grant:
        """Lets somebody in no more; holds from his next request on."""
        return self.ask("DELETE", f"/v1/access/{segment(name)}")

    def set_access(self, name: str, order: SetGrant) -> Grant:
        """Changes what somebody may do over TLS; holds from his next request on."""
        return self.ask("PATCH", f"/v1/access/{segment(name)}", order=order)

    def show_host(self) -> Host:
        """Describes the daemon."""
        return self.ask("GET", "/v1/host")

    def list_hosts(self) -> list[Peer]:
        """Lists the other hosts that this one is paired with, by name."""
        return self.ask("GET", "/v1/hosts")

    def join_host(self, order: JoinHost) -> Peer:
        """Redeems another host's invitation; answers when both hosts know each other."""
        return self.ask("POST", "/v1/hosts", order=order)

    def remove_host(self, name: str, *, force: bool | None = None) -> RemovedPeer:
        """Forgets another host: it is refused from then on. force: Also when migrations or forwarded volumes depend
        on it: they wait until the two hosts are paired again.
        """
        return self.ask("DELETE", f"/v1/hosts/{segment(name)}", query={"force": force})

    def show_other_host(self, name: str) -> Peer:
        """Describes another host and the connections with it."""
        return self.ask("GET", f"/v1/hosts/{segment(name)}")

    def change_host(self, name: str, order: SetPeer) -> Peer:
        """Changes what another host is trusted with."""
        return self.ask("PATCH", f"/v1/hosts/{segment(name)}", order=order)

    def show_identity(self) -> Identity:
        """Describes who this host is to others."""
        return self.ask("GET", "/v1/identity")

    def create_identity(self, order: NewIdentity) -> Identity:
        """Makes this host's identity, once; from then on other hosts can be paired with it."""
        return self.ask("POST", "/v1/identity", order=order)

    def invite(self, order: NewInvitation) -> Invitation:
        """Makes an invitation, with which one other host can be paired with this one."""
        return self.ask("POST", "/v1/invitations", order=order)

    def list_migrations(self) -> list[Migration]:
        """Lists the migrations under way and those that are remembered, oldest first."""
        return self.ask("GET", "/v1/migrations")

    def show_migration(self, id: str, *, after: int | None = None, wait_ms: int | None = None) -> Migration:
        """Describes one migration; with `wait_ms`, as soon as it has changed. after: The `change` that the client
        has seen; the answer waits for a later one.; wait_ms: Milliseconds to wait at most; 0: answer at once. At
        most 30,000 (`WAIT_MAX_MS`) are waited.
        """
        return self.ask("GET", f"/v1/migrations/{segment(id)}", query={"after": after, "wait_ms": wait_ms})

    def change_migration(self, id: str, order: SetMigration) -> Migration:
        """Changes a migration that is under way; answers when that holds."""
        return self.ask("PATCH", f"/v1/migrations/{segment(id)}", order=order)

    def cancel_migration(self, id: str) -> Migration:
        """Asks for a migration to be cancelled; answers when that is under way, not when it has ended."""
        return self.ask("POST", f"/v1/migrations/{segment(id)}/cancel")

    def show_history(self, id: str) -> MigrationHistory:
        """Describes one migration with what was recorded of it."""
        return self.ask("GET", f"/v1/migrations/{segment(id)}/history")

    def pause_migration(self, id: str) -> Migration:
        """Lets a migration rest: nothing is copied, and it is not handed over."""
        return self.ask("POST", f"/v1/migrations/{segment(id)}/pause")

    def resume_migration(self, id: str) -> Migration:
        """Goes on with a migration that rests."""
        return self.ask("POST", f"/v1/migrations/{segment(id)}/resume")

    def retry_migration(self, id: str) -> Migration:
        """Begins once more what a migration did not come to; answers with the new migration."""
        return self.ask("POST", f"/v1/migrations/{segment(id)}/retry")

    def show_overview(self) -> Overview:
        """The host at one glance."""
        return self.ask("GET", "/v1/overview")

    def redeem_access(self, order: RedeemGrant) -> Grant:
        """Redeems an invitation: who connects by its key is known by another one from then on."""
        return self.ask("POST", "/v1/redemption", order=order)

    def list_replicas(self) -> list[Replica]:
        """Lists the images that migrations left and that were kept, by volume."""
        return self.ask("GET", "/v1/replicas")

    def drop_replica(self, volume: str, *, migration: str | None = None) -> Replica:
        """Deletes an image that a migration left; answers what it was. Of a device or an export only the fence goes.
        migration: The migration that left it, for example `m7`; it may be left out if there is only one.
        """
        return self.ask("DELETE", f"/v1/replicas/{segment(volume)}", query={"migration": migration})

    def list_stores(self) -> list[Store]:
        """Lists the stores, by name."""
        return self.ask("GET", "/v1/stores")

    def show_content(self, name: str) -> StoreContent:
        """Lists what lies in a store: images with whose they are, half-made targets, images that migrations left,
        and other files.
        """
        return self.ask("GET", f"/v1/stores/{segment(name)}/files")

    def drop_half_made(self, name: str, file: str) -> StoreFile:
        """Deletes a half-made target that nobody claims; answers what it was."""
        return self.ask("DELETE", f"/v1/stores/{segment(name)}/files/{segment(file)}")

    def release_store(self, name: str) -> Store:
        """Gives up what a migration left in a store that holds one volume."""
        return self.ask("POST", f"/v1/stores/{segment(name)}/release")

    def list_vms(self) -> list[Vm]:
        """Lists the VMs, by name."""
        return self.ask("GET", "/v1/vms")

    def add_vm(self, order: NewVm) -> Vm:
        """Adds a VM; it does not run yet."""
        return self.ask("POST", "/v1/vms", order=order)

    def remove_vm(self, name: str) -> RemovedVm:
        """Forgets a VM that does not run; its volumes stay."""
        return self.ask("DELETE", f"/v1/vms/{segment(name)}")

    def show_vm(self, name: str) -> Vm:
        """Describes one VM."""
        return self.ask("GET", f"/v1/vms/{segment(name)}")

    def adopt_vm(self, name: str, order: AdoptVm) -> Vm:
        """Takes over the disks of a VM that runs; answers when they are served."""
        return self.ask("POST", f"/v1/vms/{segment(name)}/adopt", order=order)

    def release_vm(self, name: str) -> Vm:
        """Gives a VM its disks back as plain files; answers when it has them."""
        return self.ask("POST", f"/v1/vms/{segment(name)}/release")

    def resume_vm(self, name: str) -> Vm:
        """Lets a VM run that is paused; answers when it runs."""
        return self.ask("POST", f"/v1/vms/{segment(name)}/resume")

    def start_vm(self, name: str) -> Vm:
        """Starts a VM; answers when its QEMU does."""
        return self.ask("POST", f"/v1/vms/{segment(name)}/start")

    def stop_vm(self, name: str, order: StopVm) -> Vm:
        """Stops a VM; answers when its QEMU has ended."""
        return self.ask("POST", f"/v1/vms/{segment(name)}/stop", order=order)

    def list_volumes(self) -> list[Volume]:
        """Lists the volumes, by name."""
        return self.ask("GET", "/v1/volumes")

    def create_volume(self, order: NewVolume) -> Volume:
        """Makes a volume; answers when it is being served, which takes as long as copying the image takes."""
        return self.ask("POST", "/v1/volumes", order=order)

    def remove_volume(
        self,
        name: str,
        *,
        force: bool | None = None,
        keep_image: bool | None = None,
        delete_image: bool | None = None,
    ) -> RemovedVolume:
        """Stops serving a volume; answers when it is no longer served. force: Also when clients are connected; they
        are cut off.; keep_image: Leaves the image where it is, also one that Sterna made.; delete_image: Deletes
        the image from its store, also if its content was somebody's before Sterna served it.
        """
        return self.ask("DELETE", f"/v1/volumes/{segment(name)}", query={"force": force, "keep_image": keep_image, "delete_image": delete_image})

    def show_volume(self, name: str) -> Volume:
        """Describes one volume."""
        return self.ask("GET", f"/v1/volumes/{segment(name)}")

    def migrate(self, name: str, order: MigrateVolume) -> Migration:
        """Begins to move a volume or a VM; answers when that has begun, or waits for its turn."""
        return self.ask("POST", f"/v1/volumes/{segment(name)}/migrate", order=order)

    def plan_migration(self, name: str, order: MigrateVolume) -> MigrationPlan:
        """Says what a migration would do, and everything that is in its way; begins nothing, and leaves nothing."""
        return self.ask("POST", f"/v1/volumes/{segment(name)}/plan", order=order)

    def promote_volume(self, name: str, order: PromoteVolume) -> Volume:
        """Takes over a volume that another host has prepared here and released, without hearing from that host."""
        return self.ask("POST", f"/v1/volumes/{segment(name)}/promote", order=order)

    def resize_volume(self, name: str, order: ResizeVolume) -> Volume:
        """Makes a volume larger, while it is used and also while it moves; answers when whoever connects is told the
        new size.
        """
        return self.ask("POST", f"/v1/volumes/{segment(name)}/resize", order=order)
