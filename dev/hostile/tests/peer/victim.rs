//! Daemons with volumes of known content.

use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread::JoinHandle;

use daemon::config::Overrides;
use daemon::{Config, Daemon, Folders};
use tempfile::TempDir;
use tokio::sync::oneshot;

pub(crate) const SIZE: u64 = 4 << 20;

/// A daemon in a folder of its own.
pub(crate) struct Victim {
    pub(crate) client: api::Client,
    folder: TempDir,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Victim {
    /// Starts a daemon whose host has this name.
    pub(crate) fn start(name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = format!(
            "data_dir = \"{0}/data\"\napi = \"unix:{0}/run/api.sock\"\n[hosts]\nlisten = [\"127.0.0.1:0\"]\n",
            folder.path().display()
        );
        let path = std::path::Path::new("test");
        let config = Config::parse(path, &text, &Overrides::default(), &Folders::of_this_user()).unwrap();
        let client = api::Client::new(api::Address::unix(folder.path().join("run/api.sock")).unwrap());
        let (stop, stopped) = oneshot::channel::<()>();
        let (ready, is_ready) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let daemon = Daemon::start(config).await.unwrap();
                ready.send(()).unwrap();
                let stopped = async {
                    let _ = stopped.await;
                };
                daemon.run(stopped).await.unwrap();
            });
        });
        is_ready.recv().unwrap();
        run(client.create_identity(&api::NewIdentity { name: name.to_owned() })).unwrap();
        Self { client, folder, stop: Some(stop), thread: Some(thread) }
    }

    pub(crate) fn invite(&self) -> String {
        let order = api::NewInvitation { lifetime_s: 3600, allow_machines: false };
        run(self.client.invite(&order)).unwrap().token
    }

    /// Makes a volume that is filled with a byte.
    pub(crate) fn volume(&self, name: &str, byte: u8) -> api::Volume {
        let image = self.file(name, &vec![byte; SIZE as usize]);
        let source = api::VolumeSource::Create {
            size_bytes: None,
            store: None,
            image: Some(image.display().to_string()),
            format: None,
        };
        let export = api::ExportSettings { read_only: false, ..Default::default() };
        run(self.client.create_volume(&api::NewVolume { name: name.into(), source, export })).unwrap()
    }

    /// Makes a file beside the data folder.
    pub(crate) fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// Checks that a volume is here, and that its image is filled with a byte.
    pub(crate) fn check(&self, name: &str, byte: u8) {
        let volume = run(self.client.volume(name)).unwrap();
        assert_eq!(volume.state, api::VolumeState::Serving, "{volume:?}");
        let mut content = vec![0; SIZE as usize];
        std::fs::File::open(&volume.image).unwrap().read_exact_at(&mut content, 0).unwrap();
        assert!(content.iter().all(|found| *found == byte), "{name} has been changed");
    }

    pub(crate) fn refused(&self, host: &str) -> u64 {
        run(self.client.peer(host)).unwrap().refused_requests
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        drop(self.stop.take());
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || !matches!(ended, Some(Err(_))), "a daemon has panicked");
    }
}

pub(crate) fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}
