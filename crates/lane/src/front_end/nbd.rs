//! NBD, over the volume's unix socket and, where it has one, its port.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::Handle;
use block::engine::Engine;
use export::nbd;

use super::FrontEnd;
use crate::control::LaneFuture;
use crate::fencing::Presence;
use crate::handle::LaneSettings;
use crate::stack::ClientStacks;

pub use export::nbd::{
    Access, ClientCertificates, CredentialFiles, Credentials, CredentialsError, Encryption,
};

/// Serves one volume to NBD clients.
pub(crate) struct NbdFrontEnd {
    server: nbd::Server,
}

impl NbdFrontEnd {
    /// Makes the server, and has it accept clients on the unix socket, and on the port if there is one.
    pub(crate) fn begin(
        handle: &Handle,
        engine: &Rc<dyn Engine>,
        settings: &LaneSettings,
        stacks: ClientStacks,
        unix: OwnedFd,
        tcp: Option<(OwnedFd, Encryption)>,
    ) -> Self {
        let export = nbd::Export {
            name: settings.name.clone(),
            description: format!("Sterna volume {}", settings.name),
            device: stacks.volume(),
            connect: Some(Box::new(move |caller| stacks.of(Rc::new(caller)))),
            access: settings.access,
        };
        let standard = nbd::Limits::STANDARD;
        let connections_max = settings.connections_max.unwrap_or(standard.connections_max);
        let limits = nbd::Limits { connections_max, ..standard };
        let exports = nbd::Exports::new([export]);
        let server = nbd::Server::new(handle.clone(), Rc::clone(engine), exports, limits);
        server.serve(Arc::new(unix));
        if let Some((listener, encryption)) = tcp {
            server.serve_encrypted(Arc::new(listener), encryption);
        }
        Self { server }
    }
}

impl FrontEnd for NbdFrontEnd {
    fn clients(&self) -> usize {
        self.server.connections().len()
    }

    fn drain(&self, deadline: Duration) -> LaneFuture<usize> {
        let server = self.server.clone();
        Box::pin(async move { server.shutdown(deadline).await.connections_cut })
    }
}

impl Presence for nbd::Caller {
    fn is_there(&self) -> bool {
        !self.has_left()
    }
}
