//! Groups that were given up here after a promotion: what only this host has of them is listed, exported, and dropped by name.
//!
//! ```text
//!   yield ─► noted: record, blocks written, look of the image ─► volumes forgotten ─► listed: in the image
//!                      the other host turns the direction round (`returning`) ─► kept beside it ─► dropped by name
//! ```

use std::io;
use std::path::Path;
use std::sync::Arc;

use block::held::open_regular;
use chronicle::{BlockSize, Generation, LayeredBitmap, MarkPolicy, ReplicaOf, StayId};
use lane::capture::BLOCK_BYTES;
use migration::StayKey;
use migration::custody::{Owner, Word};
use migration::journal::{ImageFormat, Place, VolumeRecord};
use migration::stay::{Beginning, Stay};
use standby::record::{OwnerRecord, Written};
use standby::reprotection::Stage;

use super::book::{Book, FormerGroup, FormerVolume, KeptDivergence, ReturnOrder, Side};
use super::copy::divergence::{self, Piece, look_of};
use super::source::run::copy_of;
use super::source::{Source, host_of};
use super::{Standbys, folder_in};
use crate::custody::GivenUp;
use crate::error::{RequestError, StandbyError};
use crate::host::blocking;
use crate::journal::now_unix_ms;
use crate::stores::StoreKind;
use crate::volumes::chronicles::Chronicles;

/// So many digits of a group's identity tell its divergences from others of their name.
const TWIN_DIGITS: usize = 6;

/// A divergence: a volume of a group that was given up.
pub(super) struct Divergence {
    pub(super) former: FormerGroup,
    pub(super) volume: usize,
}

impl Divergence {
    pub(super) fn of(&self) -> &FormerVolume {
        &self.former.volumes[self.volume]
    }
}

impl Standbys {
    /// Notes that the volumes of a source are about to be given up. An order that is given again finds what was noted before.
    pub(super) async fn begin_former(&self, source: &Source) -> Result<FormerGroup, RequestError> {
        let config = source.config();
        let volumes = config.volumes.iter().map(|known| {
            let record = self.journal.read(|state| {
                let here = state.volumes.values().find(|here| here.record.volume.to_string() == known.volume);
                here.map(|here| here.record.clone())
            });
            match record {
                Some(record) => self.former_volume(&record),
                None => FormerVolume {
                    volume: known.volume.clone(),
                    name: known.name.clone(),
                    size_bytes: 0,
                    store: String::new(),
                    image: String::new(),
                    is_plain: false,
                    look: None,
                    kept: KeptDivergence::Dropped,
                },
            }
        });
        let former = FormerGroup {
            id: config.id.clone(),
            name: config.name,
            host: config.host,
            given_up_unix_ms: now_unix_ms(),
            volumes: volumes.collect(),
            order: None,
        };
        let _changing = self.formers.lock().await;
        self.on_book(move |book| {
            if let Some(noted) = book.former(&former.id)? {
                return Ok(noted);
            }
            // Without it the images are copied again as a whole.
            if let Ok(Some(record)) = book.record::<OwnerRecord>(Side::Source, &former.id) {
                book.write_former_record(&former.id, &record)?;
            }
            book.write_former(&former)?;
            Ok(former)
        })
        .await
    }

    /// Tells the custody of images which are those of volumes that were given up here, and have not become a standby since.
    pub(super) async fn claim_given_up(&self) {
        let formers = match self.all_formers().await {
            Ok(formers) => formers,
            Err(error) => {
                tracing::warn!(error = %error.message(), "it is not known which images belong to volumes that were given up");
                return;
            }
        };
        let is_ready = |order: &ReturnOrder| order.stage == Stage::Ready;
        let waiting = formers.iter().filter(|former| !former.order.as_ref().is_some_and(is_ready));
        let images = waiting.flat_map(|former| {
            let host = self.hosts.name_of(host_of(&former.host));
            let kept = former.volumes.iter().filter(|volume| volume.kept == KeptDivergence::InImage);
            kept.map(move |volume| {
                (volume.image.clone().into(), GivenUp { volume: volume.name.clone(), host: host.clone() })
            })
        });
        self.custody.set_given_up(images.collect());
    }

    fn former_volume(&self, record: &VolumeRecord) -> FormerVolume {
        let is_in_folder = self
            .stores
            .get(&record.image.store)
            .is_ok_and(|store| matches!(store.kind(), StoreKind::Folder { .. }));
        let is_file = matches!(record.image.place, Place::File(_));
        let is_plain =
            is_in_folder && is_file && record.image.format == ImageFormat::Raw && !record.image.is_adopted();
        FormerVolume {
            volume: record.volume.to_string(),
            name: record.name.clone(),
            size_bytes: record.size_bytes,
            store: record.image.store.clone(),
            image: record.image.place.name().to_owned(),
            is_plain,
            look: None,
            kept: KeptDivergence::InImage,
        }
    }

    /// Notes what was written to a volume that is served no more and that nobody may have received. A failure costs a whole copy.
    pub(super) async fn note_former(self: &Arc<Self>, source: &Source, record: VolumeRecord, stay: StayId) {
        let (id, of) = (source.config().id, copy_of(source.standby(), source.host()));
        let (chronicles, volume) = (self.chronicles.clone(), self.former_volume(&record));
        let name = record.name.clone();
        // N.B. What an incomplete image lacks is in no chronicle.
        let is_complete = self.journal.read(|state| !state.fillings.contains_key(&record.volume));
        let _changing = self.formers.lock().await;
        let noted = self.on_book(move |book| {
            let written = written(&chronicles, &record, stay, of)?;
            let Some(mut former) = book.former(&id)? else { return Ok(()) };
            let Some(index) = former.volumes.iter().position(|known| known.volume == volume.volume) else {
                return Ok(());
            };
            if let Some(written) = written.filter(|_| is_complete) {
                book.note_written(&id, index, &Written::of(&written))?;
            }
            let look = open_regular(Path::new(&volume.image)).and_then(|image| look_of(&image)).ok();
            former.volumes[index] = FormerVolume { look: look.filter(|_| volume.is_plain), ..volume };
            book.write_former(&former)
        });
        if let Err(error) = noted.await {
            tracing::warn!(volume = %name, error = %error.message(), "it is not noted what only this host has of the volume: if its image \
                becomes a standby, everything is copied");
        }
    }

    /// Returns which groups that were given up are no standby yet, although that was ordered, and why.
    pub(super) fn stuck_returns(&self) -> Vec<(String, String)> {
        let formers = self.book().ok().and_then(|book| book.formers().ok());
        let formers = formers.map(|(formers, _)| formers).unwrap_or_default();
        let stuck = |former: FormerGroup| {
            let problem = former.order?.problem?;
            Some((former.name, format!("its images are no standby of the other host yet: {problem}")))
        };
        formers.into_iter().filter_map(stuck).collect()
    }

    /// Lists what only this host has of volumes that were given up.
    pub(crate) async fn divergences(self: Arc<Self>) -> Result<Vec<api::Divergence>, RequestError> {
        let formers = self.all_formers().await?;
        let all = divergences(&formers);
        let views = all.iter().map(|found| async {
            let (id, volume, kept) = (found.former.id.clone(), found.volume, found.of().kept.clone());
            let bytes = self.on_book(move |book| match kept {
                KeptDivergence::Blocks(bytes) => Ok(Some(bytes)),
                // All of it counts, and how much that is was not looked at.
                KeptDivergence::Aside(_) => Ok(None),
                _ => Ok(book.written(&id, volume)?.map(|written| written.set().count() * BLOCK_BYTES)),
            });
            Ok(self.view_divergence(&formers, found, bytes.await?))
        });
        futures_util::future::try_join_all(views).await
    }

    fn view_divergence(
        &self,
        formers: &[FormerGroup],
        found: &Divergence,
        bytes: Option<u64>,
    ) -> api::Divergence {
        let volume = found.of();
        let (state, image) = match &volume.kept {
            KeptDivergence::InImage => (api::DivergenceState::InImage, Some(volume.image.clone())),
            KeptDivergence::Aside(path) => (api::DivergenceState::InImage, Some(path.clone())),
            _ => (api::DivergenceState::Kept, None),
        };
        let problem = found.former.order.as_ref().and_then(|order| order.problem.clone());
        api::Divergence {
            name: name_of(formers, found),
            volume: volume.name.clone(),
            host: self.hosts.name_of(host_of(&found.former.host)),
            state,
            image,
            size_bytes: volume.size_bytes,
            bytes,
            given_up_unix_ms: found.former.given_up_unix_ms,
            reason: problem,
        }
    }

    /// Returns the next piece of a divergence, from a position on that the piece before has named; zero at first.
    pub(crate) async fn divergence_piece(
        self: Arc<Self>,
        name: String,
        from: u64,
    ) -> Result<api::DivergencePiece, RequestError> {
        let found = self.find_divergence(&name).await?;
        let size_bytes = found.of().size_bytes;
        let store = folder_in(&self.stores, &found.of().store).ok();
        let piece = self.on_book(move |book| piece(book, store.as_deref(), &found, from)).await;
        let piece = piece.map_err(|error| StandbyError::NotExported { name, reason: error.message() })?;
        let extent = piece.as_ref().map(|piece| api::DivergenceExtent {
            offset: piece.offset,
            length: piece.length,
            content: piece.content.as_deref().map(hexadecimal),
        });
        Ok(api::DivergencePiece { size_bytes, extent, next: piece.and_then(|piece| piece.next) })
    }

    /// Releases a divergence: what is kept of it is deleted. An image that was given up, and is no standby's yet, stays a file.
    pub(crate) async fn drop_divergence(
        self: Arc<Self>,
        name: String,
    ) -> Result<api::Divergence, RequestError> {
        let Ok(_changing) = self.formers.try_lock() else {
            return Err(StandbyError::DivergenceBusy(name).into());
        };
        let formers = self.all_formers().await?;
        let found = find_in(&formers, &name)?;
        let shown = self.view_divergence(&formers, &found, None);
        let (custody, store) = (self.custody.clone(), folder_in(&self.stores, &found.of().store).ok());
        let Divergence { mut former, volume } = found;
        if let KeptDivergence::Aside(path) = former.volumes[volume].kept.clone() {
            let owner = Owner::Administrator(Word::Plain);
            blocking(move || Ok(custody.delete(Path::new(&path), &owner)?)).await?;
        }
        former.volumes[volume].kept = KeptDivergence::Dropped;
        self.on_book(move |book| {
            // N.B. It is released by name from here on; files that a failure leaves go with the folder.
            book.write_former(&former)?;
            if let Some(store) = store {
                divergence::drop_kept(&store, &former.id, volume)?;
            }
            Ok(())
        })
        .await?;
        self.forget_done_formers().await;
        self.claim_given_up().await;
        tracing::info!(divergence = %name, "what only this host had of a volume is released");
        Ok(shown)
    }

    /// Forgets groups of which nothing is needed any more.
    pub(super) async fn forget_done_formers(&self) {
        let stores = Arc::clone(&self.stores);
        let copies: Vec<String> =
            super::lock(&self.copies).values().map(|kept| kept.config.id.clone()).collect();
        let forgotten = self.on_book(move |book| {
            for former in book.formers()?.0 {
                let Some(order) = former.order.as_ref().filter(|_| former.is_done()) else { continue };
                // N.B. Until the first epoch the new owner asks what the images lack.
                let record = book.record::<standby::record::StandbyRecord>(Side::Copy, &order.standby);
                let has_begun = record.ok().flatten().and_then(|record| record.watermark);
                let needs = has_begun.is_none_or(|at| at.epoch == standby::reprotection::BASE);
                if needs && copies.contains(&order.standby) && order.everything.is_none() {
                    continue;
                }
                for volume in &former.volumes {
                    if let Ok(store) = folder_in(&stores, &volume.store) {
                        // A folder that is gone is as good.
                        let _ = divergence::drop_all(&store, &former.id);
                    }
                }
                book.forget_former(&former)?;
            }
            Ok(())
        });
        if let Err(error) = forgotten.await {
            tracing::warn!(error = %error.message(), "groups that were given up are not forgotten yet");
        }
    }

    /// Returns the groups that were given up here, the oldest first.
    async fn all_formers(&self) -> Result<Vec<FormerGroup>, RequestError> {
        let mut formers = self.on_book(|book| Ok(book.formers()?.0)).await?;
        formers.sort_by_key(|former| (former.given_up_unix_ms, former.id.clone()));
        Ok(formers)
    }

    async fn find_divergence(&self, name: &str) -> Result<Divergence, RequestError> {
        find_in(&self.all_formers().await?, name)
    }
}

/// Returns the blocks that a volume's chronicle knows a standby to lack; `None`: it is not known. The volume is not served.
fn written(
    chronicles: &Chronicles,
    record: &VolumeRecord,
    stay: StayId,
    of: ReplicaOf,
) -> io::Result<Option<LayeredBitmap>> {
    let block_size = BlockSize::new(record.block_size_bytes).map_err(io::Error::other)?;
    let kept = chronicles.open_stay(StayKey { volume: record.volume, stay }, &record.image)?;
    let size_bytes = record.size_bytes;
    let regions = MarkPolicy::regions_for(block_size, size_bytes);
    let is_of_blocks = block_size.bytes() == BLOCK_BYTES;
    let stay = Stay::resume(Beginning { id: stay, block_size, size_bytes, regions }, kept);
    Ok(stay.lacking(of, Generation(0)).filter(|_| is_of_blocks))
}

/// Returns the next piece of a divergence.
fn piece(book: &Book, store: Option<&Path>, found: &Divergence, from: u64) -> io::Result<Option<Piece>> {
    let (id, index, volume) = (found.former.id.as_str(), found.volume, found.of());
    let written = || Ok::<_, io::Error>(book.written(id, index)?.map(|written| written.set()));
    let of_image =
        |path: &str| divergence::piece_of_image(&open_regular(Path::new(path))?, written()?.as_ref(), from);
    let store = || store.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "its store is not there"));
    match &volume.kept {
        KeptDivergence::InImage if !volume.is_plain => {
            let text = format!("its image is no raw file: look at it with other programs: {}", volume.image);
            Err(io::Error::new(io::ErrorKind::Unsupported, text))
        }
        KeptDivergence::InImage => of_image(&volume.image),
        // It has more than was recorded: it was changed, or the promoted state is an older one.
        KeptDivergence::Aside(path) => {
            divergence::piece_of_image(&open_regular(Path::new(path))?, None, from)
        }
        KeptDivergence::Clone => {
            let whole = divergence::whole(store()?, id, index)?;
            divergence::piece_of_image(&whole, written()?.as_ref(), from)
        }
        KeptDivergence::Blocks(_) => divergence::piece_of_blocks(store()?, id, index, from),
        KeptDivergence::Dropped => Ok(None),
    }
}

/// Returns all divergences that are not released.
fn divergences(formers: &[FormerGroup]) -> Vec<Divergence> {
    let of_group = |former: &FormerGroup| {
        let kept = former.volumes.iter().enumerate().filter(|(_, of)| of.kept != KeptDivergence::Dropped);
        kept.map(|(volume, _)| Divergence { former: former.clone(), volume }).collect::<Vec<_>>()
    };
    formers.iter().flat_map(of_group).collect()
}

/// Returns the name of a divergence: that of its volume. One that is not the only one with its name has its group's identity in it.
fn name_of(formers: &[FormerGroup], found: &Divergence) -> String {
    let name = &found.of().name;
    let twins = divergences(formers).iter().filter(|other| other.of().name == *name).count();
    match found.former.id.get(..TWIN_DIGITS).filter(|_| twins > 1) {
        Some(digits) => format!("{name}#{digits}"),
        None => name.clone(),
    }
}

fn find_in(formers: &[FormerGroup], name: &str) -> Result<Divergence, RequestError> {
    let mut found = divergences(formers).into_iter().filter(|found| name_of(formers, found) == name);
    Ok(found.next().ok_or_else(|| StandbyError::NoDivergence(name.to_owned()))?)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn former(id: &str, names: &[(&str, KeptDivergence)]) -> FormerGroup {
        let volumes = names.iter().map(|(name, kept)| FormerVolume {
            volume: String::new(),
            name: (*name).to_owned(),
            size_bytes: 0,
            store: String::new(),
            image: String::new(),
            is_plain: true,
            look: None,
            kept: kept.clone(),
        });
        FormerGroup {
            id: id.to_owned(),
            name: "group".to_owned(),
            host: String::new(),
            given_up_unix_ms: 1,
            volumes: volumes.collect(),
            order: None,
        }
    }

    #[test]
    fn a_divergence_is_called_like_its_volume_unless_there_are_two() {
        let (kept, dropped) = (KeptDivergence::InImage, KeptDivergence::Dropped);
        let one = former("0123456789", &[("v", kept.clone()), ("w", dropped.clone())]);
        let two = former("abcdefabcd", &[("v", kept), ("x", dropped)]);
        let names = |formers: &[FormerGroup]| {
            divergences(formers).iter().map(|found| name_of(formers, found)).collect::<Vec<_>>()
        };
        assert_eq!(names(std::slice::from_ref(&one)), ["v"]);
        assert!(find_in(std::slice::from_ref(&one), "w").is_err(), "it is released");
        let both = [one, two];
        assert_eq!(names(&both), ["v#012345", "v#abcdef"]);
        assert_eq!(find_in(&both, "v#abcdef").unwrap().former.id, "abcdefabcd");
        assert!(find_in(&both, "v").is_err());
    }
}
