//! A client of QEMU's machine protocol: commands one after the other, and events, which are kept for later queries.

use std::collections::VecDeque;
use std::path::Path;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

/// Longer than every answer that is used here.
const ANSWER_BYTES_MAX: u64 = 1 << 20;
/// Beyond this number, the oldest unread events are dropped.
const EVENTS_MAX: usize = 1000;

#[derive(Debug)]
pub(super) struct Qmp {
    stream: BufReader<UnixStream>,
    /// Unread events, the oldest first.
    events: VecDeque<Value>,
}

impl Qmp {
    pub(super) async fn connect(socket: &Path) -> anyhow::Result<Self> {
        let mut qmp =
            Self { stream: BufReader::new(UnixStream::connect(socket).await?), events: VecDeque::new() };
        let greeting = qmp.read().await?;
        if greeting.get("QMP").is_none() {
            bail!("the monitor does not greet as QEMU does: {greeting}");
        }
        qmp.execute("qmp_capabilities", json!({})).await?;
        Ok(qmp)
    }

    /// Executes a command and returns its result. Fails with the monitor's error, or if it has gone.
    pub(super) async fn execute(&mut self, command: &str, arguments: Value) -> anyhow::Result<Value> {
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        let context = || format!("QEMU's command {command}");
        self.stream.write_all(line.as_bytes()).await.with_context(context)?;
        loop {
            let mut answer = self.read().await.with_context(context)?;
            if let Some(error) = answer.get("error") {
                bail!("{} failed: {}", context(), error["desc"].as_str().unwrap_or("no reason is given"));
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if self.events.len() == EVENTS_MAX {
                self.events.pop_front();
            }
            self.events.push_back(answer);
        }
    }

    /// Waits for the next event of a name and returns its data. Events of other names are dropped.
    pub(super) async fn next_event(&mut self, name: &str) -> anyhow::Result<Value> {
        Ok(self.next(name).await?["data"].take())
    }

    async fn next(&mut self, name: &str) -> anyhow::Result<Value> {
        loop {
            let message = match self.events.pop_front() {
                Some(event) => event,
                None => self.read().await.with_context(|| format!("wait for QEMU's event {name}"))?,
            };
            if message["event"] == name {
                return Ok(message);
            }
        }
    }

    /// Waits for an event and returns its time by the host's clock, in seconds since 1970.
    pub(super) async fn when(&mut self, name: &str) -> anyhow::Result<f64> {
        let event = self.next(name).await?;
        let part = |part: &str| event["timestamp"][part].as_f64().context("QEMU's event has no time");
        Ok(part("seconds")? + part("microseconds")? / 1e6)
    }

    async fn read(&mut self) -> anyhow::Result<Value> {
        let mut line = String::new();
        let length = (&mut self.stream).take(ANSWER_BYTES_MAX).read_line(&mut line).await?;
        if length == 0 {
            bail!("the monitor has closed the connection");
        }
        serde_json::from_str(&line).context("read the monitor's answer")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A monitor that sends `lines`, whatever it receives.
    async fn connect(lines: &'static str) -> anyhow::Result<Qmp> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(lines.as_bytes()).await.unwrap();
            stream.shutdown().await.unwrap();
            // Read what the client sends; otherwise the connection would end with a reset.
            let _ = stream.read_to_end(&mut Vec::new()).await;
        });
        let mut qmp = Qmp::connect(&path).await?;
        qmp.execute("query-jobs", json!({})).await?;
        Ok(qmp)
    }

    #[tokio::test]
    async fn events_are_kept_and_errors_are_told() {
        let lines = "{\"QMP\": {}}\n{\"return\": {}}\n{\"event\": \"X\"}\n{\"event\": \"Y\", \"data\": 1}\n{\"return\": []}\n{\"event\": \"Y\", \"data\": 2}\n";
        let mut qmp = connect(lines).await.unwrap();
        assert_eq!(
            (qmp.next_event("Y").await.unwrap(), qmp.next_event("Y").await.unwrap()),
            (1.into(), 2.into())
        );
        assert!(qmp.next_event("Y").await.is_err());
        let error = connect("{\"QMP\": {}}\n{\"return\": {}}\n{\"error\": {\"desc\": \"no\"}}\n").await;
        assert!(error.unwrap_err().to_string().contains("query-jobs failed: no"));
    }

    #[tokio::test]
    async fn what_is_no_monitor_is_refused() {
        assert!(connect("hello\n").await.is_err());
        assert!(connect("{}\n").await.is_err());
        let gone = connect("{\"QMP\": {}}\n{\"return\": {}}\n").await;
        assert!(format!("{:#}", gone.unwrap_err()).contains("closed the connection"));
    }
}
