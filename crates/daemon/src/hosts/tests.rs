//! Tests of hosts that are removed while their messages arrive.

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, Weak, mpsc};
use std::time::Duration;

use bytes::Bytes;
use transport::{ChannelId, Delivery, Incarnation, Message, Priority, Receiver, Session};

use super::{Hosts, Trust};
use crate::audit::Audit;
use crate::config::Overrides;
use crate::{Config, Folders};

/// Longer than anything here takes that does not hang.
const PATIENCE: Duration = Duration::from_secs(20);

/// Asks for this host's identity while it receives a message, like the real receiver, while another host is being removed.
#[derive(Default)]
struct Asks {
    hosts: OnceLock<Weak<Hosts>>,
    is_told: Mutex<Option<mpsc::Sender<()>>>,
}

impl Receiver for Asks {
    fn connected(&self, _: &Session, _: Incarnation) {}

    fn delivered(&self, _: &Session, _: Delivery) {
        let Some(hosts) = self.hosts.get().and_then(Weak::upgrade) else { return };
        if let Some(is_told) = self.is_told.lock().unwrap().take() {
            is_told.send(()).unwrap();
            while hosts.find("b").is_some() {
                std::thread::yield_now();
            }
            // The host is unknown already: the session is being closed, which sends no notification.
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(hosts.own().is_some());
    }

    fn disconnected(&self, _: transport::HostId, _: &str) {}

    fn restarted(&self, _: &Session, _: Incarnation, _: Incarnation) {}
}

fn start(folder: &Path, name: &str, receiver: Arc<dyn Receiver>) -> Arc<Hosts> {
    let text = format!(
        "data_dir = \"{0}/{name}\"\napi = \"unix:{0}/{name}.sock\"\n[hosts]\nlisten = [\"127.0.0.1:0\"]\n",
        folder.display()
    );
    std::fs::create_dir(folder.join(name)).unwrap();
    let folders = Folders::of_this_user();
    let config = Config::parse(Path::new("test"), &text, &Overrides::default(), &folders).unwrap();
    let hosts = Hosts::start(&config, Audit::begin(&config.data_dir), receiver);
    hosts.create_identity(name).unwrap();
    hosts
}

#[test]
fn a_host_is_removed_while_a_message_of_it_is_judged() {
    let folder = tempfile::tempdir().unwrap();
    let asks = Arc::<Asks>::default();
    let one = start(folder.path(), "a", Arc::clone(&asks) as Arc<dyn Receiver>);
    let other = start(folder.path(), "b", Arc::<Asks>::default());
    let token = one.invite(60, Trust::default()).unwrap();
    other.join(&token.to_string(), None, None).unwrap();
    let (is_told, told) = mpsc::channel();
    asks.hosts.set(Arc::downgrade(&one)).unwrap();
    *asks.is_told.lock().unwrap() = Some(is_told);
    let session = other.session_with(one.own().unwrap()).unwrap();
    session.send(Message::new(ChannelId(7), Priority::Control, Bytes::new(), Bytes::new()).unwrap());
    told.recv_timeout(PATIENCE).unwrap();
    let (is_removed, removed) = mpsc::channel();
    let removing = Arc::clone(&one);
    std::thread::spawn(move || is_removed.send(removing.remove("b").is_ok()));
    assert_eq!(
        removed.recv_timeout(PATIENCE),
        Ok(true),
        "whoever judges waits for whoever removes, and that for it"
    );
    other.stop();
    one.stop();
}
