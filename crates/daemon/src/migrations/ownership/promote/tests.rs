//! Tests of complete copies whose source is lost, at a daemon that knows of them only by its journal.

use std::path::{Path, PathBuf};

use api::{Client, ErrorCode, PromoteVolume, RemoveVolume, VolumeState};
use chronicle::Generation;
use migration::custody::{KnownImage, Purpose};
use migration::filling::Manifest;
use migration::journal::{
    Entry, ExportSettings, Forwarding, HEADER, Hollow, ImageFormat, ImageLocation, MigratingVolume, Outcome,
    Place, Record, Side, Stage, VolumeRecord, encode,
};
use migration::{Attempt, HostId, MigrationId, VolumeId};

use crate::config::Overrides;
use crate::{Config, Daemon, Folders, read_journal};

const VOLUME: VolumeId = VolumeId([5; 16]);
const MIGRATION: MigrationId = MigrationId(1);
const ATTEMPT: Attempt = Attempt(1);
const FORCE: PromoteVolume = PromoteVolume {
    ticket: None,
    force: true,
    without_missing: false,
    restored: false,
    exchanged: false,
    unasked: false,
    size_bytes: None,
};

/// A host with a journal and an image, and without a list of hosts.
struct Stranded {
    folder: tempfile::TempDir,
    client: Client,
}

impl Stranded {
    /// Makes a journal in which the volume "v" came from an unknown host, followed by the records `more`.
    fn new(more: Vec<Record>) -> Self {
        Self::with(|image| {
            let volumes = vec![record(image.clone())];
            let source = ImageLocation::raw_file("dead", "");
            let moving = MigratingVolume { volume: VOLUME, source, target: image };
            let side = Side::Incoming {
                peer: HostId([8; 32]),
                peer_name: "dead".into(),
                remote: MigrationId(4),
                volumes,
            };
            let volumes = vec![moving];
            let started =
                Record::MigrationStarted { migration: MIGRATION, volumes, keep_source: false, side };
            [vec![started], more].concat()
        })
    }

    /// Makes a journal in which the volume "v" was released to an unknown host.
    fn left() -> Self {
        Self::with(|image| {
            let added = Record::VolumeAdded(record(image.clone()));
            let target = ImageLocation::raw_file("dead", "");
            let volumes = vec![MigratingVolume { volume: VOLUME, source: image, target }];
            let side = Side::Outgoing {
                peer: HostId([8; 32]),
                peer_name: "dead".into(),
                store: String::new(),
                forwarding: Forwarding::WhileConnected,
            };
            let started =
                Record::MigrationStarted { migration: MIGRATION, volumes, keep_source: false, side };
            let generations = vec![(VOLUME, Generation(4))];
            vec![added, started, Record::Released { migration: MIGRATION, attempt: ATTEMPT, generations }]
        })
    }

    /// Makes an image, and a journal with the records about it.
    fn with(records: impl FnOnce(ImageLocation) -> Vec<Record>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let images = folder.path().join("data/images");
        std::fs::create_dir_all(&images).unwrap();
        let path = images.join("v.img");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let place = Place::File(path.display().to_string());
        let lasting = crate::custody::lasting_at(&place).unwrap().unwrap();
        let known = KnownImage { lasting, purpose: Purpose::Use };
        let noted = Record::ImageKnown { place: place.clone(), known };
        let image = ImageLocation { store: "default".into(), place, format: ImageFormat::Raw };
        let records = [records(image), vec![noted]].concat();
        write_journal(&folder.path().join("data/journal"), records);
        transport::Identity::create(&folder.path().join("data/identity"), "beta").unwrap();
        let client = Client::new(api::Address::unix(folder.path().join("run/api.sock")).unwrap());
        Self { folder, client }
    }

    /// Starts the daemon, runs `work`, and stops the daemon.
    async fn run<T>(&self, work: impl Future<Output = T>) -> T {
        let text = format!(
            "data_dir = \"{0}/data\"\napi = \"unix:{0}/run/api.sock\"\n",
            self.folder.path().display()
        );
        let folders = Folders::of_this_user();
        let config = Config::parse(Path::new("test"), &text, &Overrides::default(), &folders).unwrap();
        let daemon = Daemon::start(config).await.unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let running = tokio::spawn(daemon.run(async move { drop(stopped.await) }));
        let done = work.await;
        drop(stop);
        running.await.unwrap().unwrap();
        done
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("data/images/v.img")
    }

    /// Puts another file of the right size under the name of the image.
    fn exchange_image(&self) {
        let other = self.folder.path().join("other");
        std::fs::File::create(&other).unwrap().set_len(1 << 20).unwrap();
        std::fs::rename(other, self.image()).unwrap();
    }

    fn stage(&self) -> Stage {
        let path = self.folder.path().join("data/journal");
        let state = read_journal(&path, &std::fs::read(&path).unwrap()).unwrap();
        state.migrations[&MIGRATION].stage.clone()
    }
}

fn record(image: ImageLocation) -> VolumeRecord {
    VolumeRecord {
        volume: VOLUME,
        name: "v".into(),
        size_bytes: 1 << 20,
        block_size_bytes: 65536,
        image,
        generation: Generation(3),
        export: ExportSettings::default(),
    }
}

fn write_journal(path: &Path, records: Vec<Record>) {
    let mut bytes = HEADER.to_vec();
    encode(0, &Entry { at_unix_ms: 1, records: vec![Record::Snapshot(Box::default())] }, &mut bytes).unwrap();
    encode(1, &Entry { at_unix_ms: 1, records }, &mut bytes).unwrap();
    bytes.resize(1 << 20, 0);
    std::fs::write(path, bytes).unwrap();
}

fn prepared() -> Record {
    Record::TargetPrepared { migration: MIGRATION, attempt: ATTEMPT }
}

fn handed_back() -> Vec<Record> {
    let generations = |generation| vec![(VOLUME, Generation(generation))];
    vec![
        prepared(),
        Record::Owned { migration: MIGRATION, attempt: ATTEMPT, generations: generations(4) },
        Record::HandedBack { migration: MIGRATION, generations: generations(5) },
    ]
}

/// Promotes a copy that is shown as waiting, and checks that it is served, also after a restart.
async fn check_promoted(records: Vec<Record>, generation: u64) {
    let host = Stranded::new(records);
    host.run(async {
        let shown = host.client.volume("v").await.unwrap();
        assert_eq!((shown.state, shown.size_bytes), (VolumeState::Waiting, 1 << 20));
        let advice = shown.message.unwrap();
        assert!(advice.contains("\"dead\"") && advice.contains("promote v --force"), "{advice}");
        assert_eq!(host.client.volumes().await.unwrap().len(), 1);
        let refused = host.client.promote_volume("v", &PromoteVolume { force: false, ..FORCE }).await;
        assert_eq!(refused.unwrap_err().code(), Some(ErrorCode::InvalidRequest));
        let promoted = host.client.promote_volume("v", &FORCE).await.unwrap();
        assert_eq!((promoted.state, promoted.generation), (VolumeState::Serving, generation));
        assert_eq!(host.client.migrations().await.unwrap()[0].state, api::MigrationState::Moved);
        let again = host.client.promote_volume("v", &FORCE).await.unwrap_err();
        assert_eq!(again.code(), Some(ErrorCode::NotPrepared));
    })
    .await;
    assert!(matches!(host.stage(), Stage::Ended(_)), "{:?}", host.stage());
    let served = host.run(async { host.client.volume("v").await.unwrap() }).await;
    assert_eq!((served.state, served.generation), (VolumeState::Serving, generation));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prepared_copy_is_promoted_although_its_source_is_not_known_any_more() {
    check_promoted(vec![prepared()], 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_was_handed_back_to_a_lost_host_is_promoted() {
    check_promoted(handed_back(), 6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_is_promoted_although_the_list_of_hosts_cannot_be_read() {
    let host = Stranded::new(vec![prepared()]);
    std::fs::write(host.folder.path().join("data/hosts.json"), "{").unwrap();
    let promoted = host.run(async { host.client.promote_volume("v", &FORCE).await.unwrap() }).await;
    assert_eq!(promoted.state, VolumeState::Serving);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_whose_image_is_gone_is_not_promoted_and_waits_on() {
    let host = Stranded::new(vec![prepared()]);
    std::fs::remove_file(host.folder.path().join("data/images/v.img")).unwrap();
    host.run(async {
        let refused = host.client.promote_volume("v", &FORCE).await.unwrap_err();
        assert_eq!(refused.code(), Some(ErrorCode::ImageNotFound));
        assert_eq!(host.client.volume("v").await.unwrap().state, VolumeState::Waiting);
    })
    .await;
    assert_eq!(host.stage(), Stage::Prepared(ATTEMPT));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_was_about_to_be_deleted_goes_although_its_source_is_lost() {
    for is_gone in [false, true] {
        let outcome = Outcome::HandedBack { detail: "it did not start".into() };
        let discarding = Record::Discarding { migration: MIGRATION, outcome: outcome.clone() };
        let host = Stranded::new([handed_back(), vec![discarding]].concat());
        let image = host.folder.path().join("data/images/v.img");
        if is_gone {
            std::fs::remove_file(&image).unwrap();
        }
        host.run(async {
            let refused = host.client.promote_volume("v", &FORCE).await.unwrap_err();
            assert_eq!(refused.code(), Some(ErrorCode::NotPrepared));
            assert!(host.client.volumes().await.unwrap().is_empty());
        })
        .await;
        assert!(!image.exists());
        assert_eq!(host.stage(), Stage::Ended(outcome));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_left_for_a_lost_host_is_taken_back_by_the_order_that_messages_name() {
    let host = Stranded::left();
    host.run(async {
        let shown = host.client.volume("v").await.unwrap();
        assert_eq!((shown.state, shown.size_bytes), (VolumeState::Waiting, 1 << 20));
        let named = |text: &str| assert!(text.contains("sterna volume promote v --force"), "{text}");
        named(&shown.message.unwrap());
        let late = host.client.cancel_migration("m1").await.unwrap_err();
        assert_eq!(late.code(), Some(ErrorCode::TooLate));
        named(&late.to_string());
        let refused =
            host.client.promote_volume("v", &PromoteVolume { force: false, ..FORCE }).await.unwrap_err();
        assert_eq!(refused.code(), Some(ErrorCode::NotPrepared));
        named(&refused.to_string());
        let promoted = host.client.promote_volume("v", &FORCE).await.unwrap();
        assert_eq!((promoted.state, promoted.generation), (VolumeState::Serving, 7));
        let again = host.client.promote_volume("v", &FORCE).await.unwrap_err();
        assert_eq!(again.code(), Some(ErrorCode::NotPrepared));
    })
    .await;
    assert!(matches!(host.stage(), Stage::Ended(Outcome::HandedBack { .. })), "{:?}", host.stage());
    let served = host.run(async { host.client.volume("v").await.unwrap() }).await;
    assert_eq!((served.state, served.generation), (VolumeState::Serving, 7));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_departure_whose_image_is_gone_is_not_taken_back_and_waits_on() {
    let host = Stranded::left();
    std::fs::remove_file(host.folder.path().join("data/images/v.img")).unwrap();
    host.run(async {
        let refused = host.client.promote_volume("v", &FORCE).await.unwrap_err();
        assert_eq!(refused.code(), Some(ErrorCode::ImageNotFound));
        assert_eq!(host.client.volume("v").await.unwrap().state, VolumeState::Waiting);
    })
    .await;
    assert_eq!(host.stage(), Stage::Released(ATTEMPT));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_of_which_it_is_unknown_what_it_lacks_is_removed_by_the_order_that_messages_name() {
    let manifests = vec![(VOLUME, Manifest { units: 1, checksum: 1 })];
    let hollow = Hollow { attempt: ATTEMPT, manifests };
    let generations = vec![(VOLUME, Generation(4))];
    let owned = Record::Owned { migration: MIGRATION, attempt: ATTEMPT, generations };
    let host = Stranded::new(vec![Record::Hollow { migration: MIGRATION, hollow }, prepared(), owned]);
    host.run(async {
        let why = host.client.volume("v").await.unwrap().message.unwrap();
        assert!(
            why.contains("sterna volume promote v --force") && why.contains("sterna volume remove v --force"),
            "{why}"
        );
        let refused = host.client.remove_volume("v", RemoveVolume::default()).await.unwrap_err();
        assert_eq!(refused.code(), Some(ErrorCode::VolumeUnavailable));
        let forced = RemoveVolume { force: true, ..RemoveVolume::default() };
        host.client.remove_volume("v", forced).await.unwrap();
        assert!(host.client.volumes().await.unwrap().is_empty());
    })
    .await;
}

/// Checks that a volume whose image was exchanged is served again by the orders that the messages name.
async fn check_exchanged(host: Stranded) {
    host.exchange_image();
    host.run(async {
        let refused = host.client.promote_volume("v", &FORCE).await.unwrap_err();
        assert_eq!(refused.code(), Some(ErrorCode::ImageInUse));
        assert!(refused.to_string().contains("--exchanged"), "{refused}");
        let exchanged = PromoteVolume { exchanged: true, force: false, ..FORCE };
        host.client.promote_volume("v", &exchanged).await.unwrap();
        let again = host.client.promote_volume("v", &exchanged).await.unwrap_err();
        assert_eq!(again.code(), Some(ErrorCode::InvalidRequest));
        let promoted = host.client.promote_volume("v", &FORCE).await.unwrap();
        assert_eq!(promoted.state, VolumeState::Serving);
    })
    .await;
    assert!(matches!(host.stage(), Stage::Ended(_)), "{:?}", host.stage());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exchanged_image_of_a_waiting_volume_is_served_by_the_order_that_messages_name() {
    check_exchanged(Stranded::left()).await;
    check_exchanged(Stranded::new(vec![prepared()])).await;
    check_exchanged(Stranded::new(handed_back())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_whose_images_are_lost_is_served_from_what_is_put_there_by_the_order_that_messages_name() {
    for host in [Stranded::left(), Stranded::new(vec![prepared()]), Stranded::new(handed_back())] {
        std::fs::remove_file(host.image()).unwrap();
        let named = PromoteVolume { exchanged: true, ..FORCE };
        host.run(async {
            let refused = host.client.promote_volume("v", &FORCE).await.unwrap_err();
            assert_eq!(refused.code(), Some(ErrorCode::ImageNotFound));
            let text = refused.to_string();
            assert!(
                text.contains("1048576 bytes") && text.contains("promote v --force --exchanged"),
                "{text}"
            );
            host.exchange_image();
            let promoted = host.client.promote_volume("v", &named).await.unwrap();
            assert_eq!(promoted.state, VolumeState::Serving);
            host.client.remove_volume("v", RemoveVolume::default()).await.unwrap();
        })
        .await;
        assert!(matches!(host.stage(), Stage::Ended(_)), "{:?}", host.stage());
    }
}
