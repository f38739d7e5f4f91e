//! A standby that begins with images of its host's store: a disk that was carried over, or a restored backup.

use std::path::PathBuf;
use std::sync::Arc;

use standby::VolumeIndex;
use tokio::sync::oneshot;

use super::copy::Input;
use super::orders::Found;
use super::{Kept, Standbys};
use crate::error::{RequestError, StandbyError};
use crate::host::blocking;

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
        let named = volumes_of(&kept, &order).map_err(refused)?;
        let (orders, store) = (Arc::clone(&self.volume_orders), kept.config.store.clone());
        let files = blocking(move || {
            let paths = named
                .into_iter()
                .map(|(volume, file)| Ok((volume, orders.image_for_standby(&store, &file)?)));
            paths.collect::<Result<Vec<(VolumeIndex, PathBuf)>, RequestError>>()
        })
        .await?;
        let (answer, answered) = oneshot::channel();
        kept.copy.give(Input::Seed { files, answer });
        match answered.await {
            Ok(Ok(())) => Ok(self.view(&found).await),
            Ok(Err(reason)) => Err(refused(reason).into()),
            Err(_) => Err(refused("the daemon ends, or the standby is removed".to_owned()).into()),
        }
    }
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
