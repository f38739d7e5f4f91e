//! The operations on evacuations.

use hyper::Method;

use super::exchange::Segment;
use super::{Client, ClientError};
use crate::{Evacuation, Host, NewEvacuation, SetHost, SetVm, Vm};

impl Client {
    /// Begins to empty the host.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn evacuate(&self, order: &NewEvacuation) -> Result<Evacuation, ClientError> {
        self.send(Method::POST, "/v1/evacuation", Some(order)).await
    }

    /// Returns what an evacuation would do.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn plan_evacuation(&self, order: &NewEvacuation) -> Result<Evacuation, ClientError> {
        self.send(Method::POST, "/v1/evacuation/plan", Some(order)).await
    }

    /// Returns the evacuation that runs, or the last one.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::EvacuationNotFound`](crate::ErrorCode::EvacuationNotFound).
    pub async fn evacuation(&self) -> Result<Evacuation, ClientError> {
        self.get("/v1/evacuation").await
    }

    /// Aborts the evacuation that runs.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::EvacuationNotFound`](crate::ErrorCode::EvacuationNotFound).
    pub async fn abort_evacuation(&self) -> Result<Evacuation, ClientError> {
        self.send(Method::POST, "/v1/evacuation/abort", None::<&()>).await
    }

    /// Changes the host.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn set_host(&self, change: SetHost) -> Result<Host, ClientError> {
        self.send(Method::PATCH, "/v1/host", Some(&change)).await
    }

    /// Changes a VM.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::VmNotFound`](crate::ErrorCode::VmNotFound).
    pub async fn set_vm(&self, name: &str, change: &SetVm) -> Result<Vm, ClientError> {
        self.send(Method::PATCH, &format!("/v1/vms/{}", Segment(name)), Some(change)).await
    }
}
