//! The part of the API about VMs.

use std::sync::Arc;

use api::Role;
use axum::extract::{Request, State};
use axum::http::{StatusCode, Uri};
use axum::{Extension, Json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Answer, Caller, Segment, body, query};
use crate::error::RequestError;
use crate::grants::Standing;
use crate::host::Host;
use crate::vms::Paths;

pub(super) fn routes() -> OpenApiRouter<Arc<Host>> {
    OpenApiRouter::new()
        .routes(routes!(list_vms, add_vm))
        .routes(routes!(show_vm, change_vm, remove_vm))
        .routes(routes!(start_all_vms))
        .routes(routes!(start_vm))
        .routes(routes!(stop_vm))
        .routes(routes!(suspend_vm))
        .routes(routes!(adopt_vm))
        .routes(routes!(release_vm))
        .routes(routes!(resume_vm))
}

/// Lists the VMs by name.
#[utoipa::path(get, path = "/v1/vms", responses((status = 200, description = "The VMs", body = [api::Vm])))]
async fn list_vms(State(host): State<Arc<Host>>) -> Json<Vec<api::Vm>> {
    Json(host.vm_orders.describe_vms().await)
}

/// Adds a VM without starting it.
#[utoipa::path(post, path = "/v1/vms", request_body = api::NewVm,
    responses((status = 201, description = "The VM", body = api::Vm)))]
async fn add_vm(
    State(host): State<Arc<Host>>,
    request: Request,
) -> Result<(StatusCode, Json<api::Vm>), RequestError> {
    let order = body(request).await?;
    let vm = host.operate(Arc::clone(&host.vm_orders).add_vm(order)).await?;
    Ok((StatusCode::CREATED, Json(vm)))
}

/// Describes one VM by its name.
#[utoipa::path(get, path = "/v1/vms/{name}", params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, description = "The VM", body = api::Vm)))]
async fn show_vm(State(host): State<Arc<Host>>, Segment(name): Segment) -> Answer<api::Vm> {
    host.vm_orders.describe_vm(&name).await.map(Json)
}

/// Changes a VM: its priority in an evacuation, and whether and when it starts after a boot.
#[utoipa::path(patch, path = "/v1/vms/{name}", params(("name" = String, Path, description = "Name of the VM")),
    request_body = api::SetVm, responses((status = 200, description = "The VM", body = api::Vm)))]
async fn change_vm(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::Vm> {
    let change = body(request).await?;
    host.operate(Arc::clone(&host.vm_orders).set_vm(name, change)).await.map(Json)
}

/// Forgets a stopped VM; its volumes stay.
#[utoipa::path(delete, path = "/v1/vms/{name}", params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, description = "What has been forgotten", body = api::RemovedVm)))]
async fn remove_vm(State(host): State<Arc<Host>>, Segment(name): Segment) -> Answer<api::RemovedVm> {
    host.operate(Arc::clone(&host.vm_orders).remove_vm(name)).await.map(Json)
}

/// Starts a VM: restores it if it is suspended, or else boots it. Answers when its QEMU does.
#[utoipa::path(post, path = "/v1/vms/{name}/start",
    params(("name" = String, Path, description = "Name of the VM"), api::StartVm),
    responses((status = 200, description = "The VM", body = api::Vm)))]
async fn start_vm(State(host): State<Arc<Host>>, Segment(name): Segment, uri: Uri) -> Answer<api::Vm> {
    let how = query(&uri)?;
    host.operate(Arc::clone(&host.vm_orders).start_vm(name, how)).await.map(Json)
}

/// Suspends a VM to disk: its memory is written to a file, and its QEMU ends. Answers when it has ended.
#[utoipa::path(post, path = "/v1/vms/{name}/suspend", params(("name" = String, Path, description = "Name of the VM")),
    request_body = api::SuspendVm, responses((status = 200, description = "The VM", body = api::Vm)))]
async fn suspend_vm(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::Vm> {
    let how = body(request).await?;
    host.operate(Arc::clone(&host.vm_orders).suspend_vm(name, how)).await.map(Json)
}

/// Begins to start all VMs that start at a boot of the host and do not run, in their order. Answers with these.
#[utoipa::path(post, path = "/v1/vm-starts",
    responses((status = 202, description = "The VMs that are to be started", body = [api::Vm])))]
async fn start_all_vms(
    State(host): State<Arc<Host>>,
) -> Result<(StatusCode, Json<Vec<api::Vm>>), RequestError> {
    let begun = host.operate(Arc::clone(&host.vm_orders).start_all()).await?;
    Ok((StatusCode::ACCEPTED, Json(begun)))
}

/// Stops a VM. Answers when its QEMU has ended.
#[utoipa::path(post, path = "/v1/vms/{name}/stop", params(("name" = String, Path, description = "Name of the VM")),
    request_body = api::StopVm, responses((status = 200, description = "The VM", body = api::Vm)))]
async fn stop_vm(State(host): State<Arc<Host>>, Segment(name): Segment, request: Request) -> Answer<api::Vm> {
    let how = body(request).await?;
    host.operate(Arc::clone(&host.vm_orders).stop_vm(name, how)).await.map(Json)
}

/// Adopts the disks of a running VM. Answers when they are served.
#[utoipa::path(post, path = "/v1/vms/{name}/adopt", params(("name" = String, Path, description = "Name for the VM")),
    request_body = api::AdoptVm, responses((status = 200, description = "The VM", body = api::Vm)))]
async fn adopt_vm(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    caller: Option<Extension<Caller>>,
    request: Request,
) -> Answer<api::Vm> {
    let order = body(request).await?;
    // A client without a grant uses the API's socket.
    let paths = match caller.map(|Extension(Caller(who))| who.map(|who| who.standing)) {
        None | Some(Some(Standing::Has(Role::Admin))) => Paths::Told,
        Some(_) => Paths::Hidden,
    };
    host.operate(Arc::clone(&host.vm_orders).adopt_vm(name, order, paths)).await.map(Json)
}

/// Gives a VM its disks back as plain files. Answers when it uses them.
#[utoipa::path(post, path = "/v1/vms/{name}/release", params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, description = "The VM, as it was before", body = api::Vm)))]
async fn release_vm(State(host): State<Arc<Host>>, Segment(name): Segment) -> Answer<api::Vm> {
    host.operate(Arc::clone(&host.vm_orders).release_vm(name)).await.map(Json)
}

/// Resumes a paused VM. Answers when it runs.
#[utoipa::path(post, path = "/v1/vms/{name}/resume", params(("name" = String, Path, description = "Name of the VM")),
    responses((status = 200, description = "The VM", body = api::Vm)))]
async fn resume_vm(State(host): State<Arc<Host>>, Segment(name): Segment) -> Answer<api::Vm> {
    host.operate(Arc::clone(&host.vm_orders).resume_vm(name)).await.map(Json)
}
