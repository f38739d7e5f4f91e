//! Serves NBD on the volume's unix socket and, if it has one, its port.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::Handle;
use block::engine::Engine;
use export::nbd;

use super::FrontEnd;
use crate::control::LaneFuture;
use crate::fencing::Presence;
use crate::handle::{LaneSettings, NbdListeners};
use crate::stack::ClientStacks;

pub use export::nbd::negotiation::AllocationContext;
pub use export::nbd::{
    Access, ClientCertificates, ClientProcess, CredentialFiles, Credentials, CredentialsError, Encryption,
    Offer, PassedConnection, PassedSession, ReplyStyle,
};

pub(crate) struct NbdFrontEnd {
    server: nbd::Server,
}

impl NbdFrontEnd {
    /// Makes the server, which accepts clients on the unix socket, and on the port if there is one.
    /// Adopts the passed connections.
    pub(crate) fn begin(
        handle: &Handle,
        engine: &Rc<dyn Engine>,
        settings: &LaneSettings,
        stacks: ClientStacks,
        NbdListeners { unix, tcp, passed }: NbdListeners,
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
        let encryption = tcp.as_ref().map_or(Encryption::Off, |(_, encryption)| encryption.clone());
        for connection in passed {
            // A local process came by the unix socket, where there is no encryption.
            let encryption = if connection.is_local() { &Encryption::Off } else { &encryption };
            server.take_up(connection, encryption);
        }
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

    fn processes(&self) -> Vec<ClientProcess> {
        let connections = self.server.connections();
        let use_it = connections.iter().filter(|info| info.phase != nbd::ConnectionPhase::Negotiating);
        use_it.filter_map(|info| info.process).collect()
    }

    fn drain(&self, deadline: Duration) -> LaneFuture<usize> {
        let server = self.server.clone();
        Box::pin(async move { server.shutdown(deadline).await.connections_cut })
    }

    fn pass(&self, deadline: Duration) -> LaneFuture<(usize, Vec<PassedConnection>)> {
        let server = self.server.clone();
        Box::pin(async move {
            let (drained, passed) = server.pass(deadline).await;
            (drained.connections_cut, passed)
        })
    }
}

impl Presence for nbd::Caller {
    fn is_there(&self) -> bool {
        !self.has_left()
    }
}
