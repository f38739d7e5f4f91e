//! A standby that begins with images of its host's store: a disk that was carried over, or a restored backup.

use std::path::PathBuf;
use std::sync::Arc;

use chronicle::Epoch;
use standby::{LifeId, VolumeIndex, Watermark};
use tokio::sync::oneshot;

use super::book::{CopyConfig, parse};
use super::copy::exported::Export;
use super::copy::{Carried, Input};
use super::orders::Found;
use super::{Kept, Standbys};
use crate::error::{RequestError, StandbyError};
use crate::host::{VolumeOrders, blocking};

impl Standbys {
    /// Puts images in the places of those of a standby that is kept here and has no recovery point. Its source sends the difference.
    pub(crate) async fn seed(
        self: Arc<Self>,
        name: String,
        order: api::SeedStandby,
    ) -> Result<api::Standby, RequestError> {
        let _changing = self.changing.lock().await;
        let found = self.find(&name)?;
        let kept = match &found {
            Found::Kept(kept) => Arc::clone(kept),
            Found::Source(source) => {
                return Err(StandbyError::NotThere { name, host: self.hosts.name_of(source.host()) }.into());
            }
        };
        let refused = |reason: String| StandbyError::NotSeeded { name: name.clone(), reason };
        let (orders, store) = (Arc::clone(&self.volume_orders), kept.config.store.clone());
        let (files, exported) = match &order.exported {
            Some(folder) => {
                if !order.images.is_empty() {
                    return Err(refused("name images, or an exported folder".to_owned()).into());
                }
                let (config, folder) = (kept.config.clone(), folder.clone());
                let found = blocking(move || carried(&orders, &config, &folder)).await?;
                let (files, carried) = found.map_err(refused)?;
                (files, Some(carried))
            }
            None => {
                let named = volumes_of(&kept, &order).map_err(refused)?;
                let files = blocking(move || {
                    let paths = named
                        .into_iter()
                        .map(|(volume, file)| Ok((volume, orders.image_for_standby(&store, &file)?)));
                    paths.collect::<Result<Vec<(VolumeIndex, PathBuf)>, RequestError>>()
                });
                (files.await?, None)
            }
        };
        let (answer, answered) = oneshot::channel();
        kept.copy.give(Input::Seed { files, exported, answer });
        match answered.await {
            Ok(Ok(())) => Ok(self.view(&found).await),
            Ok(Err(reason)) => Err(refused(reason).into()),
            Err(_) => Err(refused("the daemon ends, or the standby is removed".to_owned()).into()),
        }
    }
}

/// Opens an exported folder in the folder of a standby's store. Returns its images by the volumes of the standby. Blocks.
fn carried(
    orders: &VolumeOrders,
    config: &CopyConfig,
    folder: &str,
) -> Result<Result<(Vec<(VolumeIndex, PathBuf)>, Carried), String>, RequestError> {
    let path = orders.path_in_store(&config.store, folder)?;
    let export = match Export::open(&path) {
        Ok(export) => export,
        Err(reason) => return Ok(Err(reason)),
    };
    let mut files = Vec::new();
    let mut is_same =
        export.manifest.standby == config.id && export.manifest.volumes.len() == config.volumes.len();
    for exported in &export.manifest.volumes {
        let position = config.volumes.iter().position(|volume| volume.name == exported.name);
        let file = export.path(exported);
        let (Some(position), Some(file)) = (position, file) else {
            return Ok(Err(format!(
                "{folder} has a volume that it does not have: \"{}\"",
                words::clean(&exported.name)
            )));
        };
        let volume = VolumeIndex(position as u16);
        if files.iter().any(|(other, _)| *other == volume) {
            return Ok(Err(format!("{folder} has the volume \"{}\" twice", words::clean(&exported.name))));
        }
        is_same &= config.volumes[position].volume == exported.volume;
        orders.may_become_a_standbys(
            &config.store,
            &format!("{folder}/{}", exported.file),
            &path.join(&exported.file),
        )?;
        files.push((volume, file));
    }
    if files.is_empty() {
        return Ok(Err(format!("{folder} has no volumes")));
    }
    let life = u128::from_str_radix(&export.manifest.life, 16).ok().map(LifeId);
    let standby = parse(&config.id);
    let at = life.zip(standby).filter(|_| is_same);
    let at = at.map(|(life, standby)| Watermark { standby, life, epoch: Epoch(export.manifest.epoch) });
    Ok(Ok((files, Carried { export, at })))
}

/// Returns the files of an order, each with the position of its volume in the group.
fn volumes_of(kept: &Kept, order: &api::SeedStandby) -> Result<Vec<(VolumeIndex, String)>, String> {
    let volumes = &kept.config.volumes;
    let mut named: Vec<(VolumeIndex, String)> = Vec::new();
    for image in &order.images {
        let position = match &image.volume {
            Some(volume) => volumes.iter().position(|known| known.name == *volume),
            None if volumes.len() == 1 => Some(0),
            None => return Err(format!("it has {} volumes: say VOLUME=FILE", volumes.len())),
        };
        let unknown = || format!("it has no volume \"{}\"", image.volume.as_deref().unwrap_or_default());
        let volume = VolumeIndex(position.ok_or_else(unknown)? as u16);
        if named.iter().any(|(other, file)| *other == volume || *file == image.file) {
            return Err("a volume or a file is named twice".to_owned());
        }
        named.push((volume, image.file.clone()));
    }
    if named.is_empty() { Err("no image is named".to_owned()) } else { Ok(named) }
}
