//! Listening on an address that may not exist yet.
//!
//! A link may come up after the daemon, or a predecessor may still hold the port. The address is listened on as soon as that
//! works, and nothing else waits for it.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::time::sleep;

use crate::accept;
use crate::context::Context;
use crate::socket;

const RETRY_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Listening {
    address: SocketAddr,
    /// The address with its real port, or why it is not listened on yet.
    state: Mutex<Result<SocketAddr, String>>,
}

impl Listening {
    /// Begins to listen: before it returns if that works at once, otherwise as soon as it does.
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

    /// Returns the address with its real port, or the address that is not listened on yet and the reason.
    pub(crate) fn state(&self) -> Result<SocketAddr, (SocketAddr, String)> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.clone().map_err(|problem| (self.address, problem))
    }

    /// Tries once. A failure is logged once for each cause.
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
                    tracing::info!(%address, "other hosts can now reach this one at the address");
                }
                *state = Ok(real);
                Some(listener)
            }
            Err(error) => {
                let problem = error.to_string();
                if state.as_ref() != Err(&problem) {
                    tracing::warn!(%address, %problem, "cannot listen on the address yet; trying every second");
                }
                *state = Err(problem);
                None
            }
        }
    }
}
