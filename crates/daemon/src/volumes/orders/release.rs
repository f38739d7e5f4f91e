//! Frees stores that hold one volume when the administrator does not need their content.

use std::sync::Arc;

use migration::custody::{Owner, Step, Word};
use migration::journal::{ImageFormat, ImageLocation, Record};

use crate::error::RequestError;
use crate::host::{VolumeOrders, blocking};
use crate::stores::StoreKind;

impl VolumeOrders {
    /// Lifts the fence of a store, if there is one. Errors: [`RequestError::StoreNotFound`]; [`RequestError::Invalid`] for a
    /// folder, which has no fence; [`RequestError::Claimed`]: a volume or another host uses the content.
    pub(crate) async fn release_store(self: Arc<Self>, name: String) -> Result<api::Store, RequestError> {
        let StoreKind::Single(place) = self.stores.get(&name)?.kind() else {
            let detail = format!(
                "store \"{name}\" is a folder, which takes any number of volumes; images that were kept there: sterna replica list, and \
                 sterna replica drop VOLUME"
            );
            return Err(RequestError::Invalid(detail));
        };
        let image = ImageLocation { store: name.clone(), place: place.clone(), format: ImageFormat::Raw };
        let custody = self.custody.clone();
        let owner = Owner::Administrator(Word::Plain);
        blocking(move || Ok(custody.check(Step::Release, &owner, &image)?)).await?;
        if self.journal.read(|state| state.reservations.contains_key(place)) {
            self.journal.commit(vec![Record::ReservationLifted { place: place.clone() }]).await?;
            tracing::info!(store = %name, %place, "gave up the image that a migration left");
        }
        Ok(self.views.describe_store(name).await)
    }
}
