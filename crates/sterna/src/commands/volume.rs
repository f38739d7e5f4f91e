//! `sterna volume …`

use std::collections::BTreeSet;
use std::io::IsTerminal as _;
use std::time::Duration;

use api::{
    AttachVolume, Client, ClientError, DetachVolume, ImageFate, KeptBecause, MigrationState, NewSnapshot,
    NewVolume, PromoteVolume, RemoveVolume, RemovedVolume, ResizeVolume, RevertVolumes, Volume, VolumeSource,
    VolumeState, YieldVolume,
};

use crate::args::{
    AttachArguments, CloneArguments, DetachArguments, PromoteArguments, RemoveArguments, ResizeArguments,
    RevertArguments, VolumeCommand, YieldArguments,
};
use crate::commands::{CommandError, absolute, snapshots};
use crate::exit::Exit;
use crate::output::{self, Format};
use console::units::{bytes, percent};

/// Time between two checks of a creation's progress.
const CREATION_INTERVAL: Duration = Duration::from_millis(250);

pub(super) async fn run(
    client: &Client,
    command: VolumeCommand,
    format: Format,
) -> Result<Exit, CommandError> {
    match command {
        VolumeCommand::Create(order) => {
            let image = order.image.as_deref().map(absolute).transpose()?;
            let source = VolumeSource::Create {
                size_bytes: order.size,
                store: order.store,
                image,
                format: order.format.map(Into::into),
            };
            let export = order.export.into();
            make(client, NewVolume { name: order.name, source, export }, format).await?;
        }
        VolumeCommand::Clone(order) => {
            let CloneArguments { name, new, store, format: image_format, export } = order;
            let image_format = image_format.map(Into::into);
            let source = VolumeSource::Clone { volume: name, store, format: image_format };
            make(client, NewVolume { name: new, source, export: export.into() }, format).await?;
        }
        VolumeCommand::Snapshot(order) => {
            let volumes = order.names;
            snapshots::take(client, NewSnapshot { volumes, ..snapshots::order(order.how) }, format).await?;
        }
        VolumeCommand::Snapshots(order) => snapshots::list(client, order.name.as_deref(), format).await?,
        VolumeCommand::Revert(order) => {
            let RevertArguments { name, snapshot, keep_current } = order;
            let order = RevertVolumes { volumes: vec![name], vm: None, snapshot, keep_current };
            snapshots::revert(client, &order, format).await?;
        }
        VolumeCommand::Add(order) => {
            let source = VolumeSource::Add {
                image: order.place.image.as_deref().map(absolute).transpose()?,
                device: order.place.device.as_deref().map(absolute).transpose()?,
                nbd: order.place.nbd,
                format: order.format.map(Into::into),
                fenced: order.fenced,
            };
            let export = order.export.into();
            make(client, NewVolume { name: order.name, source, export }, format).await?;
        }
        VolumeCommand::List => {
            let volumes = client.volumes().await?;
            // Text output only: programs find this in the list of stores.
            let unknown = match format {
                Format::Text => output::unknown_images(&client.stores().await?),
                Format::Json => String::new(),
            };
            output::print(format, &volumes, |volumes| output::volumes(volumes) + &unknown)?;
        }
        VolumeCommand::Show(volume) => {
            let shown = client.volume(&volume.name).await?;
            // Text output only: programs ask for the replicas.
            let kept = match format {
                Format::Text => client.replicas().await?,
                Format::Json => Vec::new(),
            };
            output::print(format, &shown, |shown| output::volume(shown, &kept))?;
        }
        VolumeCommand::Resize(order) => {
            let ResizeArguments { name, size, beyond_store } = order;
            let resized =
                client.resize_volume(&name, &ResizeVolume { size_bytes: size, beyond_store }).await?;
            // The VM is named by the text only.
            let vms =
                if let Format::Text = format { client.vms().await.unwrap_or_default() } else { Vec::new() };
            output::print(format, &resized, |resized| {
                let size = bytes(resized.size_bytes);
                let here = resized.statistics.as_ref().map_or(0, |statistics| statistics.connections);
                let vm = vms.iter().find(|vm| vm.volumes.contains(&resized.name));
                let note = match (vm, here, resized.clients_elsewhere.is_empty()) {
                    (_, 0, true) => String::new(),
                    (Some(vm), ..) => output::vms::size_in_guest(vm),
                    _ => "; connected clients see that when they connect again".to_owned(),
                };
                format!("{} has {size} ({} bytes){note}\n", resized.name, resized.size_bytes)
            })?;
            warn_of_overcommitment(client, &resized, format).await;
        }
        VolumeCommand::Promote(order) => {
            let PromoteArguments {
                name,
                store,
                ticket,
                force,
                without_missing,
                restored,
                exchanged,
                unasked,
                size,
            } = order;
            let size_bytes = size;
            let request =
                PromoteVolume { ticket, force, without_missing, restored, exchanged, unasked, size_bytes };
            let Some(name) = name else {
                return promote_store(client, &store.unwrap_or_default(), &request, format).await;
            };
            let promoted = client.promote_volume(&name, &request).await?;
            output::print(format, &promoted, promoted_text)?;
        }
        VolumeCommand::Remove(order) => {
            let RemoveArguments { name, force, keep_image, delete_image, only_forwarding } = order;
            let how = RemoveVolume { force, keep_image, delete_image, only_forwarding };
            let removed = client.remove_volume(&name, how).await?;
            output::print(format, &removed, |removed| gone(removed) + &left_behind(removed))?;
        }
        VolumeCommand::Attach(AttachArguments { name, at, read_only }) => {
            let order = AttachVolume { host: at, read_only };
            let attached = client.attach_volume(&name, &order).await?;
            output::print(format, &attached, |attached| {
                let access = if read_only { " for reading" } else { "" };
                format!("{} is attached at {}{access}\n", attached.name, order.host)
            })?;
        }
        VolumeCommand::Detach(DetachArguments { name, at, force }) => {
            let detached = client.detach_volume(&name, &DetachVolume { host: at, force }).await?;
            output::print(format, &detached, |detached| {
                format!("{} is detached from {}\n", detached.name, detached.host)
            })?;
        }
        VolumeCommand::Yield(YieldArguments { name, force, unasked }) => {
            let given_up = client.yield_volume(&name, YieldVolume { force, unasked }).await?;
            output::print(format, &given_up, |given_up| given_up.iter().map(yielded).collect())?;
        }
        VolumeCommand::Divergence(command) => super::divergence::run(client, command, format).await?,
    }
    Ok(Exit::Success)
}

/// Returns what became of a removed volume's image.
fn gone(removed: &RemovedVolume) -> String {
    match removed.image_fate {
        ImageFate::Deleted if removed.image.is_empty() => {
            format!("{}: the copying was cancelled; nothing is left of it\n", removed.name)
        }
        ImageFate::Deleted => format!("{} removed; {} deleted\n", removed.name, removed.image),
        ImageFate::Kept => {
            let why = removed.kept_because.map_or("", kept_because);
            format!("removed {}; its image is kept at {}{why}\n", removed.name, removed.image)
        }
        ImageFate::Elsewhere => {
            let host = removed.host.as_deref().unwrap_or("that has it");
            format!(
                "{}: stopped forwarding clients from here; the volume stays at host {host}\n",
                removed.name
            )
        }
    }
}

/// Names the snapshots that a removed volume leaves.
fn left_behind(removed: &RemovedVolume) -> String {
    if removed.snapshots.is_empty() {
        return String::new();
    }
    format!(
        "its snapshots stay, and are volumes: {}; to remove one: sterna volume remove NAME@LABEL\n",
        removed.snapshots.join(", ")
    )
}

fn yielded(volume: &RemovedVolume) -> String {
    format!(
        "gave up {}; its image is kept at {}; to make it a standby of the volume at the other host, there: sterna standby reprotect\n",
        volume.name, volume.image
    )
}

/// Returns why an image was kept, and what to do with it.
fn kept_because(why: KeptBecause) -> &'static str {
    match why {
        KeptBecause::Given => ": you had its content before Sterna served it",
        KeptBecause::Unknown => {
            ": it is unknown whether you had its content before; delete it if it is not needed"
        }
    }
}

pub(super) async fn make(client: &Client, volume: NewVolume, format: Format) -> Result<(), CommandError> {
    let shows_progress = format == Format::Text && std::io::stderr().is_terminal();
    let creation = client.create_volume(&volume);
    tokio::pin!(creation);
    let made: Result<Volume, ClientError> = loop {
        tokio::select! {
            biased;
            made = &mut creation => break made,
            () = tokio::time::sleep(CREATION_INTERVAL), if shows_progress => {
                show_creation(client, &volume.name).await;
            }
        }
    };
    if shows_progress {
        output::say_in_place("");
    }
    let made = made?;
    output::print(format, &made, |made| {
        format!("{} ({}) is served at {}\n", made.name, bytes(made.size_bytes), made.uri)
    })?;
    warn_of_overcommitment(client, &made, format).await;
    Ok(())
}

/// Warns if the volumes of the store exceed it. Programs find this in the list of stores.
async fn warn_of_overcommitment(client: &Client, volume: &Volume, format: Format) {
    let (Format::Text, Some(name)) = (format, &volume.store) else { return };
    // The volume exists, so an error here is ignored.
    let Ok(stores) = client.stores().await else { return };
    if let Some(warning) = stores.iter().find(|store| store.name == *name).and_then(output::overcommitted) {
        output::say(&format!("warning: {warning}"));
    }
}

/// Shows the progress of the copying; errors are ignored.
async fn show_creation(client: &Client, name: &str) {
    let Ok(volume) = client.volume(name).await else { return };
    if let Some(creation) = volume.creation.filter(|creation| creation.bytes_total > 0) {
        let fraction = creation.bytes_done as f64 / creation.bytes_total as f64;
        let done = format!("copying the image: {} of {}", percent(fraction), bytes(creation.bytes_total));
        output::say_in_place(&done);
    }
}

/// Returns the state of a volume after its promotion. A volume may be promoted and not served, because its disk fails.
fn promoted_text(promoted: &Volume) -> String {
    let name = &promoted.name;
    if let Some(host) = &promoted.host {
        return format!("{name} stays at host {host}, which reads its missing blocks from the image here\n");
    }
    match &promoted.filling {
        Some(filling) => format!("{name}: {}\n", output::filling(filling)),
        None if promoted.state == VolumeState::Serving => {
            format!("{name} now belongs to this host, and is served at {}\n", promoted.uri)
        }
        None => format!(
            "{name} now belongs to this host, and is not served yet; see: sterna volume show {name}\n"
        ),
    }
}

/// Promotes the failed volumes of a store with the present images.
async fn promote_store(
    client: &Client,
    store: &str,
    request: &PromoteVolume,
    format: Format,
) -> Result<Exit, CommandError> {
    let volumes = client.volumes().await?;
    let waiting = volumes
        .iter()
        .filter(|volume| volume.store.as_deref() == Some(store) && volume.state == VolumeState::Failed);
    // Another host may wait for blocks of a volume that left an image of the store.
    let migrations = client.migrations().await?;
    let left = migrations.iter().filter(|migration| {
        migration.waiting_for.is_some()
            && migration.state == MigrationState::Running
            && migration.source.store.as_deref() == Some(store)
    });
    let names: BTreeSet<&String> =
        waiting.map(|volume| &volume.name).chain(left.map(|migration| &migration.volume)).collect();
    let (mut promoted, mut exit) = (Vec::new(), Exit::Success);
    for name in names {
        match client.promote_volume(name, request).await {
            Ok(volume) => promoted.push(volume),
            Err(error) => {
                output::say(&format!("{name}: {error}"));
                exit = Exit::Refused;
            }
        }
    }
    output::print(format, &promoted, |promoted| {
        let lines: String = promoted.iter().map(promoted_text).collect();
        if lines.is_empty() { format!("no volume of store {store} was promoted\n") } else { lines }
    })?;
    Ok(exit)
}
