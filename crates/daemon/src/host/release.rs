//! Stores that hold one volume are free again when somebody says that nobody needs what is in them.

use std::sync::Arc;

use migration::journal::Record;

use super::Host;
use crate::error::RequestError;
use crate::stores::StoreKind;

impl Host {
    /// Lifts the fence of a store, if there is one.
    ///
    /// # Errors
    /// [`RequestError::StoreNotFound`]; [`RequestError::Invalid`] for a folder, in which nothing is fenced.
    pub(crate) async fn release_store(self: Arc<Self>, name: String) -> Result<api::Store, RequestError> {
        let StoreKind::Single(place) = self.stores.get(&name)?.kind() else {
            let detail = format!(
                "store \"{name}\" is a folder, which takes any number of volumes; images that were kept there: sterna replica list, and \
                 sterna replica drop VOLUME"
            );
            return Err(RequestError::Invalid(detail));
        };
        if self.journal.read(|state| state.reservations.contains_key(place)) {
            self.journal.commit(vec![Record::ReservationLifted { place: place.clone() }]).await?;
            tracing::info!(store = %name, %place, "what a migration left there is given up");
        }
        Ok(self.describe_store(name).await)
    }
}
