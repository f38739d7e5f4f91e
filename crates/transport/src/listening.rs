//! Listening on an address that may not be there yet.
//!
//! A link that comes up after the daemon, or a port that its predecessor still holds, is listened on as soon as that works.
//! Until then nothing else waits for it.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::time::sleep;

use crate::accept;
use crate::context::Context;
use crate::socket;

/// Time between two attempts to listen on an address.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// One address that others are to reach this host at.
#[derive(Debug)]
pub(crate) struct Listening {
    address: SocketAddr,
    /// The address with its real port, or why it is not listened on yet.
    state: Mutex<Result<SocketAddr, String>>,
}

impl Listening {
    /// Begins to listen: before this returns if that works at once, otherwise as soon as it does.
    pub(crate) fn begin(context: &Arc<Context>, address: SocketAddr) -> Arc<Self> {
        let listening = Arc::new(Self { address, state: Mutex::new(Err(String::new())) });
        if let Some(listener) = listening.attempt(context) {
            context.runtime.spawn(accept::run(Arc::clone(context), listener));
            return listening;
        }
        let (me, retried) = (Arc::clone(&listening), Arc::clone(context));
        context.runtime.spawn(async move {
            loop {
                sleep(RETRY_INTERVAL).await;
                if let Some(listener) = me.attempt(&retried) {
                    return accept::run(retried, listener).await;
                }
            }
        });
        listening
    }

    /// The address that is listened on, with its real port; or which one is not yet, and why.
    pub(crate) fn state(&self) -> Result<SocketAddr, (SocketAddr, String)> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.clone().map_err(|problem| (self.address, problem))
    }

    /// Tries once. What is the matter is logged once for each cause.
    fn attempt(&self, context: &Context) -> Option<TcpListener> {
        let address = self.address;
        let _entered = context.runtime.enter();
        let tried = socket::listen(address).and_then(|listener| {
            let real = listener.local_addr()?;
            Ok((TcpListener::from_std(listener)?, real))
        });
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match tried {
            Ok((listener, real)) => {
                if state.as_ref().is_err_and(|problem| !problem.is_empty()) {
                    tracing::info!(%address, "other hosts can reach this one at the address from now on");
                }
                *state = Ok(real);
                Some(listener)
            }
            Err(error) => {
                let problem = error.to_string();
                if state.as_ref() != Err(&problem) {
                    tracing::warn!(%address, %problem, "the address cannot be listened on yet; it is tried every second");
                }
                *state = Err(problem);
                None
            }
        }
    }
}
