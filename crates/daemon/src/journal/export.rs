//! Exports a journal as JSON, for support, for the history, and for `super::restore`. A restore reads the journal's own bytes
//! in the document, never the text.

use std::collections::{BTreeMap, BTreeSet};

use chronicle::{Generation, StayId};
use migration::VolumeId;
use migration::custody::{DeviceName, KnownImage, Lasting, Purpose};
use migration::journal::{
    Doubt, Entry, HostList, ImageLocation, MigratingVolume, MigrationState, NamedHost, Outcome, Place,
    Promotion, Record, ReservedContent, Restored, RestoredMore, Side, Stage, State, VolumeRecord,
    VolumeState,
};
use serde_json::{Map, Value, json};

use super::examine::{JournalExamination, stage_in_words};
use super::restore;
use crate::migrations::view::failure_name;

/// The version of the document. Within a version fields are only added.
const VERSION: u32 = 1;

pub(super) fn document(
    examination: &JournalExamination,
    content: &[u8],
    entries: &[Entry],
    state: &State,
) -> Value {
    let entries: Vec<Value> = entries
        .iter()
        .enumerate()
        .map(|(sequence, entry)| {
            let records: Vec<Value> = entry.records.iter().map(record).collect();
            json!({ "sequence": sequence, "at_unix_ms": entry.at_unix_ms, "records": records })
        })
        .collect();
    json!({
        "document": "sterna-journal",
        "document_version": VERSION,
        "program_version": env!("CARGO_PKG_VERSION"),
        "examination": examination,
        "state": whole_state(state),
        "entries": entries,
        // Public identities, so that a restore knows which hosts to ask. They give no host access.
        restore::HOSTS: examination.hosts.as_ref().map(hosts),
        restore::FIELD: restore::in_digits(content),
    })
}

fn whole_state(state: &State) -> Value {
    let volumes: Vec<Value> = state.volumes.values().map(volume_state).collect();
    let moved: Vec<Value> = state
        .moved
        .values()
        .map(|moved| {
            json!({
                "volume": volume_state(&moved.volume),
                "migration": moved.migration.to_string(),
                "host": moved.host.to_string(),
                "host_name": moved.host_name,
                "generation": moved.generation.0,
                "forwarding": in_words(&moved.forwarding),
                "at_unix_ms": moved.at_unix_ms,
            })
        })
        .collect();
    let migrations: Vec<Value> =
        state.migrations.iter().map(|(id, known)| with("id", id.to_string(), migration(known))).collect();
    let reservations: Vec<Value> = state
        .reservations
        .iter()
        .map(|(place, fence)| {
            let content = match fence.content {
                ReservedContent::Left => "left",
                ReservedContent::Kept => "kept",
                ReservedContent::HalfMade => "half-made",
            };
            json!({ "place": place.name(), "volume": fence.volume, "migration": fence.migration.to_string(), "content": content })
        })
        .collect();
    let branches = state.branches.iter().flat_map(|(volume, branches)| {
        branches.iter().map(move |branch| {
            json!({
                "volume": volume.to_string(),
                "id": branch.id.to_string(),
                "migration": branch.migration.to_string(),
                "from_generation": branch.from.0,
            })
        })
    });
    let origins: BTreeMap<String, String> =
        state.origins.iter().map(|(volume, origin)| (volume.to_string(), in_words(origin))).collect();
    let fillings = state.fillings.iter().map(|(volume, filling)| {
        json!({
            "volume": volume.to_string(),
            "host": filling.peer.to_string(),
            "host_name": filling.peer_name,
            "migration_there": filling.remote.to_string(),
            "missing_blocks_at_handover": filling.manifest.units,
        })
    });
    let given = state.given.iter().flat_map(|(volume, hosts)| {
        let records = hosts.values().cloned();
        records.map(|given| Record::AttachmentGiven { volume: *volume, given: Box::new(given) })
    });
    let attached = state.attached.values().map(|attached| Record::Attached(Box::new(attached.clone())));
    let snapshots = state
        .snapshots
        .iter()
        .map(|(volume, taken)| Record::SnapshotKnown { volume: *volume, taken: Box::new(taken.clone()) });
    json!({
        "volumes": volumes,
        "moved": moved,
        "migrations": migrations,
        "next_migration": state.next_migration,
        "reservations": reservations,
        "branches": branches.collect::<Vec<_>>(),
        "origins": origins,
        "fillings": fillings.collect::<Vec<_>>(),
        "attachments_given": given.map(|record| self::record(&record)).collect::<Vec<_>>(),
        "attached": attached.map(|record| self::record(&record)).collect::<Vec<_>>(),
        "snapshots": snapshots.map(|record| self::record(&record)).collect::<Vec<_>>(),
        "reverts": state.reverts.iter().map(|(volume, to)| (volume.to_string(), to.to_string())).collect::<BTreeMap<_, _>>(),
        "restored": state.restored.as_ref().map(restored),
    })
}

fn restored(known: &Restored) -> Value {
    let volumes = known.volumes.iter().map(|waiting| {
        let doubt = waiting.doubt.as_ref().map(|doubt| match doubt {
            Doubt::Lasting => json!({ "kind": "lasting" }),
            Doubt::Copy { peer_name, .. } => json!({ "kind": "copy", "host_name": peer_name }),
            Doubt::BetweenStores { other } => json!({ "kind": "between-stores", "other": image(other) }),
            Doubt::Hollow { peer_name } => json!({ "kind": "hollow", "host_name": peer_name }),
        });
        json!({ "volume": volume_state(&waiting.volume), "doubt": doubt })
    });
    json!({
        "backup_unix_ms": known.backup_unix_ms,
        "restored_unix_ms": known.restored_unix_ms,
        "numbers_from": known.numbers_from,
        "volumes": volumes.collect::<Vec<_>>(),
        "more": restored_more(&known.more),
    })
}

fn restored_more(known: &RestoredMore) -> Value {
    let list = match known.list {
        HostList::Complete => "complete".to_owned(),
        HostList::Unknown(why) => in_words(&why),
    };
    let ids = |volumes: &BTreeSet<VolumeId>| volumes.iter().map(VolumeId::to_string).collect::<Vec<_>>();
    json!({
        "list_of_hosts": list,
        "hosts": hosts(&known.hosts),
        "departed": ids(&known.departed),
        "sized": ids(&known.sized),
    })
}

fn hosts<'a>(known: impl IntoIterator<Item = &'a NamedHost>) -> Vec<Value> {
    known.into_iter().map(|host| json!({ "id": host.id.to_string(), "name": host.name })).collect()
}

fn volume_state(known: &VolumeState) -> Value {
    let mut shown = volume(&known.record);
    shown.insert("stay".to_owned(), known.stay.to_string().into());
    shown.insert("added_unix_ms".to_owned(), known.added_unix_ms.into());
    shown.insert("resizing_to_bytes".to_owned(), known.resizing_to.into());
    shown.into()
}

fn volume(record: &VolumeRecord) -> Map<String, Value> {
    let export = &record.export;
    let shown = json!({
        "id": record.volume.to_string(),
        "name": record.name,
        "size_bytes": record.size_bytes,
        "block_size_bytes": record.block_size_bytes,
        "image": image(&record.image),
        "generation": record.generation.0,
        "export": {
            "access": in_words(&export.access),
            "listen": export.listen,
            "socket_mode": export.socket_mode.map(|mode| format!("{mode:04o}")),
            "socket_owner": export.socket_owner,
            "connections_max": export.connections_max,
        },
    });
    match shown {
        Value::Object(fields) => fields,
        // Unreachable: the value above is an object.
        _ => Map::new(),
    }
}

fn migration(known: &MigrationState) -> Value {
    let attempt = match &known.stage {
        Stage::Prepared(attempt) | Stage::Released(attempt) | Stage::Owned(attempt) => Some(attempt.0),
        _ => None,
    };
    let outcome = match &known.stage {
        Stage::Ended(outcome) | Stage::Discarding(outcome) => Some(self::outcome(outcome)),
        _ => None,
    };
    json!({
        "names": known.names,
        "volumes": known.volumes.iter().map(moving).collect::<Vec<_>>(),
        "side": side(&known.side),
        "stage": stage_in_words(&known.stage),
        "attempt": attempt,
        "aborted_attempt": known.aborted.0,
        "outcome": outcome,
        "keep_source": known.keep_source,
        "promotion": known.promotion.as_ref().map(promotion),
        "is_hollow": known.hollow.is_some(),
        "is_cancelled": known.is_cancelled,
        "started_unix_ms": known.started_unix_ms,
        "ended_unix_ms": known.ended_unix_ms,
    })
}

/// Returns a record: its name and its fields.
pub(super) fn record(record: &Record) -> Value {
    let about = |name: &str, fields: Value| with("record", name, fields);
    match record {
        Record::Snapshot(state) => about("snapshot", json!({ "state": whole_state(state) })),
        Record::VolumeAdded(added) => about("volume-added", volume(added).into()),
        Record::VolumeRemoved { volume } => about("volume-removed", json!({ "volume": volume.to_string() })),
        Record::MigrationStarted { migration, volumes, keep_source, side: role } => about(
            "migration-started",
            json!({
                "migration": migration.to_string(),
                "volumes": volumes.iter().map(moving).collect::<Vec<_>>(),
                "keep_source": keep_source,
                "side": side(role),
            }),
        ),
        Record::TargetPrepared { migration, attempt } => {
            about("target-prepared", json!({ "migration": migration.to_string(), "attempt": attempt.0 }))
        }
        Record::AttemptAborted { migration, attempt } => {
            about("attempt-aborted", json!({ "migration": migration.to_string(), "attempt": attempt.0 }))
        }
        Record::Released { migration, attempt, generations } => about(
            "released",
            json!({ "migration": migration.to_string(), "attempt": attempt.0, "generations": by_volume(generations) }),
        ),
        Record::Owned { migration, attempt, generations } => about(
            "owned",
            json!({ "migration": migration.to_string(), "attempt": attempt.0, "generations": by_volume(generations) }),
        ),
        Record::HandedBack { migration, generations } => about(
            "handed-back",
            json!({ "migration": migration.to_string(), "generations": by_volume(generations) }),
        ),
        Record::MigrationEnded { migration, outcome: ended, .. } => {
            about("migration-ended", json!({ "migration": migration.to_string(), "outcome": outcome(ended) }))
        }
        Record::ResizeBegun { volume, size_bytes } => {
            about("resize-begun", json!({ "volume": volume.to_string(), "size_bytes": size_bytes }))
        }
        Record::Resized { volume, size_bytes } => {
            about("resized", json!({ "volume": volume.to_string(), "size_bytes": size_bytes }))
        }
        Record::ReservationLifted { place } => about("reservation-lifted", json!({ "place": place.name() })),
        Record::Promoted { migration, attempt, generations, promotion: grounds } => about(
            "promoted",
            json!({
                "migration": migration.to_string(),
                "attempt": attempt.0,
                "generations": by_volume(generations),
                "promotion": promotion(grounds),
            }),
        ),
        Record::MovedForgotten { volume } => {
            about("moved-forgotten", json!({ "volume": volume.to_string() }))
        }
        Record::OriginKnown { volume, origin } => {
            about("origin-known", json!({ "volume": volume.to_string(), "origin": in_words(origin) }))
        }
        Record::Discarding { migration, outcome: ended } => {
            about("discarding", json!({ "migration": migration.to_string(), "outcome": outcome(ended) }))
        }
        Record::CancelOrdered { migration } => {
            about("cancel-ordered", json!({ "migration": migration.to_string() }))
        }
        Record::GrewElsewhere { volume, size_bytes } => {
            about("grew-elsewhere", json!({ "volume": volume.to_string(), "size_bytes": size_bytes }))
        }
        Record::ImageKnown { place, known } => about("image-known", image_known(place, known)),
        Record::ImageForgotten { place } => about("image-forgotten", json!({ "place": place.name() })),
        Record::AttachmentGiven { volume, given } => about(
            "attachment-given",
            json!({
                "volume": volume.to_string(),
                "host": given.host.to_string(),
                "host_name": given.host_name,
                "access": in_words(&given.access),
                "is_confirmed": given.is_confirmed,
                "has_gone_there": given.has_gone_there,
            }),
        ),
        Record::AttachmentEnded { volume, host } => {
            about("attachment-ended", json!({ "volume": volume.to_string(), "host": host.to_string() }))
        }
        Record::Attached(attached) => about(
            "attached",
            json!({
                "volume": attached.record.volume.to_string(),
                "name": attached.record.name,
                "number": attached.number.to_string(),
                "host": attached.host.to_string(),
                "has_left": attached.has_left,
            }),
        ),
        Record::Detached { volume } => about("detached", json!({ "volume": volume.to_string() })),
        Record::SnapshotKnown { volume, taken } => about(
            "snapshot-known",
            json!({
                "volume": volume.to_string(),
                "of": taken.volume.to_string(),
                "name": taken.name,
                "label": taken.label,
                "taken_unix_ms": taken.taken_unix_ms,
                "group": VolumeId(taken.group).to_string(),
            }),
        ),
        Record::RevertBegun { reverts } => {
            let reverts = reverts.iter().map(|(volume, to)| (volume.to_string(), to.to_string()));
            about("revert-begun", json!({ "reverts": reverts.collect::<BTreeMap<_, _>>() }))
        }
        Record::Reverted { volume } => about("reverted", json!({ "volume": volume.to_string() })),
        Record::Hollow { migration, hollow } => {
            let missing =
                hollow.manifests.iter().map(|(volume, manifest)| (volume.to_string(), manifest.units));
            about(
                "hollow",
                json!({
                    "migration": migration.to_string(),
                    "attempt": hollow.attempt.0,
                    "missing_blocks": missing.collect::<BTreeMap<_, _>>(),
                }),
            )
        }
        Record::MissingGivenUp { volume } => {
            about("missing-given-up", json!({ "volume": volume.to_string() }))
        }
        Record::FillingKnown { volume, filling } => about(
            "filling-known",
            json!({
                "volume": volume.to_string(),
                "host": filling.peer.to_string(),
                "migration_there": filling.remote.to_string(),
                "missing_blocks_at_handover": filling.manifest.units,
            }),
        ),
        Record::Filled { volume } => about("filled", json!({ "volume": volume.to_string() })),
        Record::Restored(known) => about("restored", restored(known)),
        Record::Reinstated { volume, generation, stay, branch } => about(
            "reinstated",
            json!({
                "volume": volume.to_string(),
                "generation": generation.0,
                "stay": StayId::Arrived(stay.0).to_string(),
                "branch": branch.map(|branch| branch.to_string()),
            }),
        ),
        Record::RestoredForgotten { volume } => {
            about("restored-forgotten", json!({ "volume": volume.to_string() }))
        }
        Record::RestoredMore(known) => about("restored-more", restored_more(known)),
        Record::DepartureConfirmed { volume } => {
            about("departure-confirmed", json!({ "volume": volume.to_string() }))
        }
    }
}

fn side(side: &Side) -> Value {
    match side {
        Side::OneHost => json!({ "kind": "one-host" }),
        Side::Outgoing { peer, peer_name, store, forwarding } => json!({
            "kind": "outgoing",
            "host": peer.to_string(),
            "host_name": peer_name,
            "store_there": store,
            "forwarding": in_words(forwarding),
        }),
        Side::Incoming { peer, peer_name, remote, volumes } => json!({
            "kind": "incoming",
            "host": peer.to_string(),
            "host_name": peer_name,
            "migration_there": remote.to_string(),
            "volumes": volumes.iter().map(volume).collect::<Vec<_>>(),
        }),
    }
}

fn moving(moving: &MigratingVolume) -> Value {
    json!({
        "volume": moving.volume.to_string(),
        "source": image(&moving.source),
        "target": image(&moving.target),
    })
}

fn image(image: &ImageLocation) -> Value {
    json!({
        "store": (!image.is_adopted()).then_some(&image.store),
        "place": image.place.name(),
        "format": image.format.name(),
    })
}

fn image_known(place: &Place, known: &KnownImage) -> Value {
    let is = match &known.lasting {
        Lasting::File { inode, born } => {
            json!({ "inode": inode, "born_s": born.map(|(seconds, _)| seconds) })
        }
        Lasting::Device { name: DeviceName::Own(number), .. } => json!({ "device": number }),
        Lasting::Device { name: DeviceName::Position(position), .. } => json!({ "position": position }),
    };
    let purpose = match known.purpose {
        Purpose::Use => "use".to_owned(),
        Purpose::Kept(migration) => format!("kept by {migration}"),
        Purpose::Given(migration) => format!("of its former owner, kept by {migration}"),
        Purpose::Hidden(migration) => format!("left over by {migration}"),
        Purpose::Folder => "folder".to_owned(),
        Purpose::Passing => "passing".to_owned(),
    };
    json!({ "place": place.name(), "is": is, "purpose": purpose })
}

fn outcome(outcome: &Outcome) -> Value {
    match outcome {
        Outcome::Moved { left_over } => json!({ "kind": "moved", "left_over": left_over }),
        Outcome::Cancelled => json!({ "kind": "cancelled" }),
        Outcome::Failed { code, detail } => {
            json!({ "kind": "failed", "code": failure_name(*code), "detail": detail })
        }
        Outcome::HandedBack { detail } => json!({ "kind": "handed-back", "detail": detail }),
        Outcome::CancelledThere => json!({ "kind": "cancelled-there" }),
        Outcome::TakenBack => json!({ "kind": "taken-back" }),
    }
}

fn promotion(promotion: &Promotion) -> Value {
    match promotion {
        Promotion::Ticket => json!({ "kind": "ticket" }),
        Promotion::Force { branches } => {
            let branches = branches.iter().map(|(volume, branch)| (volume.to_string(), branch.to_string()));
            json!({ "kind": "force", "branches": branches.collect::<BTreeMap<_, _>>() })
        }
    }
}

fn by_volume(generations: &[(VolumeId, Generation)]) -> BTreeMap<String, u64> {
    generations.iter().map(|(volume, generation)| (volume.to_string(), generation.0)).collect()
}

/// Returns the name of a variant without fields in the form for programs: `WhileConnected` becomes `while-connected`.
fn in_words(value: &impl std::fmt::Debug) -> String {
    let mut words = String::new();
    for c in format!("{value:?}").chars() {
        if c.is_ascii_uppercase() && !words.is_empty() {
            words.push('-');
        }
        words.push(c.to_ascii_lowercase());
    }
    words
}

/// Returns an object with an additional first field.
fn with(field: &str, value: impl Into<Value>, fields: Value) -> Value {
    let mut object = Map::from_iter([(field.to_owned(), value.into())]);
    if let Value::Object(fields) = fields {
        object.extend(fields);
    }
    object.into()
}
