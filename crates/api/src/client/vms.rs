//! The operations on VMs.

use hyper::Method;

use super::exchange::Segment;
use super::{Client, ClientError};
use crate::{AdoptVm, NewVm, RemovedVm, StartVm, StopVm, SuspendVm, Vm};

impl Client {
    /// Lists the VMs, by name.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn vms(&self) -> Result<Vec<Vm>, ClientError> {
        self.get("/v1/vms").await
    }

    /// Returns the VM of this name.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::VmNotFound`](crate::ErrorCode::VmNotFound).
    pub async fn vm(&self, name: &str) -> Result<Vm, ClientError> {
        self.get(&format!("/v1/vms/{}", Segment(name))).await
    }

    /// Adds a VM without starting it.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::VmUnsuitable`](crate::ErrorCode::VmUnsuitable), [`ErrorCode::VmExists`](crate::ErrorCode::VmExists).
    pub async fn add_vm(&self, vm: &NewVm) -> Result<Vm, ClientError> {
        self.send(Method::POST, "/v1/vms", Some(vm)).await
    }

    /// Starts a VM, or restores it if it is suspended, and returns it once its QEMU answers.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::VmWrongState`](crate::ErrorCode::VmWrongState), [`ErrorCode::VmFailed`](crate::ErrorCode::VmFailed).
    pub async fn start_vm(&self, name: &str, how: StartVm) -> Result<Vm, ClientError> {
        let StartVm { discard_memory } = how;
        let path = format!("/v1/vms/{}/start?discard_memory={discard_memory}", Segment(name));
        self.send(Method::POST, &path, None::<&()>).await
    }

    /// Suspends a VM to disk, and returns it once its QEMU has ended.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::VmWrongState`](crate::ErrorCode::VmWrongState), [`ErrorCode::VmFailed`](crate::ErrorCode::VmFailed).
    /// The VM then goes on.
    pub async fn suspend_vm(&self, name: &str, how: SuspendVm) -> Result<Vm, ClientError> {
        self.send(Method::POST, &format!("/v1/vms/{}/suspend", Segment(name)), Some(&how)).await
    }

    /// Begins to start all VMs that start at a boot and do not run, in their order. Returns these.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn start_all_vms(&self) -> Result<Vec<Vm>, ClientError> {
        self.send(Method::POST, "/v1/vm-starts", None::<&()>).await
    }

    /// Stops a VM, and returns it once its QEMU has ended.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::VmWrongState`](crate::ErrorCode::VmWrongState).
    pub async fn stop_vm(&self, name: &str, how: StopVm) -> Result<Vm, ClientError> {
        self.send(Method::POST, &format!("/v1/vms/{}/stop", Segment(name)), Some(&how)).await
    }

    /// Adopts disks of a running VM, and returns it once they are served.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::VmUnsuitable`](crate::ErrorCode::VmUnsuitable), [`ErrorCode::VmFailed`](crate::ErrorCode::VmFailed). The VM then has its disks as before.
    pub async fn adopt_vm(&self, name: &str, order: &AdoptVm) -> Result<Vm, ClientError> {
        self.send(Method::POST, &format!("/v1/vms/{}/adopt", Segment(name)), Some(order)).await
    }

    /// Gives a VM its disks back as plain files, and returns it once it has them.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::VmFailed`](crate::ErrorCode::VmFailed).
    pub async fn release_vm(&self, name: &str) -> Result<Vm, ClientError> {
        self.send(Method::POST, &format!("/v1/vms/{}/release", Segment(name)), None::<&()>).await
    }

    /// Resumes a paused VM, and returns it once it runs.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::VmFailed`](crate::ErrorCode::VmFailed).
    pub async fn resume_vm(&self, name: &str) -> Result<Vm, ClientError> {
        self.send(Method::POST, &format!("/v1/vms/{}/resume", Segment(name)), None::<&()>).await
    }

    /// Removes a VM that does not run; its volumes stay.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::VmWrongState`](crate::ErrorCode::VmWrongState).
    pub async fn remove_vm(&self, name: &str) -> Result<RemovedVm, ClientError> {
        self.send(Method::DELETE, &format!("/v1/vms/{}", Segment(name)), None::<&()>).await
    }
}
