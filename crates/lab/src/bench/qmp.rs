//! A client of QEMU's machine protocol: commands one after the other, events skipped.

use std::path::Path;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

/// No answer that is of use here is longer.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// A connection.
#[derive(Debug)]
pub(super) struct Qmp {
    stream: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects to a monitor and greets it.
    ///
    /// # Errors
    /// If nobody listens there, or it is no monitor.
    pub(super) async fn connect(socket: &Path) -> anyhow::Result<Self> {
        let mut qmp = Self { stream: BufReader::new(UnixStream::connect(socket).await?) };
        let greeting = qmp.read().await?;
        if greeting.get("QMP").is_none() {
            bail!("the monitor does not greet as QEMU does: {greeting}");
        }
        qmp.execute("qmp_capabilities", json!({})).await?;
        Ok(qmp)
    }

    /// Executes a command and returns what it returns.
    ///
    /// # Errors
    /// What the monitor says; that it has gone.
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
        }
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

    /// A monitor that says `lines` whatever it hears.
    async fn connect(lines: &'static str) -> anyhow::Result<Qmp> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let answer = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(lines.as_bytes()).await.unwrap();
            // What the client sends must be read, or the end of the connection is a reset.
            let mut heard = Vec::new();
            stream.shutdown().await.unwrap();
            let _ = stream.read_to_end(&mut heard).await;
        };
        let command = async {
            let mut qmp = Qmp::connect(&path).await?;
            qmp.execute("query-jobs", json!({})).await?;
            Ok(qmp)
        };
        tokio::join!(command, answer).0
    }

    #[tokio::test]
    async fn events_are_skipped_and_errors_are_told() {
        connect("{\"QMP\": {}}\n{\"return\": {}}\n{\"event\": \"X\"}\n{\"return\": []}\n").await.unwrap();
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
