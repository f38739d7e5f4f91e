//! At a former owner: images that were given up become the standby of the volumes that were promoted from its own standby.
//!
//! ```text
//!   Ask::Return ─► what do the images lack? (standby::reprotection) ─► room? ─► ordered, durable ─► a task:
//!        what only this host has is kept ─► images moved into the standby's folder ─► record, configuration ─► it receives
//! ```
//! Each step may be repeated: a restart goes on with the one that was not noted as done.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use block::held::open_regular;
use bytes::Bytes;
use chronicle::{BlockCount, BlockIndex, LayeredBitmap};
use lane::capture::BLOCK_BYTES;
use migration::HostId;
use migration::custody::{Owner, Word};
use standby::receiver::Image;
use standby::record::StandbyRecord;
use standby::reprotection::{self, Because, Former, Lacking, Stage, Step, standby_record};
use standby::{LifeId, StandbyId, VolumeIndex};
use tokio::sync::oneshot;
use tokio::time::sleep;

use super::book::{
    Book, CopiedVolume, CopyConfig, FormerGroup, FormerVolume, Keep, KeptDivergence, Look, Noted,
    ReturnOrder, Side, hex, parse,
};
use super::copy::Input;
use super::copy::divergence::{self, look_of};
use super::frames::{Answered, AskedReturn, Line, is_about};
use super::making::{POINTS_MAX, check};
use super::source::host_of;
use super::{Standbys, folder_in, lock};
use crate::custody::Custody;
use crate::error::{RequestError, StandbyError};
use crate::host::blocking;
use crate::stores::Stores;
use crate::volumes::orders::create::random_bytes;

/// The time before a step that has failed is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// The greatest number of runs in one answer.
const RUNS_MAX: usize = 3000;

/// What the steps work with.
#[derive(Clone)]
struct Means {
    book: Book,
    stores: Arc<Stores>,
    custody: Custody,
}

impl Standbys {
    /// Takes the order of the host that has promoted a standby to make the images that were given up here its standby.
    pub(super) async fn return_to(
        self: &Arc<Self>,
        peer: HostId,
        line: &Line,
        order: AskedReturn,
    ) -> Result<Answered, RequestError> {
        let invalid = |text: &str| RequestError::Invalid(text.to_owned());
        if !is_about(line.channel, order.asked.standby, peer, self.peers.own()) || !self.hosts.is_paired(peer)
        {
            return Err(invalid(
                "the standby's identity is not that of its channel, or the hosts are not paired",
            ));
        }
        check(&order.asked)?;
        if let Some(kept) = self.kept_for(peer, line) {
            let store = kept.config.store.clone();
            return Ok(Answered::Returning { store, is_ready: true, problem: None });
        }
        let id = hex(order.promoted.standby);
        let asked = id.clone();
        let noted = self.on_book(move |book| book.former(&asked)).await?;
        let Some(former) = noted.filter(|former| host_of(&former.host) == peer) else {
            let is_source = lock(&self.sources).contains_key(&order.promoted.standby);
            return Err(RequestError::Standby(match is_source {
                true => StandbyError::NotGivenUp(order.asked.name),
                false => StandbyError::NothingGivenUp,
            }));
        };
        let has_volumes = |volume: &FormerVolume| self.has_volume(&volume.volume);
        if former.volumes.iter().any(has_volumes) {
            return Err(StandbyError::NotGivenUp(former.name).into());
        }
        let order = match former.order.clone() {
            Some(known) if known.standby == hex(order.asked.standby) => known,
            Some(_) => return Err(invalid("another standby was ordered for these images")),
            None => {
                self.draining.refuse_new()?;
                let known = self.order_return(former, order).await?;
                tokio::spawn(Arc::clone(self).carry_return_out(id));
                known
            }
        };
        let is_ready = order.stage == Stage::Ready;
        Ok(Answered::Returning { store: order.store, is_ready, problem: order.problem })
    }

    /// Decides what the images lack, and makes the order durable.
    async fn order_return(
        &self,
        former: FormerGroup,
        order: AskedReturn,
    ) -> Result<ReturnOrder, RequestError> {
        for volume in &order.asked.volumes {
            if self.volumes.service(&volume.name).is_some() {
                return Err(RequestError::VolumeExists(volume.name.clone()));
            }
        }
        let suggested = former.volumes.first().map(|volume| volume.store.as_str());
        let store = self.stores.choose(suggested.filter(|store| folder_in(&self.stores, store).is_ok()))?;
        store.require_writable()?;
        let store = store.name().to_owned();
        let _changing = self.formers.lock().await;
        let (book, stores) = (self.book()?.clone(), Arc::clone(&self.stores));
        blocking(move || {
            let failed = |error: io::Error| StandbyError::Record(error.to_string());
            let lacking = lacking(&book, &former, &order).map_err(failed)?;
            let everything = match &lacking {
                Lacking::These(written) => {
                    require_room(&stores, &former, written)?;
                    None
                }
                Lacking::Everything(because) => Some(*because),
            };
            let known = return_order(order, store, everything);
            let former = FormerGroup { order: Some(known.clone()), ..former };
            book.write_former(&former).map_err(failed)?;
            tracing::warn!(group = %former.name, ?everything, "images that were given up become a standby of the host that has promoted it");
            Ok(known)
        })
        .await
    }

    /// Goes on with orders that a restart has interrupted.
    pub(super) fn resume_returns(self: &Arc<Self>) {
        let Ok(formers) = self.book().map(Book::formers) else { return };
        match formers {
            Ok((formers, damaged)) => {
                self.report(damaged);
                for former in formers {
                    if former.order.is_some_and(|order| order.stage != Stage::Ready) {
                        tokio::spawn(Arc::clone(self).carry_return_out(former.id));
                    }
                }
            }
            Err(error) => tracing::error!(%error, "it is not known which volumes were given up here"),
        }
        let this = Arc::clone(self);
        tokio::spawn(async move {
            this.claim_given_up().await;
            this.forget_done_formers().await;
        });
    }

    /// Takes all steps. One that fails is tried again, and its reason is shown.
    async fn carry_return_out(self: Arc<Self>, id: String) {
        loop {
            match self.take_step(&id).await {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    let problem = error.message();
                    tracing::warn!(group = %id, error = problem, "images that were given up are no standby yet; it is tried again");
                    self.note_problem(&id, problem).await;
                    tokio::select! {
                        () = self.stopping.begins() => return,
                        () = sleep(RETRY) => {}
                    }
                }
            }
        }
    }

    /// Takes the next step; returns whether there was one.
    async fn take_step(self: &Arc<Self>, id: &str) -> Result<bool, RequestError> {
        let _changing = self.formers.lock().await;
        let asked = id.to_owned();
        let Some(mut former) = self.on_book(move |book| book.former(&asked)).await? else { return Ok(false) };
        let Some((step, stage)) = former.order.as_ref().and_then(|order| order.stage.next()) else {
            return Ok(false);
        };
        let means = Means {
            book: self.book()?.clone(),
            stores: Arc::clone(&self.stores),
            custody: self.custody.clone(),
        };
        let (used, config) =
            (means.clone(), former.order.as_ref().map(|order| config_of(order, &former.host)));
        former = blocking(move || {
            match step {
                Step::KeepDivergence => keep_divergence(&used, &mut former)?,
                Step::TakeImages => take_images(&used, &mut former)?,
                Step::Record => record_standby(&used, &former)?,
            }
            Ok(former)
        })
        .await?;
        if let (Step::Record, Some(config)) = (step, config) {
            let is_kept = parse(&config.id).is_some_and(|standby| lock(&self.copies).contains_key(&standby));
            if !is_kept {
                self.keep(config)?;
            }
        }
        if let Some(order) = &mut former.order {
            order.stage = stage;
            order.problem = None;
        }
        self.on_book(move |book| book.write_former(&former)).await?;
        Ok(true)
    }

    async fn note_problem(&self, id: &str, problem: String) {
        let (_changing, id) = (self.formers.lock().await, id.to_owned());
        let noted = self.on_book(move |book| {
            let Some(mut former) = book.former(&id)? else { return Ok(()) };
            if let Some(order) = &mut former.order {
                order.problem = Some(problem);
            }
            book.write_former(&former)
        });
        if let Err(error) = noted.await {
            tracing::debug!(error = %error.message(), "the reason is not noted");
        }
    }

    /// Tells the new owner what the images lack of a volume.
    pub(super) async fn tell_lacking(
        &self,
        peer: HostId,
        line: &Line,
        volume: u16,
        from: u64,
    ) -> Result<Answered, RequestError> {
        let everything = Answered::Lacking { runs: None, next: None };
        let own = self.peers.own();
        let channel = line.channel;
        let standby_of = |former: &FormerGroup| {
            let order = former.order.as_ref()?;
            let standby = parse(&order.standby)?;
            (host_of(&former.host) == peer && is_about(channel, standby, peer, own)).then(|| order.clone())
        };
        let formers = self.on_book(|book| Ok(book.formers()?.0)).await?;
        let found = formers.iter().find_map(|former| Some((former.id.clone(), standby_of(former)?)));
        let Some((id, order)) = found else { return Ok(everything) };
        if order.everything.is_some() {
            return Ok(everything);
        }
        let written = self.on_book(move |book| book.written(&id, usize::from(volume))).await?;
        Ok(written.map_or(everything, |written| runs_from(&written.set(), from)))
    }

    /// Tells the new owner which blocks of a volume have the contents that it names.
    pub(super) async fn compare(
        &self,
        peer: HostId,
        line: &Line,
        volume: u16,
        first: u64,
        hashes: &[u8],
    ) -> Result<Answered, RequestError> {
        let kept = self.kept_for(peer, line).ok_or(StandbyError::NothingGivenUp)?;
        let (answer, answered) = oneshot::channel();
        let (volume, hashes) = (VolumeIndex(volume), Bytes::copy_from_slice(hashes));
        kept.copy.give(Input::Compare { volume, first, hashes, answer });
        let ended = || RequestError::Internal("a keeper has ended".to_owned());
        let same = answered.await.map_err(|_| ended())?;
        Ok(Answered::Same(same.map_err(|error| RequestError::Invalid(error.to_string()))?))
    }
}

fn lacking(book: &Book, former: &FormerGroup, order: &AskedReturn) -> io::Result<Lacking> {
    let mut written: Option<Vec<LayeredBitmap>> = Some(Vec::new());
    for volume in 0..former.volumes.len() {
        match (&mut written, book.written(&former.id, volume)?) {
            (Some(written), Some(of_volume)) => written.push(of_volume.set()),
            _ => written = None,
        }
    }
    let stores: Vec<&String> = former.volumes.iter().map(|volume| &volume.store).collect();
    let is_suitable = former.volumes.iter().all(|volume| volume.is_plain)
        && stores.windows(2).all(|pair| pair[0] == pair[1]);
    let is_left = |volume: &FormerVolume| is_as_left(volume, Path::new(&volume.image));
    let image = if former.volumes.iter().all(is_left) { Image::AsLeft } else { Image::Touched };
    let record = book.former_record(&former.id)?;
    let sizes: Vec<_> =
        order.asked.volumes.iter().map(|volume| BlockCount(volume.size_bytes / BLOCK_BYTES)).collect();
    let former = Former { record, written, image, is_suitable };
    Ok(reprotection::lacking(&former, order.promoted, &sizes))
}

/// Returns whether the image at a path is as it was given up.
fn is_as_left(volume: &FormerVolume, path: &Path) -> bool {
    let look = open_regular(path).and_then(|image| look_of(&image)).ok();
    volume.look.is_some() && look == volume.look
}

/// Returns whether it has the content that it had. A name that was changed since does not count.
fn is_same_content(volume: &FormerVolume, look: &Look) -> bool {
    volume.look.as_ref().is_some_and(|known| {
        (known.inode, known.size_bytes, known.mtime) == (look.inode, look.size_bytes, look.mtime)
    })
}

/// Refuses the order if what only this host has cannot be kept.
fn require_room(
    stores: &Stores,
    former: &FormerGroup,
    written: &[LayeredBitmap],
) -> Result<(), RequestError> {
    for (volume, written) in former.volumes.iter().zip(written) {
        if volume.kept != KeptDivergence::InImage || written.is_empty() {
            continue;
        }
        let store = folder_in(stores, &volume.store).map_err(RequestError::Invalid)?;
        let looked = open_regular(Path::new(&volume.image))
            .and_then(|image| divergence::room_for(&store, &former.id, &image, written));
        let (bytes, has_room) =
            looked.map_err(|error| RequestError::storage("look at", Path::new(&volume.image), &error))?;
        if !has_room {
            let (store, volume) = (volume.store.clone(), volume.name.clone());
            return Err(StandbyError::NoRoomForDivergence { volume, store, bytes }.into());
        }
    }
    Ok(())
}

fn return_order(order: AskedReturn, store: String, everything: Option<Because>) -> ReturnOrder {
    let AskedReturn { asked, life, .. } = order;
    let copied = asked.volumes.into_iter().map(|volume| CopiedVolume {
        volume: migration::VolumeId(volume.volume).to_string(),
        name: volume.name,
        size_bytes: volume.size_bytes,
        promoted: format!("{:032x}", u128::from_le_bytes(random_bytes())),
    });
    ReturnOrder {
        standby: hex(asked.standby),
        life: format!("{:032x}", life.0),
        name: asked.name,
        store,
        keep: Keep {
            last: asked.keep.last.min(POINTS_MAX),
            hourly: asked.keep.hourly.min(POINTS_MAX),
            daily: asked.keep.daily.min(POINTS_MAX),
        },
        volumes: copied.collect(),
        stage: Stage::Ordered,
        everything,
        problem: None,
    }
}

fn config_of(order: &ReturnOrder, host: &str) -> CopyConfig {
    CopyConfig {
        id: order.standby.clone(),
        name: order.name.clone(),
        store: order.store.clone(),
        volumes: order.volumes.clone(),
        keep: order.keep,
        noted: Noted::of(host.to_owned()),
        is_removed: false,
        is_yielded: false,
    }
}

/// Keeps what only this host has of each volume. Blocks.
fn keep_divergence(means: &Means, former: &mut FormerGroup) -> Result<(), RequestError> {
    let everything = former.order.as_ref().and_then(|order| order.everything);
    for index in 0..former.volumes.len() {
        let volume = &former.volumes[index];
        if volume.kept != KeptDivergence::InImage {
            continue;
        }
        let path = PathBuf::from(&volume.image);
        let failed =
            |error: io::Error| RequestError::storage("keep what only this host has of", &path, &error);
        if everything.is_some() {
            former.volumes[index].kept = set_aside(means, &former.id, volume)?;
        } else {
            let written = means.book.written(&former.id, index).map_err(failed)?;
            let all = || LayeredBitmap::full(BlockCount(volume.size_bytes.div_ceil(BLOCK_BYTES)));
            let written = written.map_or_else(all, |written| written.set());
            let image = open_regular(&path).map_err(failed)?;
            let store = folder_in(&means.stores, &volume.store).map_err(RequestError::Invalid)?;
            former.volumes[index].kept = match written.is_empty() {
                true => KeptDivergence::Dropped,
                false => divergence::keep(&store, &former.id, index, &image, &written).map_err(failed)?,
            };
        }
        means.book.write_former(former).map_err(|error| StandbyError::Record(error.to_string()))?;
    }
    Ok(())
}

/// Gives an image that everything is copied for another name, so that its own is free. One that is in no store stays where it is.
fn set_aside(means: &Means, id: &str, volume: &FormerVolume) -> Result<KeptDivergence, RequestError> {
    if !volume.is_plain {
        return Ok(KeptDivergence::InImage);
    }
    let digits = id.get(..8).unwrap_or(id);
    let (from, to) =
        (PathBuf::from(&volume.image), PathBuf::from(format!("{}.diverged-{digits}", volume.image)));
    means.custody.rename(&from, &to, &Owner::Administrator(Word::Plain))?;
    match to.try_exists() {
        Ok(true) => Ok(KeptDivergence::Aside(to.display().to_string())),
        // **N.B.** Its file system may not be mounted, or somebody has given it another name.
        Ok(false) => {
            let text = format!(
                "it is not there: mount its store; or, if nothing of it is needed: sterna volume divergence drop {}",
                volume.name
            );
            Err(RequestError::storage("find", &from, &io::Error::new(io::ErrorKind::NotFound, text)))
        }
        Err(error) => Err(RequestError::storage("look at", &to, &error)),
    }
}

/// Moves the images into the folder of the standby, if it is known what they lack. Blocks.
fn take_images(means: &Means, former: &mut FormerGroup) -> Result<(), RequestError> {
    let Some(order) = former.order.clone() else { return Ok(()) };
    if order.everything.is_some() {
        return free_names(means, former);
    }
    let store = folder_in(&means.stores, &order.store).map_err(RequestError::Invalid)?;
    for (index, (volume, copied)) in former.volumes.clone().iter().zip(&order.volumes).enumerate() {
        let path = Path::new(&volume.image);
        let failed = |error: io::Error| RequestError::storage("move", path, &error);
        if divergence::is_taken(&store, &order.standby, index).map_err(failed)? {
            continue;
        }
        let staged =
            PathBuf::from(format!("{}.returns-{}", volume.image, order.standby.get(..8).unwrap_or("")));
        let is_staged = staged.try_exists().map_err(failed)?;
        let image = open_regular(if is_staged { &staged } else { path }).map_err(failed)?;
        let look = look_of(&image).map_err(failed)?;
        if !is_same_content(volume, &look) {
            return distrust(means, former);
        }
        if !is_staged {
            let owner = Owner::Administrator(Word::Plain);
            means.custody.rename_this(path, &image, &staged, &owner)?;
        }
        let size = BlockCount(copied.size_bytes / BLOCK_BYTES);
        divergence::take(&store, &order.standby, index, &staged, &look, size).map_err(failed)?;
        means.custody.forget(&staged)?;
    }
    Ok(())
}

/// Notes that an image has changed since it was given up: everything is copied, and the image is kept as a whole.
fn distrust(means: &Means, former: &mut FormerGroup) -> Result<(), RequestError> {
    if let Some(order) = &mut former.order {
        order.everything = Some(Because::Touched);
    }
    let record = |former: &FormerGroup| {
        means.book.write_former(former).map_err(|error| StandbyError::Record(error.to_string()))
    };
    record(former)?;
    free_names(means, former)
}

/// Frees the names of images for which everything is copied. Blocks.
fn free_names(means: &Means, former: &mut FormerGroup) -> Result<(), RequestError> {
    for index in 0..former.volumes.len() {
        let volume = &former.volumes[index];
        let is_there = Path::new(&volume.image).try_exists().unwrap_or(true);
        if volume.is_plain && is_there && !matches!(volume.kept, KeptDivergence::Aside(_)) {
            // N.B. Also one that was released: deleting it is for an administrator.
            former.volumes[index].kept = set_aside(means, &former.id, volume)?;
        }
    }
    Ok(())
}

/// Makes the records of the standby durable. Blocks.
fn record_standby(means: &Means, former: &FormerGroup) -> Result<(), RequestError> {
    let failed = |error: io::Error| StandbyError::Record(error.to_string());
    let Some(order) = &former.order else { return Ok(()) };
    let config = config_of(order, &former.host);
    let life = u128::from_str_radix(&order.life, 16).unwrap_or_default();
    let standby = parse(&order.standby).unwrap_or(StandbyId(0));
    let known: Option<StandbyRecord> = means.book.record(Side::Copy, &config.id).map_err(failed)?;
    if order.everything.is_none() && known.is_none() {
        // N.B. Before the configuration: without a record the standby lacks everything.
        let record = standby_record(standby, LifeId(life));
        means.book.write_record(Side::Copy, &config.id, &record).map_err(failed)?;
    }
    means.book.add_config(Side::Copy, &config.id, &config).map_err(failed)?;
    Ok(())
}

/// Returns an answer with the runs of a set from a block on.
fn runs_from(set: &LayeredBitmap, from: u64) -> Answered {
    let (mut runs, mut next) = (Vec::new(), from);
    while let Some(run) = set.next_run(BlockIndex(next), u64::MAX) {
        if runs.len() == RUNS_MAX {
            return Answered::Lacking { runs: Some(runs), next: Some(next) };
        }
        runs.push((run.start.0, run.len()));
        next = run.end.0;
    }
    Answered::Lacking { runs: Some(runs), next: None }
}

#[cfg(test)]
mod tests {
    use chronicle::BlockRange;

    use super::*;

    #[test]
    fn all_runs_are_told_in_some_answers() {
        let mut set = LayeredBitmap::new(BlockCount(1 << 20));
        (0..2 * RUNS_MAX as u64 + 5).for_each(|run| {
            set.insert(BlockRange::new(3 * run, 3 * run + 2));
        });
        let (mut told, mut from, mut answers) = (LayeredBitmap::new(set.blocks()), Some(0), 0);
        while let Some(start) = from {
            let Answered::Lacking { runs: Some(runs), next } = runs_from(&set, start) else { panic!("runs") };
            runs.iter().for_each(|(start, count)| {
                told.insert(BlockRange::new(*start, start + count));
            });
            (from, answers) = (next, answers + 1);
        }
        assert_eq!((told, answers), (set, 3));
    }
}
