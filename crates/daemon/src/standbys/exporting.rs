//! Exports a standby that has nothing yet: its first copy goes into a folder of this host, which somebody carries to the standby's host.
//!
//! ```text
//!   order ─► paused, durably ─► the streams lead here: a keeper writes the images of one cut ─► confirmed, flushed, recorded
//!              a folder that looks whole ◄─ renamed ◄─ manifest with the watermark ◄─ hashed ◄────────┘
//! ```
//! To the source's machine the folder is the standby. So what is written afterwards is known: once the folder has become the standby at the
//! other host, nothing else is sent.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_channel::mpsc as lanes;
use lane::peer::ChannelEvent;
use standby::record::{ImageState, OwnerRecord, StandbyRecord};
use tokio::time::sleep;

use super::book::{Book, CopiedVolume, CopyConfig, Keep, Noted, Side, SourceConfig};
use super::copy::exported::{Manifest, Partial};
use super::copy::{Copy, Ending, Input};
use super::frames::{Frame, Line, Way};
use super::orders::Found;
use super::source::{Source, run::SourceLine};
use super::{Standbys, lock};
use crate::error::{RequestError, StandbyError};
use crate::host::blocking;
use crate::journal::now_unix_ms;

/// Time between two looks at an export.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// An export that is under way, or the last one.
pub(super) struct Exporting {
    folder: PathBuf,
    begun_unix_ms: u64,
    /// Whether it was paused before: so it is again if there is no folder.
    was_paused: bool,
    /// What was sent before, since the daemon began.
    sent_before: u64,
    is_cancelled: AtomicBool,
    shown: Mutex<ExportShown>,
}

#[derive(Clone, Default)]
struct ExportShown {
    ended_unix_ms: Option<u64>,
    failed: Option<String>,
    bytes_hashed: u64,
}

/// Where the streams of a standby lead while it is exported.
pub(super) struct Detour {
    copy: Copy,
    /// Why the folder takes no more.
    refused: Mutex<Option<String>>,
}

impl Detour {
    /// Returns a line to the folder's keeper, and what comes from it.
    pub(super) fn line(
        self: &Arc<Self>,
        channel: transport::ChannelId,
    ) -> (SourceLine, lanes::UnboundedReceiver<ChannelEvent>) {
        let (sender, arrivals) = lanes::unbounded();
        let line = Line { channel, way: Way::Here(sender) };
        (Arc::new(LineHere { detour: Arc::clone(self), line }), arrivals)
    }

    /// Notes that the folder takes no more.
    pub(super) fn refuse(&self, reason: String) {
        lock(&self.refused).get_or_insert(reason);
    }
}

/// A line to a keeper in this process.
struct LineHere {
    detour: Arc<Detour>,
    line: Line,
}

impl crate::vms::moving::channel::Send for LineHere {
    fn send(&self, _: transport::Priority, head: bytes::Bytes, payload: bytes::Bytes) {
        // Nothing else is said to a folder that has had nothing.
        if let Some(Frame::ToStandby(stream, message)) = Frame::decode(&head) {
            let line = self.line.clone();
            self.detour.copy.give(Input::Frame { line, stream, message, payload, credit: Box::new(()) });
        }
    }
}

impl Standbys {
    /// Begins to export a standby whose volumes are here. It is paused from then on, until an administrator resumes it.
    pub(crate) async fn export(
        self: Arc<Self>,
        name: String,
        order: api::ExportStandby,
    ) -> Result<api::Standby, RequestError> {
        let _changing = self.changing.lock().await;
        let found = self.find(&name)?;
        let Found::Source(source) = &found else { return Err(StandbyError::NotHere(name).into()) };
        let refused = |reason: String| StandbyError::NotCarried { name: name.clone(), reason };
        self.may_be_exported(source).map_err(refused)?;
        let folder = PathBuf::from(&order.folder);
        let making = folder.clone();
        let partial =
            blocking(move || Ok::<_, RequestError>(Partial::make(&making))).await?.map_err(refused)?;
        let before = source.config();
        let config = SourceConfig { is_paused: true, ..before.clone() };
        self.write_source(config.clone()).await?;
        self.permissions.know(config.clone());
        source.set(config);
        let exporting = Arc::new(Exporting {
            folder,
            begun_unix_ms: now_unix_ms(),
            was_paused: before.is_paused,
            sent_before: source.shown().bytes_sent,
            is_cancelled: AtomicBool::new(false),
            shown: Mutex::default(),
        });
        lock(&self.exports).insert(source.standby(), Arc::clone(&exporting));
        tokio::spawn(Arc::clone(&self).carry(Arc::clone(source), exporting, partial));
        Ok(self.view(&found).await)
    }

    /// Ends an export that is under way. What it has made is deleted.
    pub(crate) async fn cancel_export(self: Arc<Self>, name: String) -> Result<api::Standby, RequestError> {
        let found = self.find(&name)?;
        let Found::Source(source) = &found else { return Err(StandbyError::NotHere(name).into()) };
        let exporting = lock(&self.exports).get(&source.standby()).cloned();
        let under_way = exporting.filter(|exporting| lock(&exporting.shown).ended_unix_ms.is_none());
        let Some(exporting) = under_way else {
            let reason = "no export of it is under way".to_owned();
            return Err(StandbyError::NotCarried { name, reason }.into());
        };
        exporting.is_cancelled.store(true, Ordering::Relaxed);
        Ok(self.view(&found).await)
    }

    /// Has the export of a standby that is being removed end.
    pub(super) fn end_export(&self, source: &Source) {
        if let Some(exporting) = lock(&self.exports).remove(&source.standby()) {
            exporting.is_cancelled.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether a standby is being exported.
    pub(super) fn is_exporting(&self, source: &Source) -> bool {
        let exports = lock(&self.exports);
        exports.get(&source.standby()).is_some_and(|exporting| lock(&exporting.shown).ended_unix_ms.is_none())
    }

    fn may_be_exported(&self, source: &Source) -> Result<(), String> {
        if self.is_exporting(source) {
            return Err("it is being exported already; see: sterna standby show".to_owned());
        }
        let shown = source.shown();
        let has_state = shown
            .group
            .as_ref()
            .and_then(|group| group.look(|machine, _| machine.record().acknowledged.is_some()));
        match has_state {
            _ if source.config().returns.is_some() => {
                Err("its images are those that the other host has given up: it is sent the difference"
                    .to_owned())
            }
            Some(false) => Ok(()),
            // What it has confirmed is in no folder.
            Some(true) if self.has_failed(source) => Ok(()),
            Some(true) => Err(format!(
                "host \"{}\" has a state of it already, or a folder that was exported before counts as one: only what was written since is \
                 sent. To begin anew, remove the standby and add it again",
                self.hosts.name_of(source.host())
            )),
            None => Err(shown.reason.unwrap_or_else(|| "its volumes are not served".to_owned())),
        }
    }

    fn has_failed(&self, source: &Source) -> bool {
        let exports = lock(&self.exports);
        exports.get(&source.standby()).is_some_and(|exporting| lock(&exporting.shown).failed.is_some())
    }

    async fn carry(self: Arc<Self>, source: Arc<Source>, exporting: Arc<Exporting>, partial: Partial) {
        let carried = self.try_to_carry(&source, &exporting, partial).await;
        source.lead(None);
        let (standby, folder) = (source.config().name, exporting.folder.display());
        match &carried {
            Ok(()) => tracing::info!(standby, %folder, "a standby was exported"),
            Err(error) => {
                tracing::warn!(standby, %folder, error, "a standby was not exported");
                self.go_on_without(&source, &exporting).await;
            }
        }
        let mut shown = lock(&exporting.shown);
        shown.failed = carried.err();
        shown.ended_unix_ms = Some(now_unix_ms());
    }

    /// Lets a standby go on as before its export, of which nothing is left.
    async fn go_on_without(&self, source: &Arc<Source>, exporting: &Exporting) {
        let _changing = self.changing.lock().await;
        if exporting.was_paused || !self.has(source) {
            return;
        }
        let config = SourceConfig { is_paused: false, ..source.config() };
        match self.write_source(config.clone()).await {
            Ok(()) => {
                self.permissions.know(config.clone());
                source.set(config);
            }
            Err(error) => tracing::warn!(error = %error.message(), "a standby stays paused"),
        }
    }

    /// Returns whether the volumes of a standby are still those of this host.
    fn has(&self, source: &Arc<Source>) -> bool {
        lock(&self.sources).get(&source.standby()).is_some_and(|known| Arc::ptr_eq(known, source))
    }

    async fn try_to_carry(
        &self,
        source: &Arc<Source>,
        exporting: &Arc<Exporting>,
        partial: Partial,
    ) -> Result<(), String> {
        let config = self.kept_in_folder(&source.config()).ok_or("a volume has left this host")?;
        let path = partial.path();
        let book = Book::open(&path).map_err(|error| error.to_string())?;
        let locate = Box::new(move || Ok(path.clone()));
        let copy = Copy::start(config.clone(), locate, book.clone()).map_err(|error| error.to_string())?;
        let detour = Arc::new(Detour { copy: copy.clone(), refused: Mutex::default() });
        source.lead(Some(Arc::clone(&detour)));
        let confirmed = self.until_confirmed(source, &detour, exporting, &book).await;
        // N.B. What is sent from here on is in no state that was confirmed.
        copy.end(Ending::InOrder).await;
        confirmed?;
        source.lead(None);
        let (exporting, named) = (Arc::clone(exporting), source.config().name);
        let own = self.book().map_err(|error| error.to_string())?.clone();
        let finished =
            blocking(move || Ok::<_, RequestError>(finish(partial, &config, named, &book, &own, &exporting)));
        finished.await.map_err(|error| error.message())?
    }

    /// Describes the standby as the folder keeps it.
    fn kept_in_folder(&self, config: &SourceConfig) -> Option<CopyConfig> {
        let volumes = config.volumes.iter().map(|volume| {
            let size_bytes = self.journal.read(|state| {
                let mut known = state.volumes.values().map(|known| &known.record);
                known
                    .find(|record| record.volume.to_string() == volume.volume)
                    .map(|record| record.size_bytes)
            })?;
            let (name, promoted) = (volume.name.clone(), String::new());
            Some(CopiedVolume { volume: volume.volume.clone(), name, size_bytes, promoted })
        });
        Some(CopyConfig {
            id: config.id.clone(),
            name: format!("{} in a folder", config.name),
            store: String::new(),
            volumes: volumes.collect::<Option<_>>()?,
            keep: Keep { last: 0, hourly: 0, daily: 0 },
            noted: Noted::default(),
            is_removed: false,
            is_yielded: false,
        })
    }

    /// Waits until a state is in the folder, durably, and the source has recorded that.
    async fn until_confirmed(
        &self,
        source: &Arc<Source>,
        detour: &Detour,
        exporting: &Exporting,
        book: &Book,
    ) -> Result<(), String> {
        let id = source.config().id;
        loop {
            if !self.has(source) {
                return Err("its volumes have left this host, or it was removed".to_owned());
            }
            if self.stopping.has_begun() {
                return Err("the daemon stops".to_owned());
            }
            if exporting.is_cancelled.load(Ordering::Relaxed) {
                return Err("it was cancelled".to_owned());
            }
            if let Some(reason) = lock(&detour.refused).clone().or(detour.copy.seen().fault) {
                return Err(reason);
            }
            let (there, here, id) =
                (book.clone(), self.book().map_err(|error| error.to_string())?.clone(), id.clone());
            let looked = blocking(move || Ok::<_, RequestError>(state_of(&there, &here, &id)));
            if looked.await.map_err(|error| error.message())??.is_some() {
                return Ok(());
            }
            sleep(LOOK_EVERY).await;
        }
    }

    /// Describes the last export of a standby.
    pub(super) fn view_export(&self, source: &Source) -> Option<api::StandbyExport> {
        let exporting = lock(&self.exports).get(&source.standby()).cloned()?;
        let shown = lock(&exporting.shown).clone();
        Some(api::StandbyExport {
            folder: exporting.folder.to_string_lossy().into_owned(),
            begun_unix_ms: exporting.begun_unix_ms,
            ended_unix_ms: shown.ended_unix_ms,
            failed: shown.failed,
            bytes_written: source.shown().bytes_sent.saturating_sub(exporting.sent_before),
            bytes_hashed: shown.bytes_hashed,
        })
    }
}

/// Returns the state that the folder has, if the source has confirmed it, and nothing newer.
fn state_of(there: &Book, here: &Book, id: &str) -> Result<Option<StandbyRecord>, String> {
    let text = |error: std::io::Error| error.to_string();
    let kept: Option<StandbyRecord> = there.record(Side::Copy, id).map_err(text)?;
    let owner: Option<OwnerRecord> = here.record(Side::Source, id).map_err(text)?;
    let (Some(kept), Some(owner)) = (kept, owner) else { return Ok(None) };
    let is_whole = kept.image == ImageState::AsOfWatermark && kept.sealed.is_empty();
    let is_confirmed = kept.watermark.is_some_and(|at| {
        owner.life == at.life && owner.acknowledged.is_some_and(|acknowledged| acknowledged <= at.epoch)
    });
    Ok((is_whole && is_confirmed).then_some(kept))
}

/// Makes what the keeper has left an export.
fn finish(
    partial: Partial,
    config: &CopyConfig,
    name: String,
    there: &Book,
    here: &Book,
    exporting: &Exporting,
) -> Result<(), String> {
    let kept =
        state_of(there, here, &config.id)?.ok_or("guests have written too much meanwhile: try again")?;
    let at = kept.watermark.ok_or("there is no state of one moment")?;
    let life = format!("{:032x}", at.life.0);
    let manifest = Manifest::new(config.id.clone(), name, life, at.epoch.0, kept.as_of_ms);
    let images = super::copy::folder_of(&partial.path(), &config.id);
    let volumes = config.volumes.iter().map(|volume| (volume.volume.clone(), volume.name.clone())).collect();
    let go_on = |hashed: u64| {
        lock(&exporting.shown).bytes_hashed = hashed;
        !exporting.is_cancelled.load(Ordering::Relaxed)
    };
    partial.finish(&images, manifest, volumes, &go_on).map_err(|error| error.to_string())
}
