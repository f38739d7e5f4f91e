//! A monitor without a QEMU: it answers as a test orders. For unit tests only.

use std::path::PathBuf;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

pub(super) const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "x"}, "capabilities": ["oob"]}}"#;

#[derive(Clone, Debug)]
pub(super) enum Reply {
    Return(Value),
    Refuse(&'static str, &'static str),
    Event(&'static str, Value),
    Raw(Vec<u8>),
    Close,
}

/// A monitor. Each client is served by one task, which ends with the test's runtime.
#[derive(Debug)]
pub(super) struct FakeMonitor {
    folder: TempDir,
    spontaneous: mpsc::UnboundedSender<Reply>,
    heard: mpsc::UnboundedReceiver<(String, Value)>,
}

impl FakeMonitor {
    /// Listens for one client, and answers each command as `answer` says. It agrees on capabilities by itself.
    pub(super) fn start(mut answer: impl FnMut(&str, &Value) -> Vec<Reply> + Send + 'static) -> Self {
        Self::start_with(GREETING, move |command, arguments| match command {
            "qmp_capabilities" => vec![Reply::Return(json!({}))],
            _ => answer(command, arguments),
        })
    }

    /// Listens likewise with another greeting; `answer` also gets the capabilities.
    pub(super) fn start_with(
        greeting: &'static str,
        mut answer: impl FnMut(&str, &Value) -> Vec<Reply> + Send + 'static,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("qmp")).unwrap();
        let (spontaneous, mut orders) = mpsc::unbounded_channel();
        let (heard_sender, heard) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = BufReader::new(stream);
            stream.write_all(format!("{greeting}\n").as_bytes()).await.unwrap();
            loop {
                let mut line = String::new();
                let replies = tokio::select! {
                    read = stream.read_line(&mut line) => {
                        if !read.is_ok_and(|bytes| bytes > 0) {
                            return;
                        }
                        let command: Value = serde_json::from_str(&line).unwrap();
                        let name = command["execute"].as_str().unwrap();
                        let _ = heard_sender.send((name.to_owned(), command["arguments"].clone()));
                        answer(name, &command["arguments"]).into_iter().map(|reply| (reply, command["id"].clone())).collect()
                    }
                    Some(reply) = orders.recv() => vec![(reply, Value::Null)],
                };
                for (reply, identity) in replies {
                    if !act(&mut stream, reply, &identity).await {
                        return;
                    }
                }
            }
        });
        Self { folder, spontaneous, heard }
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.folder.path().join("qmp")
    }

    pub(super) fn act(&self, reply: Reply) {
        self.spontaneous.send(reply).unwrap();
    }

    pub(super) async fn heard(&mut self) -> (String, Value) {
        self.heard.recv().await.unwrap()
    }
}

async fn act(stream: &mut BufReader<UnixStream>, reply: Reply, identity: &Value) -> bool {
    let message = match reply {
        Reply::Return(value) => json!({ "return": value, "id": identity }),
        Reply::Refuse(class, reason) => {
            json!({ "error": { "class": class, "desc": reason }, "id": identity })
        }
        Reply::Event(name, data) => json!({ "event": name, "data": data }),
        Reply::Raw(bytes) => return stream.write_all(&bytes).await.is_ok(),
        Reply::Close => return false,
    };
    // Each line ends as QEMU's do.
    stream.write_all(format!("{message}\r\n").as_bytes()).await.is_ok()
}
