//! The part of the API about volumes that are attached at other hosts.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Answer, Segment, body};
use crate::host::Host;

pub(super) fn routes() -> OpenApiRouter<Arc<Host>> {
    OpenApiRouter::new().routes(routes!(attach_volume)).routes(routes!(detach_volume))
}

/// Lets another host offer a volume of this host to its clients, whose requests it forwards. Answers when clients can connect
/// there.
#[utoipa::path(post, path = "/v1/volumes/{name}/attach", params(("name" = String, Path, description = "Name of the volume")),
    request_body = api::AttachVolume,
    responses((status = 200, description = "The volume, with its attachments", body = api::Volume)))]
async fn attach_volume(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::Volume> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host.attachments).attach(name, order)).await.map(Json)
}

/// Ends an attachment, at the host that gave it or at the one that offers the volume.
#[utoipa::path(post, path = "/v1/volumes/{name}/detach", params(("name" = String, Path, description = "Name of the volume")),
    request_body = api::DetachVolume,
    responses((status = 200, description = "What was ended", body = api::DetachedVolume)))]
async fn detach_volume(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::DetachedVolume> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host.attachments).detach(name, order)).await.map(Json)
}
